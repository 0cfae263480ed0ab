"""Plain values that a script's modules and callbacks keep in their attributes: examples are the count of an annealing, and a flag that a hook sets.

Plain are numbers, texts, flags, arrays, and collections of these. What has changed since the first batch is sent to workers that come later.
What has not is as each worker has made it: a folder, a rank or the number of an open file stays its own. Values that are small are copied
before each step, and put back where a step is made again, so it is counted once. Whatever else an object keeps stays where it is, and is named
by its type where a user may count on it.
"""

from __future__ import annotations

import copy
import functools
import io
import logging
import math
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from elasticdl.elastic.training.pieces import UNCHANGING
from elasticdl.elastic.training.plain_data import IsForeign, NotPlainError, checksum, is_plain, put_together, take_apart

SMALL = 4096  # elements of an array
FEW = 1000  # numbers and texts of a collection, with those within
OF_THE_PROCESS = (
    *(ModuleType, type, io.IOBase, logging.Logger, threading.Thread, threading.Event, type(threading.Lock())),
    *(FunctionType, MethodType, BuiltinFunctionType, functools.partial),
)
OF_DATA = ("__array__", "state_dict", "bit_generator", "get_state", "getstate")  # an array, a metric, a random stream
LARGE = object()  # in the place of a copy


@dataclass(frozen=True, slots=True)
class Arrays:
    """What a framework has beside NumPy's arrays. ``fill``: given a present array and what is to replace it, returns what to set."""

    is_array: IsForeign = lambda _: False
    copy: Callable[[Any], Any] = copy.copy
    fill: Callable[[Any, Any], Any] = lambda _, value: value
    on_host: Callable[[Any], Any] = np.asarray
    tools: tuple[type, ...] = ()  # kinds of objects that are never named


@dataclass(frozen=True, slots=True)
class Holder:
    """An object whose attributes are sent. ``name``: the same on all workers. ``foreign``: attributes that are a library's."""

    name: str
    title: str
    what: Any
    foreign: AbstractSet[str] = frozenset()
    is_noted: bool = True  # what it keeps may change while a step is made
    is_of_model: bool = False  # a forward pass may read what it keeps
    remedy: str = "keep it as plain data"

    def items(self) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in vars(self.what).items() if name not in self.foreign]


Owner = dict[str, Any]  # the attributes of an object


@dataclass(slots=True)
class Noted:
    """What small values were at some moment."""

    values: list[tuple[Owner, str, Any]] = field(default_factory=list)
    names: list[tuple[Owner, AbstractSet[str]]] = field(default_factory=list)  # of all attributes


def plain_values(holder: Any, foreign: Collection[str]) -> dict[str, Any]:
    """All of an object that can be sent, by attribute; by reference. ``foreign``: attributes that are a library's."""
    return {name: value for name, value in vars(holder).items() if name not in foreign and is_plain(value)}


def put(holder: Any, values: Mapping[str, Any]) -> None:
    """Let an object have these values, from another worker perhaps."""
    owner = vars(holder)
    for name, value in values.items():
        owner[name] = assigned(owner.get(name), value)


def small_copy(value: Any, arrays: Arrays) -> Any:
    """`LARGE` if the value is, or is not plain."""
    if _is_fixed(value):
        return value
    try:
        outline, parts = take_apart(value, arrays.is_array, FEW)
    except NotPlainError:
        return LARGE
    if any(math.prod(each.shape) > SMALL for each in parts.values()):
        return LARGE
    copied = {name: arrays.copy(each) if arrays.is_array(each) else each.copy() for name, each in parts.items()}
    return put_together(outline, copied)


