"""The pieces of a training state: what is kept, undone, dumped, loaded and compared. What is in no piece does not exist for the job.

And what pieces are compared and kept by: checksums, and copies.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import marshal
import random
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any, ClassVar

import numpy as np
import numpy.typing as npt

from elasticdl.elastic.core.learning_rate import RateControl, RateState
from elasticdl.elastic.core.plan import Progress, plain_text
from elasticdl.elastic.core.protocol import SaveScope

UNCHANGING = (type(None), bool, int, float, complex, str, bytes)

# Fingerprints of a training state: everything that it holds by name, and for each value a number that stands for its bits.

Array = npt.NDArray[Any]
Marks = Callable[[], list[int]]  # waits for them, if a device is at work on them

MOST_NESTED = 12
MOST_SHOWN = 60  # characters of a value


# -- values by name --


def named_leaves(value: Any) -> dict[str, Any]:
    """All that a nested value holds, each by a name; a list of plain values is one."""
    found: dict[str, Any] = {}
    _collect("", value, found, MOST_NESTED)
    return found


def _collect(name: str, value: Any, found: dict[str, Any], depth: int) -> None:
    if type(value) not in UNCHANGING and not is_array(value) and depth:
        value = _opened(value)
        if isinstance(value, Mapping):
            for key, each in value.items():
                word = key if type(key) is str else plain_text(key)
                _collect(f"{name}.{word}" if name else word, each, found, depth - 1)
            return
        if isinstance(value, list | tuple) and not _is_flat(value):
            for number, each in enumerate(value):
                _collect(f"{name}.{number}" if name else str(number), each, found, depth - 1)
            return
    found[name] = value.item() if isinstance(value, np.generic) else value


def _opened(value: Any) -> Any:
    """What is compared in the place of a value."""
    if type(value) is dict:
        return value
    match value:
        case set() | frozenset():
            return sorted(map(plain_text, value))
        case deque():
            return list(value)
        case np.random.Generator():
            return value.bit_generator.state
        case np.random.RandomState():
            return value.get_state()
        case random.Random():
            return value.getstate()
        case enum.Enum():
            return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)}
    return value


def _is_flat(values: Sequence[Any]) -> bool:
    return all(type(each) in UNCHANGING for each in values)


def is_array(value: Any) -> bool:
    """An array of NumPy's or of a framework's."""
    kind = type(value)  # an object of a framework's would make its shape first
    return kind not in UNCHANGING and hasattr(kind, "shape") and hasattr(kind, "dtype")


def plain_mark(value: Any) -> int:
    """Of what is no array."""
    if isinstance(value, list | tuple) and _is_flat(value):
        return zlib.crc32(marshal.dumps(list(value), 2))  # of a hundred thousand losses in a millisecond
    return zlib.crc32(plain_text(value).encode())


def as_array(value: Any) -> Array:
    """What is no array, such as a setting of an optimizer: numbers as they are, anything else as text."""
    numbers = value if isinstance(value, list | tuple) else [value]
    if numbers and all(isinstance(each, int | float) for each in numbers):
        found = np.asarray(value)
        if found.dtype != object:
            return found
    return np.frombuffer(plain_text(value).encode(), np.uint8)


def shown(value: Any) -> str:
    """A piece's value, if it is short; else nothing."""
    if is_array(value):
        return _number(value.item()) if tuple(value.shape) == () and hasattr(value, "item") else ""
    if type(value) is float:
        return _number(value)
    is_long = isinstance(value, list | tuple | str | bytes) and len(value) > MOST_SHOWN
    text = "" if is_long else plain_text(value)
    return text if len(text) <= MOST_SHOWN else ""


def _number(value: Any) -> str:
    return f"{value:.7g}" if isinstance(value, float) else repr(value)


# -- marks --


def mark(array: Array) -> int:
    """Of its bits, and their order."""
    if array.dtype.hasobject:
        return zlib.crc32(plain_text(array).encode())
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def array_marks(arrays: Sequence[Array]) -> Marks:
    made = [mark(each) for each in arrays]
    return lambda: made


@dataclass(slots=True)
class Survey:
    """The values of one moment, between two steps."""

    step: int
    model: Mapping[str, Any]
    others: Mapping[str, Any]
    _arrays: Marks

    def marks(self) -> dict[str, int]:
        """By name."""
        found: dict[str, int] = {}
        arrays = iter(self._arrays())
        for name, value in (*self.model.items(), *self.others.items()):
            found[name] = next(arrays) if is_array(value) else plain_mark(value)
        return found

    def checksum(self) -> int:
        """Of all, in whatever order."""
        marks = self.marks()
        names = sorted(marks)
        return zlib.crc32(
            np.array([marks[name] for name in names], np.uint64).tobytes(), zlib.crc32("\n".join(names).encode())
        )


