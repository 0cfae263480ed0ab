"""The training state of a script that calls ``Trainer.fit``, with automatic and with manual optimization."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from elasticdl.elastic.core.progress import Progress
from elasticdl.elastic.lightning.trainer_state import PACKAGES
from elasticdl.elastic.torch_kit.optimizers import Optimizers
from elasticdl.elastic.torch_kit.participant.loop_state import LoopState
from elasticdl.elastic.torch_kit.pieces.model_attributes import Holder, holders_of_callbacks
from elasticdl.elastic.torch_kit.pieces.torch_pieces import copy_tensor
from elasticdl.elastic.torch_kit.torch_job import ElasticContext
from elasticdl.elastic.training.pieces import Piece


def holders_of(trainer: Any) -> Iterator[Holder]:
    """The script's own callbacks. Lightning's have a state of their own."""
    return holders_of_callbacks(trainer.callbacks, PACKAGES, "give the callback state_dict and load_state_dict")


class FitState(LoopState):
    """What automatic optimization trains: a module with one optimizer."""

    def begin_where(self, trainer: Any) -> None:
        """The trainer may have loaded a checkpoint of the script's own."""
        if trainer.global_step:
            self.begins_as_told = trainer.ckpt_path is not None and not _is_latest(Path(trainer.ckpt_path))
            self._job.loaded(Progress(trainer.current_epoch, 0, trainer.global_step))


class ManualState(FitState):
    """What manual optimization trains. Its parameters change in the middle of a step.

    So a step that is torn begins again with copies, which are made between two steps: of parameters, optimizers and gradients.
    """

    _begins_again = True
    _sums_each_pass = True

    def __init__(
        self, job: ElasticContext, model: torch.nn.Module, optimizers: Optimizers, values: dict[str, Any]
    ) -> None:
        super().__init__(job, model, optimizers, {**values, "gradients": Gradients(lambda: optimizers.parameters)})


class Gradients(Piece):
    """As they are between two steps: a script may accumulate them over several batches. They are sums, which are not compared."""

    name = "gradients"
    is_value = True
    copy_tensor = staticmethod(copy_tensor)

    def __init__(self, parameters: Callable[[], Sequence[torch.nn.Parameter]]) -> None:
        self._parameters = parameters

    def dump(self) -> dict[str, Any]:
        return {"gradients": [parameter.grad for parameter in self._parameters()]}

    def load(self, dumped: dict[str, Any]) -> None:
        for parameter, gradient in zip(self._parameters(), dumped["gradients"], strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)


def _is_latest(checkpoint: Path) -> bool:
    """Of those in its folder; else the script means this one."""
    if not checkpoint.exists():  # it is in some storage
        return False
    return all(each.stat().st_mtime <= checkpoint.stat().st_mtime for each in checkpoint.parent.glob("*.ckpt"))
