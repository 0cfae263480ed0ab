"""What modules, callbacks and trainers keep in their attributes is sent to workers that come later.

Examples are the count of an annealing, a flag that a hook has set, a moving average of weights in a callback, and ``requires_grad`` of parameters.
What has changed since training began is sent with the state. Small values are copied before each step: a torn step is made again from the
copies, so it is counted once.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import count
from numbers import Number
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from elasticdl.elastic.torch_kit.tensors import host_array
from elasticdl.elastic.training import attributes
from elasticdl.elastic.training.attributes import (
    OF_THE_PROCESS,
    OF_THE_WORKER,
    Content,
    Kinds,
    Spot,
    assigned,
    is_scripts_own,
    set_by,
)
from elasticdl.elastic.training.pieces import UNCHANGING
from elasticdl.elastic.training.plain_data import checksum, put_together, take_apart

# Copies of what is kept in attributes, made before each step: of what is small.

SMALL = 4096  # elements of an array
FEW = 1000  # items of a collection, with those within


class TooLargeError(Exception):
    """A value has more than `FEW` items, or an array of more than `SMALL` elements."""


def small_copy(value: Any) -> Any:
    """A copy, or the value itself if it is large or never changes."""
    try:
        return copy_of_small(value)
    except TooLargeError:
        return value


def copy_of_small(value: Any) -> Any:
    """Raises:
    TooLargeError: it is large.
    """
    if type(value) in UNCHANGING:  # most are: they are copied before each step
        return value
    left = FEW

    def copied(value: Any) -> Any:
        nonlocal left
        kind = type(value)
        if kind in UNCHANGING:
            return value
        if isinstance(value, torch.Tensor | np.ndarray):
            elements = value.numel() if isinstance(value, torch.Tensor) else value.size
            if elements > SMALL:
                raise TooLargeError
            return value.detach().clone() if isinstance(value, torch.Tensor) else value.copy()
        if not isinstance(value, dict | list | tuple | set | frozenset | deque):
            return copy.copy(value)
        left -= len(value)
        if left < 0:
            raise TooLargeError
        if isinstance(value, dict):
            made = copy.copy(value)
            made.update({key: copied(item) for key, item in value.items()})
            return made
        items = [copied(item) for item in value]
        if isinstance(value, deque):
            return deque(items, value.maxlen)
        return kind(*items) if hasattr(kind, "_fields") else kind(items)

    return copied(value)


class Slot(NamedTuple):
    """Where a value is kept. ``path``: within what the holder of this name keeps."""

    holder: str
    path: str
    owner: Any
    key: Any


@dataclass(slots=True)
class Noted:
    """What was kept at some moment, and the way back to it."""

    values: list[tuple[Slot, Any, Any]] = field(default_factory=list)  # what stood there, and its copy
    trained: list[tuple[torch.nn.Parameter, bool]] = field(default_factory=list)

    def put_back(self, kinds: Kinds, since: Noted | None) -> None:
        if since is not None:
            there = {(id(slot.owner), slot.key) for slot, _, _ in self.values}
            for slot, _, _ in since.values:
                if (id(slot.owner), slot.key) not in there and isinstance(slot.owner, dict):
                    slot.owner.pop(slot.key, None)
        for slot, value, kept in self.values:
            slot.owner[slot.key] = value if kept is value else assigned(value, small_copy(kept), kinds)
        for parameter, was_trained in self.trained:
            parameter.requires_grad_(was_trained)


OF_A_MODULE = frozenset(vars(torch.nn.Module()))  # what each has of torch
SET_UP = (bool, str, bytes, Path, type(None))  # of these kinds is what a worker is told at the start
LEFT = -1  # for a checksum
REMEDY_OF_A_MODULE = "give it get_extra_state and set_extra_state"


@dataclass(frozen=True, slots=True)
class Holder:
    """An object whose attributes are sent. ``name``: the same on all workers. ``foreign``: names of attributes that are a library's."""

    name: str
    title: str
    what: Any
    foreign: AbstractSet[str] = frozenset()
    is_noted: bool = True  # what it keeps may change while a step is made
    remedy: str = "keep it as plain data"