class Attributes:
    """Of the objects that hold a training's values, as far as they travel."""

    def __init__(self, holders: Callable[[], Iterable[Holder]], arrays: Arrays, tell: Callable[[str], None]) -> None:
        """``holders``: those that are there now. ``tell``: for the journal."""
        self.foreign: AbstractSet[str] = frozenset()  # attributes of modules that are a library's
        self._present = holders
        self._arrays = arrays
        self._tell = tell
        self._others: list[Holder] = []
        self._first: dict[tuple[str, str], Any] = {}  # marks of what was there when training began
        self._small_first: dict[str, dict[str, Any]] = {}  # copies of it, by holder
        self._has_begun = False
        self._noted = Noted()  # at the last commit
        self._places: list[tuple[Owner, str]] | None = None  # of what is noted; None: unknown
        self._names: list[tuple[Owner, AbstractSet[str]]] = []  # of those that have these places
        self._moved: set[tuple[str, str]] = set()  # were sent by another worker
        self._named: set[tuple[str, str]] = set()

    def add(self, *holders: Holder) -> None:
        self._others += holders
        self._places = None

    def begin(self) -> None:
        """The first batch comes next. What attributes are now is each worker's own, as long as it does not change."""
        if not self._has_begun:
            self._has_begun = True
            for holder in self._holders():
                self._first |= {(holder.name, name): self._mark(value) for name, value in holder.items()}
                copies = ((name, small_copy(value, self._arrays)) for name, value in holder.items())
                self._small_first[holder.name] = {name: each for name, each in copies if each is not LARGE}

    # -- around a step --

    def note(self) -> Noted:
        """What is small, as it is now."""
        if self._places is None or any(len(owner) != len(names) for owner, names in self._names):
            self._look()
        values = []
        for owner, name in self._places or ():
            value = owner.get(name)
            if _is_fixed(value):  # most are: they are noted before each step
                values.append((owner, name, value))
            elif (kept := small_copy(value, self._arrays)) is not LARGE:  # else it stays as the step leaves it
                values.append((owner, name, kept))
        return Noted(values, self._names)

    def put_back(self, noted: Noted) -> None:
        """Let all be as it was; what has come since is removed."""
        for owner, names in noted.names:
            for name in [each for each in owner if each not in names] if len(owner) != len(names) else ():
                value = owner[name]  # of a large one nothing was copied that could come again
                if is_plain(value, self._arrays.is_array) and small_copy(value, self._arrays) is not LARGE:
                    del owner[name]
        for owner, name, value in noted.values:
            if owner.get(name) is not value:
                owner[name] = self._taken_over(owner.get(name), value)

    def commit(self, *, may_be_torn: bool) -> None:
        """All is as it is between two steps."""
        self._noted = self.note() if may_be_torn else Noted()

    def restore(self) -> None:
        """Go back to what was noted at the last commit."""
        self.put_back(self._noted)

    # -- to and from other workers --

    def dump(self) -> dict[str, Any]:
        """What has changed between the beginning of training and the last commit. What is large is given by reference."""
        noted, sent = {(id(owner), name): value for owner, name, value in self._noted.values}, {}
        for holder in self._holders():
            found = {}
            for name, value in holder.items():
                value = noted.get((id(vars(holder.what)), name), value)
                if is_plain(value, self._arrays.is_array) and self._has_moved((holder.name, name), value):
                    found[name] = self._copied(value)
            if found:
                sent[holder.name] = found
        if self._has_begun:
            self._name_what_stays()
        return {"changed": sent, "has_begun": self._has_begun}

    def load(self, dumped: dict[str, Any]) -> None:
        """What this worker alone has changed, on its way to where the job stands, is as it was at first."""
        sent = dumped["changed"]
        for holder in self._holders():
            owner, received = vars(holder.what), sent.get(holder.name, {})
            self._moved.update((holder.name, name) for name in received)
            for name, value in {**self._small_first.get(holder.name, {}), **received}.items():
                owner[name] = self._taken_over(owner.get(name), value)

    def compared(self) -> dict[str, Any]:
        """What a forward pass may read, by titles: small values, and of all else the kind."""
        return {
            holder.title: {name: self._as_compared(value) for name, value in holder.items()}
            for holder in self._holders()
            if holder.is_of_model and holder.is_noted
        }

    # -- details --

    def _holders(self) -> list[Holder]:
        return [*self._present(), *self._others]

    def _look(self) -> None:
        """Find again what is to be noted, as something was added or removed."""
        noted = [each for each in self._holders() if each.is_noted]
        self._names = [(vars(each.what), frozenset(vars(each.what))) for each in noted]
        self._places = [(vars(each.what), name) for each in noted for name, _ in each.items()]

    def _has_moved(self, place: tuple[str, str], value: Any) -> bool:
        """Since training began."""
        return place in self._moved or (self._has_begun and self._first.get(place) != self._mark(value))

    def _mark(self, value: Any) -> Any:
        """By which it is known whether a value has changed. Of what is not plain, which object it is."""
        if _is_fixed(value):
            return type(value), value
        is_plain_value = is_plain(value, self._arrays.is_array)
        return checksum(value, self._arrays.is_array, self._arrays.on_host) if is_plain_value else id(value)

    def _taken_over(self, present: Any, value: Any) -> Any:
        """The value may be put once more, so what is small is copied."""
        return assigned(present, self._copied(value), self._arrays)

    def _copied(self, value: Any) -> Any:
        """What is large is not."""
        kept = small_copy(value, self._arrays)
        return value if kept is LARGE else kept

    def _as_compared(self, value: Any) -> Any:
        if (kept := small_copy(value, self._arrays)) is not LARGE:
            return kept
        return getattr(value, "__qualname__", type(value).__qualname__)  # of a function its own

    def _name_what_stays(self) -> None:
        """Warn of what can't be sent, so that a newcomer has another one; of a module's, if it was set since training began."""
        holders, tools = self._holders(), (*OF_THE_PROCESS, *self._arrays.tools)
        own = {id(each.what) for each in holders}
        every = [(holder, name, value) for holder in holders for name, value in holder.items() if not _is_fixed(value)]
        for holder, name, value in every:
            place = (holder.name, name)
            is_old = holder.is_of_model and self._first.get(place) == id(value)
            if is_old or place in self._named or id(value) in own or isinstance(value, tools):
                continue
            if _is_data(value) and not is_plain(value, self._arrays.is_array):
                self._named.add(place)
                what = f"{holder.title}: {name}, a {type(value).__name__}"
                self._tell(f"{what}, is not sent to workers that come later: {holder.remedy}")


