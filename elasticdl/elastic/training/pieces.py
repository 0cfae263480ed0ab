"""The pieces of a training state: what is kept, undone, dumped, loaded and compared. What is in no piece does not exist for the job."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any, ClassVar

from elasticdl.elastic.core.learning_rate import RateControl, RateState
from elasticdl.elastic.core.progress import Progress
from elasticdl.elastic.core.protocol import SaveScope
from elasticdl.elastic.training.copies import CopyTensor, copied
from elasticdl.elastic.training.fingerprint import Array, Marks, Survey, is_array, leaves

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
    copy_tensor: CopyTensor = staticmethod(lambda value, before: None)
    _kept: Any = _NOTHING

    @property
    def makes_model(self) -> bool:
        """It decides what becomes of the parameters, so it must be the same on all workers."""
        return False

    def keep(self) -> None:
        """`undo` goes back to what is there now."""
        self._kept = copied(self.dump(), self._kept, self.copy_tensor)

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

    def misfit(self, dumped: Any) -> str:
        """Why what was dumped is of another training, if that is plain to see."""
        return ""


class Trained(Piece):
    """What an update of the parameters changes. A step that is torn has made no update, so most trainings need no copy of this."""

    is_copied = False  # parameters may change otherwise than by an update that the job knows of
    _received: Any = None

    @property
    def makes_model(self) -> bool:
        return True

    def keep(self) -> None:
        if self.is_copied:
            super().keep()

    def undo(self) -> None:
        if self._received is not None:
            self.load(self._received)
        else:
            super().undo()

    def undo_to(self, received: Any) -> None:
        """From here on `undo` goes back to this; or to what is kept, with None."""
        self._received = received


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
    ]  # what `fingerprint.mark` is for an array; on a GPU the host goes on meanwhile
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
    model = leaves(_compared(each for each in every if each.makes_model))
    rest = leaves(_compared(each for each in every if not each.makes_model)) if others else {}
    arrays = [each for each in (*model.values(), *rest.values()) if is_array(each)]
    return Survey(step, model, rest, tensors.marks_of(arrays))


def _compared(pieces: Iterable[Piece]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for piece in pieces:
        for title, value in piece.compared().items():
            is_taken = isinstance(piece, Value) and title in found
            found[f"{title} ({piece.name})" if is_taken else title] = value
    return found
