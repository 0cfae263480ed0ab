"""Taking a training up from a checkpoint, whatever the framework."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import IO, Any

from elasticdl.common.errors import UserError
from elasticdl.common.reason import one_line
from elasticdl.elastic.training.state import TrainingState
from elasticdl.worker.checkpoint import Checkpoint, CheckpointStore

log = logging.getLogger(__name__)

FORMAT = 2
REMEDY = "give another --checkpoint_dir"


@dataclass(frozen=True, slots=True)
class Origin:
    """What a position within an epoch depends on."""

    samples: int
    seed: int
    shuffle: bool


@dataclass(frozen=True, slots=True)
class Codec:
    """How a framework's state is written."""

    suffix: str  # of its files
    copy: Callable[[Any], Any]  # of a nested state: training can't change the copy any more
    write: Callable[[Any, IO[bytes]], object]
    read: Callable[[IO[bytes]], Any]  # runs nothing that is in the file; raises anything, over a damaged one
    is_other_optimizer: Callable[[Any, Any], bool] = lambda there, here: False  # than that of a second state


@dataclass(frozen=True, slots=True)
class Resumed:
    """A checkpoint that has been loaded, and what it holds besides the state."""

    checkpoint: Checkpoint
    extra: dict[str, Any]


def content(
    state: TrainingState, origin: Origin, codec: Codec, extra: Mapping[str, Any]
) -> Callable[[IO[bytes]], object]:
    """Copy everything that a training goes on from; what is returned writes the copy."""
    copied = {
        "format": FORMAT,
        "state": codec.copy(state.state_dict()),
        "origin": asdict(origin),
        "extra": codec.copy(dict(extra)),
    }
    return lambda file: codec.write(copied, file)


def load_newest(store: CheckpointStore, state: TrainingState, origin: Origin, codec: Codec) -> Resumed | None:
    """Load the newest checkpoint that can be read; None if there are none at all.

    Raises:
        UserError: it is of another model or other data, or not one can be read.
    """
    try:
        found = store.newest_first()
    except OSError as error:
        raise UserError(f"--checkpoint_dir can't be read: {one_line(error)}") from error
    problem, unreadable = "", []
    for checkpoint in found:
        try:
            loaded = _checked(store.read(checkpoint.step, codec.read))
        except Exception as error:  # noqa: BLE001 - the unpickler raises anything over a damaged file
            problem = one_line(error)
            unreadable.append(checkpoint)
            log.warning("checkpoint %s can't be read and is passed over: %s", checkpoint.path, problem)
            continue
        here = state.state_dict()
        _require_same(checkpoint, loaded, here["model"], origin)
        if codec.is_other_optimizer(loaded["state"]["optimizer"], here["optimizer"]):
            raise UserError(f"checkpoint {checkpoint.path} is of another kind of optimizer; {REMEDY}")
        _apply(checkpoint, loaded["state"], state)
        _set_aside(store, unreadable)
        return Resumed(checkpoint, loaded.get("extra", {}))
    if found:
        raise UserError(
            f"none of the {len(found)} checkpoints can be read, {found[0].path} and older: {problem}; {REMEDY}"
        )
    return None


def _set_aside(store: CheckpointStore, unreadable: list[Checkpoint]) -> None:
    for checkpoint in unreadable:
        try:
            store.set_aside(checkpoint.step)
        except OSError as error:
            log.warning("checkpoint %s can't be renamed either: %s", checkpoint.path, one_line(error))


def _checked(loaded: Any) -> dict[str, Any]:
    if not isinstance(loaded, dict) or loaded.get("format") != FORMAT:
        raise ValueError(f"not a checkpoint of format {FORMAT}")
    return loaded


def _require_same(checkpoint: Checkpoint, loaded: dict[str, Any], model: Any, origin: Origin) -> None:
    difference = _difference(loaded["state"]["model"], model)
    if difference:
        raise UserError(f"checkpoint {checkpoint.path} is of another model: {difference}; {REMEDY}")
    position, there = loaded["state"]["progress"]["position"], Origin(**loaded["origin"])
    if position not in (0, there.samples) and there != origin:
        name, was, now = next(
            (name, value, getattr(origin, name))
            for name, value in asdict(there).items()
            if value != getattr(origin, name)
        )
        raise UserError(
            f"checkpoint {checkpoint.path} stands within an epoch whose order of samples is another now: "
            f"{name} was {was} and is {now}; {REMEDY}"
        )


def _difference(there: Any, here: Any) -> str:
    """The first difference between two models by name, in words; empty if there is none, or nothing has a name."""
    if not isinstance(here, Mapping) or not isinstance(there, Mapping):
        return ""
    for name in here.keys() | there.keys():
        if name not in there:
            return f"it has no {name}"
        if name not in here:
            return f"it has {name}, which this model has not"
    for name, value in here.items():
        was, now = (tuple(v.shape) if hasattr(v, "shape") else None for v in (there[name], value))
        if was != now:
            return f"{name} has shape {was} there and {now} here"
    return ""


def _apply(checkpoint: Checkpoint, saved: dict[str, Any], state: TrainingState) -> None:
    try:
        state.load_state_dict(saved)
    except UserError as error:
        raise UserError(f"checkpoint {checkpoint.path} does not fit: {error}; {REMEDY}") from error
    except ValueError as error:
        raise UserError(
            f"checkpoint {checkpoint.path} does not fit the optimizer: {one_line(error)}; {REMEDY}"
        ) from error
