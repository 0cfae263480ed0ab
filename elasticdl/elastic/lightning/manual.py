"""Manual optimization: a training step that makes its own backward passes and updates, with as many optimizers as it likes.

The gradients of each ``manual_backward`` are summed over the workers before it returns. So whatever the training step does
with them next, it does on one device. A sum that fails ends the training step by an exception that no script catches.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.protocol import WorldBroken
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.torch_kit.reducer import GradientReducer
from elasticdl.elastic.torch_kit.refusals import Optimizers
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.elastic.training.check import require_one
from elasticdl.elastic.training.pieces import Piece

OTHERS = (
    "the workers made gradients of different parameters in one manual_backward, which of them are trained being each worker's own choice: let "
    "toggle_optimizer and requires_grad depend on the batch's number, the epoch or the step, and not on what one worker has seen or counted"
)


class Gradients(Piece):
    """As they are between two steps: a script may accumulate them over several batches. They are sums, which are not compared."""

    name = "gradients"
    is_value = True

    def __init__(self, parameters: Callable[[], Sequence[torch.nn.Parameter]]) -> None:
        self._parameters = parameters

    def dump(self) -> dict[str, Any]:
        return {"gradients": [parameter.grad for parameter in self._parameters()]}

    def load(self, dumped: dict[str, Any]) -> None:
        for parameter, gradient in zip(self._parameters(), dumped["gradients"], strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)


class TornStep(BaseException):
    """The training step can't go on in this world. No error, so that ``except Exception`` in a script lets it pass."""

    def __init__(self, failure: WorldBroken) -> None:
        super().__init__(str(failure))
        self.failure = failure


class Manual:
    """The gradients of a module with ``automatic_optimization = False``."""

    def __init__(self, trainer: Any, job: ElasticContext) -> None:
        self.optimizers = Optimizers(trainer.optimizers)
        self._output: Any = None  # of the last training step
        self._job = job
        self._parameters = self.optimizers.parameters
        self._reducers: dict[tuple[tuple[int, bool], ...], GradientReducer] = {}  # by which parameters are trained
        self._made = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress  # steps of optimizers
        self._before: tuple[dict[str, Any], list[bool]] = ({}, [])
        self.has_trained = False  # this worker has made a step of the job
        self._has_summed = False  # gradients

    def run(self, training_step: Callable[[], Any]) -> None:
        """Raises:
        WorldBroken: a worker is lost, and the training step has not run to its end.
        UserError: it updates by gradients that are this worker's own.
        """
        try:
            self._output = training_step()
        except TornStep as torn:
            raise torn.failure from None
        if self._job.under_master and not self._has_summed and self._made.state_dict() != self._before[0]:
            raise UserError(
                "the training step has updated by gradients of this worker's part alone: call self.manual_backward(loss) in place of loss.backward()"
            )

    def take_output(self) -> Any:
        """What the last training step has returned; it is not kept."""
        output, self._output = self._output, None
        return output

    def close(self) -> None:
        """The parameters are as if they had never been here."""
        for reducer in self._reducers.values():
            reducer.drop_buckets()

    def _require_one(self, mine: str, line: str) -> None:
        require_one(self._job.collective, self._job.worker_id, mine, line, trained=self.has_trained)

    def begin_step(self) -> None:
        self._parameters = self.optimizers.parameters
        self._before = self._made.state_dict(), [parameter.requires_grad for parameter in self._parameters]

    def begin_again(self) -> None:
        """The training step is called once more: what else it has changed is as before."""
        made, trained = self._before
        self._made.load_state_dict(made)
        for parameter, was_trained in zip(self._parameters, trained, strict=True):
            parameter.requires_grad_(was_trained)

    def sum(self, backward: Callable[[], None]) -> None:
        """The gradients that ``backward`` makes, over all workers; added to those that are there.

        Raises:
            TornStep: a worker is lost.
        """
        self._has_summed = True
        if self._job.size == 1:
            backward()
            return
        earlier = [None if each.grad is None else each.grad.clone() for each in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        backward()
        every = self._parameters
        trained = tuple((id(parameter), parameter.requires_grad) for parameter in every)
        if trained not in self._reducers:
            self._reducers[trained] = GradientReducer(
                lambda: every,
                (),
                self._job.collective,
                require_one=self._require_one,
            )
        reducer = self._reducers[trained]
        reducer.open()
        self._job.advance(Activity.WAIT)
        try:
            held = bytes(is_trained for _, is_trained in trained)
            if not reducer.close(batch=zlib.crc32(held)).vote.one_batch:
                self._require_one(repr(held), OTHERS)
        except WorldBroken as failure:
            raise TornStep(failure) from failure
        self._job.advance(Activity.COMPUTE)
        for parameter, before in zip(self._parameters, earlier, strict=True):
            # Into memory of its own: the next sum of these parameters takes place where this one did.
            if before is None:
                parameter.grad = None if parameter.grad is None else parameter.grad.clone()
            else:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