def holders_of_callbacks(
    callbacks: Iterable[Any],
    packages: tuple[str, ...],
    remedy: str = "keep it as plain data",
    *,
    is_noted: bool = True,
) -> Iterator[Holder]:
    """One for each callback of the script's own. Callbacks of these packages have a state of their own, or need none."""
    numbers: dict[str, Iterator[int]] = defaultdict(count)
    for callback in callbacks:
        kind: Any = type(callback)
        if kind.__module__.partition(".")[0] not in packages:
            name = f"callback {kind.__qualname__} {next(numbers[kind.__qualname__])}"
            yield Holder(name, f"the callback {kind.__name__}", callback, set_by(kind, packages), is_noted, remedy)


@dataclass(slots=True)
class _First:
    """What stood somewhere when training began. ``copy``: none if it is large."""

    mark: int
    copy: Any
    is_large: bool = False


class Attributes:
    """Of the modules of a training state, and of what else is named with `add`."""

    def __init__(self, modules: Callable[[], Sequence[torch.nn.Module]], tell: Callable[[str], None]) -> None:
        """``tell``: for the journal."""
        self.keeps_received = False  # until `arrive`, for `restore`
        self._modules = modules
        self._tell = tell
        self._packages: tuple[str, ...] = ()
        self._others: list[Holder] = []
        self._first: dict[str, dict[str, _First]] = {}
        self._has_begun = False
        self._noted = Noted()  # at the last commit
        self._is_known = False  # what is noted
        self._slots: list[Slot] = []  # of what is noted
        self._sizes: list[tuple[Any, int]] = []  # of these owners
        self._entered: list[tuple[Any, Any, Any]] = []
        self._trained: list[torch.nn.Parameter] = []  # or not
        self._received: dict[str, Any] | None = None  # until this worker stands where the job stands
        self._missing: list[tuple[Holder, str]] = []  # what was received, and has no place here
        self._named: set[tuple[str, str]] = set()
        self._kinds = Kinds(self._content_of, OF_THE_PROCESS_IN_TORCH, is_tensor, _assigned)
        for holder in self._holders():
            self._note_first(holder)

    def add(self, *holders: Holder, packages: tuple[str, ...] = ()) -> None:
        """``packages``: what their functions set of the modules is theirs."""
        self._others += holders
        self._packages += packages
        self._is_known = False
        for holder in self._holders():
            self._note_first(holder)

    @property
    def is_on_its_way(self) -> bool:
        """This worker has received the attributes, and its script has not yet come to where the job stands."""
        return self._received is not None

    def begin(self) -> None:
        """The first step comes next. Flags, texts and file numbers that hooks have set until now stay each worker's own."""
        if self._has_begun:
            return
        self._has_begun = True
        for holder in self._holders():
            for spot in self._spots(holder):
                if not spot.travels or type(spot.value) in SET_UP or attributes.is_open_file(spot.value):
                    self._first[holder.name][spot.path] = self._first_of(spot)

    # -- around a step --

    def note(self) -> Noted:
        """What is small, as it is now."""
        self._look()
        values = [(slot, value := slot.owner[slot.key], small_copy(value)) for slot in self._slots]
        trained = [(parameter, parameter.requires_grad) for parameter in self._trained]
        return Noted(values, trained)

    def commit(self, *, may_be_torn: bool) -> None:
        """All is as it is between two steps."""
        self._noted = self.note() if may_be_torn else Noted()

    def restore(self) -> None:
        """Go back to what was received, or to what was noted at the last commit."""
        if self._received is not None:
            self._put(self._received)
        else:
            self.put_back(self._noted)

    def put_back(self, noted: Noted, *, since: Noted | None = None) -> None:
        """``since``: noted later; entries that it has and ``noted`` has not are removed."""
        noted.put_back(self._kinds, since)

    def arrive(self) -> None:
        """This worker's script stands where the job stands."""
        self._received = None
        self._tell_missing()

    def _tell_missing(self) -> None:
        for holder, path in self._missing:
            what = f"{_bare(path)} is not there on a worker that comes later: make it in __init__ or in a hook at the start"
            self._say_once(holder, path, what)

    # -- to and from other workers --

    def dump(self) -> dict[str, Any]:
        """What has changed between the beginning of training and the last commit. Tensors are given by reference."""
        changed: dict[str, dict[str, Any]] = {}
        noted = {(slot.holder, slot.path): kept for slot, _, kept in self._noted.values}
        for holder in self._holders():
            first = self._first.get(holder.name, {})
            for spot in self._spots(holder):
                if not spot.travels:
                    self._name(holder, spot, first.get(spot.path))
                    continue
                place = (holder.name, spot.path)
                value = noted[place] if place in noted and spot.content is None else spot.taken()
                if spot.path not in first or self._mark(value) != first[spot.path].mark:
                    changed.setdefault(holder.name, {})[spot.path] = value
        trained = {id(parameter): was for parameter, was in self._noted.trained}
        flags = {name: trained.get(id(each), each.requires_grad) for name, each in self._parameters()}
        outline, arrays = take_apart(changed, is_tensor)
        arrays = {name: each.detach() if is_tensor(each) else each for name, each in arrays.items()}
        has_begun = self._has_begun or self.is_on_its_way
        return {"outline": outline, "arrays": arrays, "trained": flags, "has_begun": has_begun}

    def load(self, dumped: dict[str, Any]) -> None:
        self._put(dumped)
        # Hooks that are yet to begin training do so on all workers alike.
        self._received = dumped if self.keeps_received and dumped["has_begun"] else None
        if self._received is None:
            self._tell_missing()

    def _put(self, dumped: dict[str, Any]) -> None:
        changed, self._missing = put_together(dumped["outline"], dumped["arrays"]), []
        for holder in self._holders():
            received, first = changed.get(holder.name, {}), self._first.get(holder.name, {})
            for path, value in received.items():
                if not attributes.put(holder.what, path, value, self._kinds):
                    self._missing.append((holder, path))
            for spot in list(self._spots(holder)):
                was = first.get(spot.path)
                if was is None or was.is_large or spot.path in received or not spot.travels:
                    continue
                if self._mark(spot.taken()) != was.mark:  # by this worker alone, on its way
                    attributes.put(holder.what, spot.path, small_copy(was.copy), self._kinds)
        for name, parameter in self._parameters():
            parameter.requires_grad_(dumped["trained"].get(name, parameter.requires_grad))
        self._is_known = False

    # -- details --

    def _holders(self) -> Iterator[Holder]:
        for name, module in self._named_modules():
            kind: Any = type(module)
            path = name.partition(":")[2]
            foreign = OF_A_MODULE | set_by(kind, self._packages)
            is_noted = not path or is_scripts_own(kind)
            yield Holder(name, f"the {kind.__name__} {path}".rstrip(), module, foreign, is_noted, REMEDY_OF_A_MODULE)
        yield from self._others

    def _named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        for number, root in enumerate(self._modules()):
            for path, module in root.named_modules():
                yield f"{number}:{path}", module

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for number, root in enumerate(self._modules()):
            for path, parameter in root.named_parameters():
                yield f"{number}:{path}", parameter

    def _spots(self, holder: Holder, entered: list[tuple[Any, Any, Any]] | None = None) -> Iterator[Spot]:
        others = [each.what for each in self._others]
        for spot in attributes.spots(holder.what, self._kinds, holder.foreign, others=others, entered=entered):
            if not OF_THE_WORKER.search(str(spot.key)):
                yield spot

    def _look(self) -> None:
        """Find again what is to be noted, if something was added or removed."""
        same = all(len(owner) == size for owner, size in self._sizes)
        if self._is_known and same and all(owner[key] is value for owner, key, value in self._entered):
            return
        self._is_known = True
        self._slots, self._entered = [], []
        self._trained = [parameter for _, parameter in self._parameters()]
        owners: dict[int, Any] = {}
        for holder in self._holders():
            if holder.is_noted:
                owners[id(vars(holder.what))] = vars(holder.what)
                for spot in self._spots(holder, self._entered):
                    if spot.travels and spot.content is None and not isinstance(spot.owner, tuple):
                        self._slots.append(Slot(holder.name, spot.path, spot.owner, spot.key))
        owners |= {id(slot.owner): slot.owner for slot in self._slots}
        self._sizes = [(owner, len(owner)) for owner in owners.values()]

    def _note_first(self, holder: Holder) -> None:
        if holder.name not in self._first:
            self._first[holder.name] = {spot.path: self._first_of(spot) for spot in self._spots(holder)}

    def _first_of(self, spot: Spot) -> _First:
        if not spot.travels:
            return _First(LEFT, id(spot.value))
        value = spot.taken()
        try:
            return _First(self._mark(value), copy_of_small(value))
        except TooLargeError:
            return _First(self._mark(value), None, is_large=True)

    def _mark(self, value: Any) -> int:
        return checksum(value, is_tensor, host_array)

    def _name(self, holder: Holder, spot: Spot, first: _First | None) -> None:
        """Warn of a value that can't be sent, so that a newcomer has another one."""
        is_new = first is None or first.mark != LEFT or first.copy != id(spot.value)
        if is_new and any(attributes.left_behind([spot], self._kinds)) and _is_data(spot.value):
            what = f"{spot.path}, a {type(spot.value).__name__}"
            self._say_once(holder, spot.path, f"{what}, is not sent to workers that come later: {holder.remedy}")

    def _say_once(self, holder: Holder, path: str, what: str) -> None:
        if (holder.name, path) not in self._named:
            self._named.add((holder.name, path))
            self._tell(f"{holder.title}: {what}")

    def _content_of(self, value: Any) -> Content | None:
        if isinstance(value, torch.Generator):
            return Content(torch.Generator.get_state, torch.Generator.set_state)
        if isinstance(value, torch.nn.Module):
            if any(value is each for _, each in self._named_modules()):
                return None  # it is the state's
        elif isinstance(value, (OF_THE_PROCESS_IN_TORCH, OF_THE_PROCESS)):
            return None
        if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            return Content(lambda each: each.state_dict(), lambda each, state: each.load_state_dict(state))
        return None


OF_THE_PROCESS_IN_TORCH: tuple[type, ...] = (
    *(torch.nn.Module, torch.optim.Optimizer, LRScheduler, Dataset, DataLoader, Sampler, torch.nn.Parameter),
    *(torch.dtype, torch.device, torch.Size),
)


def is_tensor(value: Any) -> bool:
    """One that travels; those that are trained are the state's."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not (value.is_leaf and value.requires_grad)
        and not is_lazy(value)
    )


def _assigned(present: Any, value: Any) -> Any:
    if not is_tensor(value):
        return value
    if is_tensor(present) and (present.shape, present.dtype) == (value.shape, value.dtype):
        present.data.copy_(value)  # a backward pass that is yet to come has noted the versions
        return present
    return value.clone()


def _is_data(value: Any) -> bool:
    """And no tool of the process, such as a progress bar."""
    is_collection = isinstance(value, Mapping | Sequence | AbstractSet | Number)
    kind: Any = type(value)
    return is_scripts_own(kind) or is_collection or hasattr(value, "__array__")


def _bare(path: str) -> str:
    return path.removeprefix(attributes.CONTENT)
