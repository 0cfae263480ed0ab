"""Taking a PyTorch training up from a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import IO, Any

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.torch.state import TorchState
from elasticdl.worker.checkpoint import Checkpoint, CheckpointStore
from elasticdl.worker.user_code import one_line

log = logging.getLogger(__name__)

FORMAT = 2
REMEDY = "give another --checkpoint_dir"


@dataclass(frozen=True, slots=True)
class Origin:
    """What a position within an epoch depends on."""

    samples: int
    seed: int
    shuffle: bool


def copy_to_cpu(value: Any) -> Any:
    """A copy of a nested state that training can't change any more; dicts, lists and tuples become plain ones."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: copy_to_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copy_to_cpu(item) for item in value)
    return value


def content(state: TorchState, origin: Origin) -> dict[str, Any]:
    """What is written: a copy of everything that a training goes on from."""
    return {"format": FORMAT, "state": copy_to_cpu(state.state_dict()), "origin": asdict(origin)}


def load_newest(store: CheckpointStore, state: TorchState, origin: Origin) -> Checkpoint | None:
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
            loaded = store.read(checkpoint.step, _load)
        except Exception as error:  # noqa: BLE001 - the unpickler raises anything over a damaged file
            problem = one_line(error)
            unreadable.append(checkpoint)
            log.warning("checkpoint %s can't be read and is passed over: %s", checkpoint.path, problem)
            continue
        _require_same(checkpoint, loaded, state, origin)
        _apply(checkpoint, loaded["state"], state)
        _set_aside(store, unreadable)
        return checkpoint
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


def _load(file: IO[bytes]) -> dict[str, Any]:
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(loaded, dict) or loaded.get("format") != FORMAT:
        raise ValueError(f"not a checkpoint of format {FORMAT}")
    return loaded


def _require_same(checkpoint: Checkpoint, loaded: dict[str, Any], state: TorchState, origin: Origin) -> None:
    difference = _difference(loaded["state"]["model"], state.model.state_dict())
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


def _difference(there: dict[str, Any], here: dict[str, Any]) -> str:
    """The first difference between two models, in words; empty if there is none."""
    for name in here.keys() | there.keys():
        if name not in there:
            return f"it has no {name}"
        if name not in here:
            return f"it has {name}, which this model has not"
    for name, value in here.items():
        was, now = (tuple(v.shape) if isinstance(v, torch.Tensor) else None for v in (there[name], value))
        if was != now:
            return f"{name} has shape {was} there and {now} here"
    return ""


def _apply(checkpoint: Checkpoint, saved: dict[str, Any], state: TorchState) -> None:
    groups = zip(saved["optimizer"]["param_groups"], state.optimizer.state_dict()["param_groups"], strict=False)
    # Both have options that the other lacks; a newer version of the same optimizer only has more of them.
    if any(there.keys() - here.keys() and here.keys() - there.keys() for there, here in groups):
        raise UserError(f"checkpoint {checkpoint.path} is of another kind of optimizer; {REMEDY}")
    try:
        state.load_state_dict(saved)
    except ValueError as error:
        raise UserError(
            f"checkpoint {checkpoint.path} does not fit the optimizer: {one_line(error)}; {REMEDY}"
        ) from error
