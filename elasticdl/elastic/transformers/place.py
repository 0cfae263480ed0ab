"""Where a trainer stands between two steps: what a worker that comes later must know beside model, optimizer and scheduler."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from transformers.trainer_callback import ExportableState, TrainerState

from elasticdl.elastic.core.progress import Progress
from elasticdl.elastic.torch_kit.data.own_loader import RandomStreams
from elasticdl.elastic.torch_kit.participant.movable import TrainerPlace

# Of `TrainerState`: what each worker knows of itself.
OWN = ("is_local_process_zero", "is_world_process_zero")
# And what it measures or counts itself, or what is compared elsewhere.
OF_EACH_WORKER = ("log_history", "total_flos", "num_input_tokens_seen", "stateful_callbacks", "best_model_checkpoint")


@dataclass(slots=True)
class Boundary:
    """The trainer's numbers before its next step: those that it changes while it makes a step that may be torn."""

    loss: torch.Tensor | None = None  # `_tr_loss`: since the last log
    total_loss: float = 0.0  # before that
    logged_at: int = 0
    flos: float = 0.0
    tokens: int = 0


class TrainerSnapshot(TrainerPlace):
    """See `elasticdl.elastic.torch_kit.participant.movable.TrainerPlace`."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.boundary = Boundary()
        self._trainer = trainer

    def note(self, epoch: int, batch: int) -> None:
        super().note(epoch, batch)
        trainer, at = self._trainer, self.boundary
        at.loss = trainer._tr_loss.clone()
        at.total_loss, at.logged_at = trainer._total_loss_scalar, trainer._globalstep_last_logged
        at.flos, at.tokens = trainer.current_flos, trainer.state.num_input_tokens_seen

    def done(self) -> Progress | None:
        """Where the trainer begins, if not at the beginning."""
        args, step = self._trainer.args, self._trainer.state.global_step
        size = args.train_batch_size
        made = step * size * args.gradient_accumulation_steps
        return Progress(self.epoch, self.batch * size, step, made) if step else None

    def compared(self) -> dict[str, Any]:
        if self.received is not None:
            return {}
        held = self.content()
        state = {name: value for name, value in held["state"].items() if name not in OF_EACH_WORKER}
        names = [type(each).__name__ for each in _stateful(self._trainer)]
        return {
            "trainer": {**state, "control": held["control"]},
            "callbacks": dict(zip(names, held["callbacks"], strict=True)),
            **RandomStreams.compared(held["outside"]),
        }

    def read(self) -> dict[str, Any]:
        trainer, at = self._trainer, self.boundary
        state = {each.name: getattr(trainer.state, each.name) for each in fields(TrainerState) if each.name not in OWN}
        return {
            "loss": 0.0 if at.loss is None else at.loss.item(),
            "total_loss": at.total_loss,
            "logged_at": at.logged_at,
            "flos": at.flos,
            "initial_step": getattr(trainer, "_initial_global_step", trainer.state.global_step),
            "initial_tokens": getattr(trainer, "_initial_num_input_tokens_seen", at.tokens),
            "state": {**state, "num_input_tokens_seen": at.tokens},
            "control": asdict(trainer.control),
            "callbacks": [callback.state()["attributes"] for callback in _stateful(trainer)],
        }

    def stand_at(self, epoch: int) -> None:
        """The trainer is on its way, at the beginning of this epoch."""
        received, trainer = self.received, self._trainer
        if received is None or not received["epoch"]:
            return
        steps = received["state"]["global_step"] - received["batch"] // trainer.args.gradient_accumulation_steps
        trainer.state.epoch = float(epoch)
        trainer.state.global_step = steps * epoch // received["epoch"]

    def apply(self, numbers: dict[str, Any]) -> None:
        trainer = self._trainer
        own = {name: getattr(trainer.state, name) for name in OWN}
        trainer.state = TrainerState(**numbers["state"], **own)
        vars(trainer.control).update(numbers["control"])
        for callback, attributes in zip(_stateful(trainer), numbers["callbacks"], strict=False):
            vars(callback).update(attributes)
        trainer._tr_loss.fill_(numbers["loss"])
        trainer._total_loss_scalar, trainer._globalstep_last_logged = numbers["total_loss"], numbers["logged_at"]
        trainer.current_flos = numbers["flos"]
        trainer._initial_global_step = numbers["initial_step"]
        trainer._initial_num_input_tokens_seen = numbers["initial_tokens"]


def _stateful(trainer: Any) -> list[Any]:
    return [each for each in trainer.callback_handler.callbacks if isinstance(each, ExportableState)]
