"""Where a trainer stands between two steps: what a worker that comes later must know beside model, optimizer and scheduler."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from transformers.trainer_callback import ExportableState, TrainerState

from elasticdl.elastic.core.progress import Progress
from elasticdl.elastic.torch_kit.data.own_loader import RandomStreams
from elasticdl.elastic.training.pieces import Piece

# Of `TrainerState`: what each worker knows of itself.
OWN = ("is_local_process_zero", "is_world_process_zero")
# And what it measures or counts itself, or what is compared elsewhere.
OF_EACH_WORKER = ("log_history", "total_flos", "num_input_tokens_seen", "stateful_callbacks", "best_model_checkpoint")


@dataclass(slots=True)
class Boundary:
    """The trainer's numbers before its next step: those that it changes while it makes a step that may be torn."""

    epoch: int = 0
    batch: int = 0  # the number of the next in its epoch
    loss: torch.Tensor | None = None  # `_tr_loss`: since the last log
    total_loss: float = 0.0  # before that
    logged_at: int = 0
    flos: float = 0.0
    tokens: int = 0


class TrainerSnapshot(Piece):
    """Travels with the training state; what is received waits for `apply`, as the trainer may be in the middle of a step."""

    name = "trainer"
    is_value = True

    def __init__(self, trainer: Any) -> None:
        self.received: dict[str, Any] | None = None
        self.boundary = Boundary()
        self.outside = b""  # random streams, as the script knows them outside of batches
        self._trainer = trainer

    def note(self, epoch: int, batch: int) -> None:
        """The trainer is between two steps."""
        trainer = self._trainer
        at = self.boundary
        at.epoch, at.batch = epoch, batch
        at.loss = trainer._tr_loss.clone()
        at.total_loss, at.logged_at = trainer._total_loss_scalar, trainer._globalstep_last_logged
        at.flos, at.tokens = trainer.current_flos, trainer.state.num_input_tokens_seen

    def done(self) -> Progress | None:
        """Where the trainer begins, if not at the beginning."""
        args, at, step = self._trainer.args, self.boundary, self._trainer.state.global_step
        size = args.train_batch_size
        made = step * size * args.gradient_accumulation_steps
        return Progress(at.epoch, at.batch * size, step, made) if step else None

    # -- as a piece of the training state --

    def keep(self) -> None:
        self._kept = self.received

    def undo(self) -> None:
        self.received = self._kept or self.received

    def compared(self) -> dict[str, Any]:
        if self.received is not None:
            return {}
        held = self._read()
        state = {name: value for name, value in held["state"].items() if name not in OF_EACH_WORKER}
        names = [type(each).__name__ for each in _stateful(self._trainer)]
        return {
            "trainer": {**state, "control": held["control"]},
            "callbacks": dict(zip(names, held["callbacks"], strict=True)),
            **RandomStreams.compared(held["outside"]),
        }

    def dump(self) -> dict[str, Any]:
        return {"now": self._read()}

    def load(self, dumped: dict[str, Any]) -> None:
        self.received = dumped["now"]

    # -- details --

    def _read(self) -> dict[str, Any]:
        if self.received is not None:
            return self.received
        trainer, at = self._trainer, self.boundary
        state = {each.name: getattr(trainer.state, each.name) for each in fields(TrainerState) if each.name not in OWN}
        return {
            "epoch": at.epoch,
            "batch": at.batch,
            "loss": 0.0 if at.loss is None else at.loss.item(),
            "total_loss": at.total_loss,
            "logged_at": at.logged_at,
            "flos": at.flos,
            "initial_step": getattr(trainer, "_initial_global_step", trainer.state.global_step),
            "initial_tokens": getattr(trainer, "_initial_num_input_tokens_seen", at.tokens),
            "state": {**state, "num_input_tokens_seen": at.tokens},
            "control": asdict(trainer.control),
            "callbacks": [callback.state()["attributes"] for callback in _stateful(trainer)],
            "outside": self.outside or RandomStreams.capture(),
        }

    def stand_at(self, epoch: int) -> None:
        """The trainer is on its way, at the beginning of this epoch."""
        received, trainer = self.received, self._trainer
        if received is None or not received["epoch"]:
            return
        steps = received["state"]["global_step"] - received["batch"] // trainer.args.gradient_accumulation_steps
        trainer.state.epoch = float(epoch)
        trainer.state.global_step = steps * epoch // received["epoch"]

    def apply(self) -> None:
        """The trainer stands where the job stands."""
        content, self.received = self.received, None
        assert content is not None, "a place was received"
        trainer = self._trainer
        own = {name: getattr(trainer.state, name) for name in OWN}
        trainer.state = TrainerState(**content["state"], **own)
        vars(trainer.control).update(content["control"])
        for callback, attributes in zip(_stateful(trainer), content["callbacks"], strict=False):
            vars(callback).update(attributes)
        trainer._tr_loss.fill_(content["loss"])
        trainer._total_loss_scalar, trainer._globalstep_last_logged = content["total_loss"], content["logged_at"]
        trainer.current_flos = content["flos"]
        trainer._initial_global_step = content["initial_step"]
        trainer._initial_num_input_tokens_seen = content["initial_tokens"]
        self.outside = content["outside"]
        self.note(content["epoch"], content["batch"])


def _stateful(trainer: Any) -> list[Any]:
    return [each for each in trainer.callback_handler.callbacks if isinstance(each, ExportableState)]
