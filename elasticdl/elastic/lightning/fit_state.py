"""The training state of a script that calls ``Trainer.fit``, with automatic and with manual optimization."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.progress import Progress, StepPlan
from elasticdl.elastic.core.step_times import Activity
from elasticdl.elastic.core.vote import Vote
from elasticdl.elastic.core.world import World
from elasticdl.elastic.lightning.trainer_state import PACKAGES
from elasticdl.elastic.torch_kit.participant.loop_state import LoopState
from elasticdl.elastic.torch_kit.pieces.model_attributes import Holder, holders_of_callbacks
from elasticdl.elastic.torch_kit.pieces.optimizers import Optimizers, each_of
from elasticdl.elastic.torch_kit.torch_job import ElasticContext
from elasticdl.elastic.training.copies import copied
from elasticdl.elastic.training.pieces import OfElasticDL
from elasticdl.elastic.training.state import TrainingState


def holders_of(trainer: Any) -> Iterator[Holder]:
    """The script's own callbacks. Lightning's have a state of their own."""
    return holders_of_callbacks(trainer.callbacks, PACKAGES, "give the callback state_dict and load_state_dict")


class FitState(LoopState):
    """What automatic optimization trains: a module with one optimizer."""

    gather: Callable[[torch.Tensor], torch.Tensor]
    complete: Callable[[], None]

    def begin_where(self, trainer: Any) -> None:
        """The trainer may have loaded a checkpoint of the script's own."""
        if trainer.global_step:
            self.begins_as_told = trainer.ckpt_path is not None and not _is_latest(Path(trainer.ckpt_path))
            self._job.loaded(Progress(trainer.current_epoch, 0, trainer.global_step))

    def reduce(self, plan: StepPlan, objective: torch.Tensor, samples: int) -> None:
        self._job.advance(Activity.WAIT)
        super().reduce(plan, self.gather(objective), samples)

    def _cast_end_vote(self, state: int) -> Vote:
        self.gather(torch.zeros(()))  # as the others do before they vote on a step
        return super()._cast_end_vote(state)

    def write(self, file: IO[bytes], **more: Any) -> None:
        self.complete()
        super().write(file, **more)

    def _broadcast(self) -> dict[str, Any]:
        if self._job.world.rank == 0:  # the others' is not sent
            self.complete()
        return super()._broadcast()


class ManualState(FitState):
    """What manual optimization trains. Its parameters change in the middle of a step.

    So a step that is torn begins again with copies, which are made between two steps: of parameters, optimizers and gradients.
    """

    def __init__(
        self, job: ElasticContext, model: torch.nn.Module, optimizers: Optimizers, values: dict[str, Any]
    ) -> None:
        self._copies: dict[str, Any] = {}
        self._groups: list[int] = []  # of each optimizer, as many as the copies have
        gradients = Gradients(lambda: optimizers.parameters)
        super().__init__(job, model, optimizers, {**values, "gradients": gradients})

    def sync(self, world: World) -> None:
        TrainingState.sync(self, world)  # all schedulers that Lightning knows travel

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._received = None  # the copies hold it

    def restore(self) -> None:
        self.go_back()

    def save(self, part: p.SaveScope) -> None:
        super().save(part)
        if part is p.SaveScope.AT_COMMIT:
            self._copies = copied(self._dump_own(), self._copies, self._copy_tensor)
            self._groups = [len(each.param_groups) for each in each_of(self.optimizer)]

    def _summed(self) -> Iterator[torch.nn.Parameter]:
        return iter(())  # gradients are summed after each backward pass

    def _restore_own(self) -> None:
        super()._restore_own()
        for optimizer, number in zip(each_of(self.optimizer), self._groups, strict=True):
            del optimizer.param_groups[number:]  # which the torn training step has added
        self._load_own(copy.deepcopy(self._copies))  # an optimizer works on what it is given


class Gradients(OfElasticDL):
    """As they are between two steps: a script may accumulate them over several batches."""

    def __init__(self, parameters: Callable[[], Sequence[torch.nn.Parameter]]) -> None:
        self._parameters = parameters

    def compared(self) -> dict[str, Any]:
        return {}  # sums

    def state_dict(self) -> dict[str, Any]:
        return {"gradients": [parameter.grad for parameter in self._parameters()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for parameter, gradient in zip(self._parameters(), state["gradients"], strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)


def _is_latest(checkpoint: Path) -> bool:
    """Of those in its folder; else the script means this one."""
    if not checkpoint.exists():  # it is in some storage
        return False
    return all(each.stat().st_mtime <= checkpoint.stat().st_mtime for each in checkpoint.parent.glob("*.ckpt"))
