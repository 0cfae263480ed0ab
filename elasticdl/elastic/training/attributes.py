"""Values that a script's objects keep in their attributes: which of them are sent to other workers, and how.

Plain data are sent whole. Of variables, metrics and random streams only the content is sent: the receiver puts it into its own object.
Objects of the script's own classes are searched in turn. Nothing else can be sent; what of it a user may count on is named.

A path says where a value is kept: attribute names and keys with dots between them. `CONTENT` stands before the path of a content.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import io
import logging
import os
import random
import re
import stat
import sys
import sysconfig
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from elasticdl.elastic.training.plain_data import IsForeign, is_plain

CONTENT = "="  # no attribute has such a name
MOST_NESTED = 4
OF_THE_WORKER = re.compile(
    r"(^|_)(rank|world_size|main_process)$|(^|_)is_(global_zero|rank_zero|main|master)"
)  # by its name
TEXTS = re.compile(r"(\"{3}|'{3}).*?\1", re.DOTALL)  # of documentation, with examples
# Of one attribute or several: what stands before the sign.
ASSIGNMENT = re.compile(
    r"^[ \t]*((?:[\w.]+\s*,\s*)*[\w.]*\.\w+)(?:[ \t]*:[^=\n]+)?[ \t]*[-+*/%|&^@]*=(?!=)", re.MULTILINE
)
LAST_STANDARD_FILE = 2  # the number of stderr
HOLD_ATTRIBUTES = (SimpleNamespace, argparse.Namespace)
OF_THE_PROCESS = (
    *(ModuleType, type, io.IOBase, logging.Logger, threading.Thread, threading.Event, type(threading.Lock())),
)


@dataclass(frozen=True, slots=True)
class Content:
    """How the content of a kind of objects is taken, and put."""

    take: Callable[[Any], Any]
    put: Callable[[Any, Any], object]


@dataclass(frozen=True, slots=True)
class Kinds:
    """How the objects of a framework are treated.

    ``assigned``: given a present value and an array of the framework's that is to replace it, returns what to set. ``holders``: are searched
    as objects of the script's own are, but for their attributes of the ``foreign`` names.
    """

    content_of: Callable[[Any], Content | None] = lambda _: None
    of_the_process: tuple[type, ...] = ()
    is_foreign: IsForeign = lambda _: False
    assigned: Callable[[Any, Any], Any] = lambda _, value: value
    holders: tuple[type, ...] = ()
    foreign: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Spot:
    """A place where something is kept. ``owner``: the attributes of an object, a dict or a list."""

    path: str
    owner: Any
    key: Any
    value: Any
    travels: bool = True
    content: Content | None = None

    def taken(self) -> Any:
        return self.value if self.content is None else self.content.take(self.value)


def spots(
    holder: Any,
    kinds: Kinds,
    foreign: Iterable[str] = (),
    *,
    others: Iterable[Any] = (),
    entered: list[tuple[Any, Any, Any]] | None = None,
) -> Iterator[Spot]:
    """All that an object keeps, without the attributes of the ``foreign`` names and without ``others``.

    ``entered``: gets each object that is searched, with its owner and key.
    """
    names = [name for name in vars(holder) if name not in foreign]
    walk = _Walk(kinds, {id(holder), *map(id, others)}, [] if entered is None else entered)
    return walk.through(vars(holder), names, "", 0)


def is_open_file(value: Any) -> bool:
    """Whether it may be the number of a file that this process has open: in another process that is another file, or a socket."""
    if type(value) is not int or value <= LAST_STANDARD_FILE:
        return False
    try:
        return stat.S_ISREG(os.fstat(value).st_mode)
    except (OSError, OverflowError):
        return False


def take(holder: Any, kinds: Kinds, foreign: Iterable[str] = (), *, copy: bool = True) -> dict[str, Any]:
    """Everything of an object that travels, by path."""
    found = ((spot.path, spot.taken()) for spot in spots(holder, kinds, foreign) if spot.travels)
    return {path: deepcopy(value) if copy else value for path, value in found}


def left_behind(found: Iterable[Spot], kinds: Kinds) -> Iterator[Spot]:
    """What does not travel, although a user may count on it."""
    silent = (*OF_THE_PROCESS, *kinds.of_the_process)
    return (spot for spot in found if not (spot.travels or callable(spot.value) or isinstance(spot.value, silent)))


def put(holder: Any, path: str, value: Any, kinds: Kinds) -> bool:
    """Put a value that `take` gave, perhaps on another worker, at this path of an object. False: the object has no such place."""
    *steps, last = path.removeprefix(CONTENT).split(".")
    owner: Any = vars(holder)
    for step in steps:
        owner = _entered(owner, step)
        if owner is None:
            return False
    key = _key(owner, last)
    present = owner[key] if _holds(owner, key) else None
    if path.startswith(CONTENT):
        content = _content_of(present, kinds)
        if content is not None:
            content.put(present, value)
        return content is not None
    if isinstance(owner, tuple) or (isinstance(owner, list) and not _holds(owner, key)):
        return False
    owner[key] = assigned(present, value, kinds)
    return True


def assigned(present: Any, value: Any, kinds: Kinds) -> Any:
    """What to set in the place of ``present``: where possible ``present`` itself with the new content, as other objects may hold it, too."""
    if type(present) is not type(value) or present is value:
        return value
    alike = all(getattr(present, name, None) == getattr(value, name, None) for name in ("default_factory", "maxlen"))
    if not isinstance(present, list | dict | set | deque) or not alike:
        return kinds.assigned(present, value)
    items = dict(value) if isinstance(value, dict) else list(value)  # no pairs: a Counter would count them
    present.clear()
    (present.extend if isinstance(present, list | deque) else present.update)(items)
    return present


@functools.cache
def set_by(kind: Any, packages: tuple[str, ...]) -> frozenset[str]:
    """Names of the attributes that the source of these packages sets, in all classes that ``kind`` is derived from."""
    names: set[str] = set()
    for each in kind.__mro__:
        if each.__module__.partition(".")[0] in packages:
            with contextlib.suppress(OSError, TypeError, KeyError):  # there is no source, or the class is compiled
                # Text alone: in Python 3.11 two threads that parse at once fail, and `inspect` parses to find a class.
                module = TEXTS.sub('""', inspect.getsource(sys.modules[each.__module__]))
                found = re.search(rf"^class {each.__name__}\b.*?(?=^[@\w]|\Z)", module, re.MULTILINE | re.DOTALL)
                for targets in ASSIGNMENT.findall(found[0] if found else ""):
                    names.update(re.findall(r"\.(\w+)\s*(?=,|$)", targets))
    return frozenset(names)


@functools.cache
def is_scripts_own(kind: Any) -> bool:
    """Whether a class is the script's, and no installed package's."""
    if kind.__module__ == "__main__":
        return True
    package = kind.__module__.partition(".")[0]
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None or package == "elasticdl":
        return False
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return not any(Path(file).is_relative_to(folder) for folder in installed)


@dataclass(frozen=True, slots=True)
class _Walk:
    kinds: Kinds
    seen: set[int]  # ids of the objects on the way
    entered: list[tuple[Any, Any, Any]]

    def through(self, owner: Any, keys: Iterable[Any], before: str, nested: int) -> Iterator[Spot]:
        for key in keys:
            value, path = owner[key], f"{before}{key}"
            if id(value) in self.seen:
                continue
            if is_plain(value, self.kinds.is_foreign):
                yield Spot(path, owner, key, value)
            elif content := _content_of(value, self.kinds):
                if self._is_plain_within(value, content):
                    yield Spot(CONTENT + path, owner, key, value, content=content)
                else:
                    yield Spot(path, owner, key, value, travels=False)
            elif (inner := self._within(value)) is not None and nested < MOST_NESTED:
                self.seen.add(id(value))
                self.entered.append((owner, key, value))
                yield from self.through(*inner, f"{path}.", nested + 1)
            else:
                yield Spot(path, owner, key, value, travels=False)

    def _is_plain_within(self, value: Any, content: Content) -> bool:
        try:
            return is_plain(content.take(value), self.kinds.is_foreign)
        except Exception:  # noqa: BLE001  whatever an object of the script's says
            return False

    def _within(self, value: Any) -> tuple[Any, list[Any]] | None:
        """The dict or list of what a value holds, and its keys that are searched; None if the value is not searched."""
        if type(value) in (list, tuple):
            return value, list(range(len(value)))
        if type(value) is dict:
            plain = all(isinstance(key, int) or (isinstance(key, str) and "." not in key) for key in value)
            return (value, list(value)) if plain else None
        kind: Any = type(value)
        own = is_scripts_own(kind) or isinstance(value, (*HOLD_ATTRIBUTES, *self.kinds.holders))
        if (
            not own
            or not hasattr(value, "__dict__")
            or isinstance(value, (*OF_THE_PROCESS, *self.kinds.of_the_process))
        ):
            return None
        foreign = self.kinds.foreign if isinstance(value, self.kinds.holders) else ()
        return vars(value), [name for name in vars(value) if name not in foreign]


def _content_of(value: Any, kinds: Kinds) -> Content | None:
    match value:
        case np.random.Generator():
            return Content(lambda stream: deepcopy(stream.bit_generator.state), _put_bits)
        case np.random.RandomState():
            return Content(lambda stream: stream.get_state(), lambda stream, state: stream.set_state(state))
        case random.Random():
            return Content(lambda stream: stream.getstate(), lambda stream, state: stream.setstate(state))
        case defaultdict():  # whose factory is a function: another worker's has its own
            return Content(dict, _refill)
    return kinds.content_of(value)


def _put_bits(stream: np.random.Generator, state: Any) -> None:
    stream.bit_generator.state = state


def _refill(collection: dict[Any, Any], items: Mapping[Any, Any]) -> None:
    collection.clear()
    collection.update(items)


def _entered(owner: Any, step: str) -> Any:
    key = _key(owner, step)
    if not _holds(owner, key):
        return None
    value = owner[key]
    if isinstance(value, list | tuple | dict):
        return value
    return vars(value) if hasattr(value, "__dict__") else None


def _key(owner: Any, step: str) -> Any:
    is_number = isinstance(owner, list | tuple) or (isinstance(owner, dict) and step not in owner)
    return int(step) if is_number and step.lstrip("-").isdecimal() else step


def _holds(owner: Any, key: Any) -> bool:
    return 0 <= key < len(owner) if isinstance(owner, list | tuple) else key in owner