# -- how far two are apart --


def distance(root: Array | None, mine: Array | None) -> float:
    """Part of rank 0's largest value; infinite for what is no number, or of another shape."""
    if root is None or mine is None or root.shape != mine.shape:
        return float("inf")
    if root.dtype.kind not in "fc" or mine.dtype != root.dtype:
        return 0.0 if np.array_equal(root, mine) else float("inf")
    wide = np.float64 if root.dtype.kind == "f" else np.complex128
    apart = np.abs(root.astype(wide) - mine.astype(wide))
    same = (root == mine) | (np.isnan(root) & np.isnan(mine))
    largest = float(np.max(apart, where=~same, initial=0.0))
    scale = float(np.max(np.abs(root), where=np.isfinite(root), initial=0.0))
    return largest / scale if scale and np.isfinite(largest) else (0.0 if largest == 0.0 else float("inf"))


# How the names of settings begin, as PyTorch and Keras have them.
SETTINGS = ("optimizer.param_groups", "optimizer.learning_rate")
_NOTHING = object()  # was kept so far


class Piece(ABC):
    """A part of a training state. Unless a piece says otherwise, it is kept and undone by a copy of what it dumps."""

    name: str
    kept_with: ClassVar[SaveScope] = SaveScope.AT_COMMIT
    travels: ClassVar[bool] = True  # to workers that come later
    in_checkpoints: ClassVar[bool] = True  # as far as it travels
    is_value: ClassVar[bool] = False  # it is dumped among the values that the user has given
    shows_the_way: ClassVar[bool] = (
        False  # to where the job stands, for a worker that comes later: all else takes effect there
    )
    _kept: Any = _NOTHING

    @property
    def makes_model(self) -> bool:
        """It decides what becomes of the parameters, so it must be the same on all workers."""
        return False

    def keep(self) -> None:
        """`undo` goes back to what is there now."""
        self._kept = _NOTHING  # else there are two copies for a moment
        self._kept = copy.deepcopy(self.dump())

    def undo(self) -> None:
        """Go back to what was kept, if anything was."""
        if self._kept is not _NOTHING:
            self.load(copy.deepcopy(self._kept))

    @abstractmethod
    def dump(self) -> Any:
        """What `load` takes, on another worker perhaps; by reference where that can be."""

    @abstractmethod
    def load(self, dumped: Any) -> None: ...

    def missing(self) -> None:  # noqa: B027
        """The state that is loaded knows nothing of this piece.

        Raises:
            UserError: so it is of another training.
        """

    def sent(self) -> Any:
        """What is dumped for another worker, if it is sent otherwise than written."""
        return self.dump()

    def compared(self) -> Mapping[str, Any]:
        """What must be the same on all workers, by titles that people know; nested."""
        return {}


class Trained(Piece):
    """What an update of the parameters changes. A step that is torn has made no update, so most trainings need no copy of this."""

    is_copied = False  # parameters may change otherwise than by an update that the job knows of

    @property
    def makes_model(self) -> bool:
        return True

    def keep(self) -> None:
        if self.is_copied:
            super().keep()


class Local(Piece):
    """A piece that another worker has no use for, or is given in another way, and that need not be copied."""

    travels = False

    def keep(self) -> None: ...

    def undo(self) -> None: ...

    def dump(self) -> Any: ...

    def load(self, dumped: Any) -> None: ...