def _is_fixed(value: Any) -> bool:
    """It can't change, nor can what is in it."""
    return type(value) in UNCHANGING or (type(value) is tuple and all(map(_is_fixed, value)))


def assigned(present: Any, value: Any, arrays: Arrays | None = None) -> Any:
    """What to set in the place of ``present``: where possible ``present`` itself with the new content, as other objects may hold it, too."""
    if type(present) is not type(value) or present is value:
        return value
    if not isinstance(present, list | dict | set | deque):
        return arrays.fill(present, value) if arrays is not None and arrays.is_array(value) else value
    if any(getattr(present, name, None) != getattr(value, name, None) for name in ("default_factory", "maxlen")):
        return value
    items = dict(value) if isinstance(value, dict) else list(value)  # no pairs: a Counter would count them
    present.clear()
    (present.extend if isinstance(present, list | deque) else present.update)(items)
    return present


def _is_data(value: Any) -> bool:
    """And no tool of the process, such as a progress bar."""
    kind: Any = type(value)
    return isinstance(value, Collection) or is_scripts_own(kind) or any(hasattr(value, name) for name in OF_DATA)


INSTALLED = frozenset({"site-packages", "dist-packages"})


@functools.cache
def is_scripts_own(kind: Any) -> bool:
    """Whether a class is the script's, and no installed package's."""
    if kind.__module__ == "__main__":
        return True
    package = kind.__module__.partition(".")[0]
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None or package == "elasticdl":
        return False
    library = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    # Packages may be a user's, or an environment's below this one.
    return INSTALLED.isdisjoint(Path(file).parts) and not any(Path(file).is_relative_to(folder) for folder in library)