def is_stateful(value: Any) -> bool:
    """An object that says its state, and takes it: a scheduler of torch, a GradScaler, a metric."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


class Value(Piece):
    """A value that the state was given: an object with ``state_dict`` and ``load_state_dict``, or anything that can be copied."""

    is_value = True

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        self.name = name
        self._values = values

    @property
    def value(self) -> Any:
        return self._values[self.name]

    @property
    def title(self) -> str:
        return self.name

    def dump(self) -> Any:
        return self.value.state_dict() if is_stateful(self.value) else self.value

    def load(self, dumped: Any) -> None:
        if is_stateful(self.value):
            self.value.load_state_dict(dumped)
        else:
            self._values[self.name] = dumped

    def compared(self) -> Mapping[str, Any]:
        return {self.title: self.dump()}


class Settings(Piece):
    """What an optimizer is told and does not work out itself: rate, momentum, weight decay. They are also dumped with the optimizer."""

    name = "settings"
    travels = False

    def keep(self) -> None:
        self._kept = self.dump()

    def changed(self) -> bool:
        """Since they were kept."""
        return bool(self.dump() != self._kept)

    @abstractmethod
    def dump(self) -> Any:
        """Copies."""

    @abstractmethod
    def told(self) -> Mapping[str, Any]:
        """What is compared in each step, by names that begin as one of `SETTINGS`."""

    @property
    @abstractmethod
    def rate(self) -> float:
        """The learning rate."""

    @abstractmethod
    def own_rate(self) -> float:
        """The learning rate as the user has given it, before rules apply."""

    @abstractmethod
    def set_rate(self, rate: float) -> None: ...


class FollowedRate(Piece):
    """How far the rules of the learning rate are, if it goes by any."""

    name = "rate"
    kept_with = SaveScope.WITH_PARAMETERS
    control: RateControl | None = None

    def keep(self) -> None:
        self._kept = self.control.state if self.control is not None else RateState()

    def undo(self) -> None:
        if self.control is not None:
            self.control.state = self._kept

    def dump(self) -> dict[str, Any] | None:
        return asdict(self.control.state) if self.control is not None else None

    def load(self, dumped: dict[str, Any] | None) -> None:
        if self.control is not None and dumped is not None:
            self.control.state = RateState(**dumped)


class Standing(Local):
    """How far training is. The worker's core keeps and undoes that."""

    name = "progress"
    travels = True
    shows_the_way = True

    def __init__(self, progress: Callable[[], Progress], loaded: Callable[[Progress], None]) -> None:
        self._progress = progress
        self._loaded = loaded

    def dump(self) -> dict[str, Any]:
        return asdict(self._progress())

    def load(self, dumped: dict[str, Any]) -> None:
        self._loaded(Progress(**dumped))


class InHand(Local):
    """What is there only while a step is made: to undo it is to ``drop`` it."""

    name = "in hand"

    def __init__(self, drop: Callable[[], None]) -> None:
        self._drop = drop

    def undo(self) -> None:
        self._drop()


# -- all of them --


@dataclass(frozen=True, slots=True)
class Tensors:
    """What is done with the tensors of a framework."""

    marks_of: Callable[
        [Sequence[Any]], Marks
    ]  # numbers below 2**64 that stand for their bits; on a GPU the host goes on meanwhile
    host_array: Callable[[Any], Array]  # numbers as they are; anything else as text
    broadcast: Callable[..., Any]  # rank 0's, on members that stand elsewhere; or ``to_all``
    write: Callable[[Any, IO[bytes]], object]
    read: Callable[[IO[bytes]], Any]


def dump_all(pieces: Iterable[Piece], *, to_send: bool = False) -> dict[str, Any]:
    """By name, as a checkpoint has them: what the user has given is among ``values``."""
    values: dict[str, Any] = {}
    dumped: dict[str, Any] = {"values": values}
    for piece in pieces:
        (values if piece.is_value else dumped)[piece.name] = piece.sent() if to_send else piece.dump()
    return dumped


def load_all(pieces: Iterable[Piece], dumped: Mapping[str, Any]) -> None:
    for piece in pieces:
        there = dumped.get("values", {}) if piece.is_value else dumped
        if piece.name in there:
            piece.load(there[piece.name])
        else:
            piece.missing()


def survey_of(pieces: Iterable[Piece], tensors: Tensors, step: int, *, others: bool = True) -> Survey:
    """What is compared of these. ``others``: also of those that do not make the model."""
    every = list(pieces)
    model = named_leaves(_compared(each for each in every if each.makes_model))
    rest = named_leaves(_compared(each for each in every if not each.makes_model)) if others else {}
    arrays = [each for each in (*model.values(), *rest.values()) if is_array(each)]
    return Survey(step, model, rest, tensors.marks_of(arrays))


def _compared(pieces: Iterable[Piece]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for piece in pieces:
        for title, value in piece.compared().items():
            is_taken = isinstance(piece, Value) and title in found
            found[f"{title} ({piece.name})" if is_taken else title] = value
    return found


# Nested values: dicts, lists and tuples, and the leaves in them.


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The value with what ``function`` makes of each leaf in its place. Dicts of any kind become plain ones, named tuples stay such."""
    if isinstance(value, dict):
        return {key: mapped(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [mapped(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return function(value)


def leaves_of(value: Any) -> list[Any]:
    """In order; None is one."""
    if not isinstance(value, dict | list | tuple):
        return [value]
    found: list[Any] = []
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            pending += [*each.values()][::-1]
        elif isinstance(each, list | tuple):
            pending += each[::-1]
        else:
            found.append(each)
    return found
