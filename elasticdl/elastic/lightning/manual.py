"""Manual optimization: a training step that makes its own backward passes and updates, with as many optimizers as it likes.

The gradients of each ``manual_backward`` are summed over the workers before it returns. So whatever the training step does
with them next, it does on one device. A sum that fails ends the training step by an exception that no script catches.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.protocol import WorldBroken
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.lightning import private
from elasticdl.elastic.lightning.trainer_state import names_of_plain
from elasticdl.elastic.torch_kit.gradients import OwnHook
from elasticdl.elastic.torch_kit.reducer import GradientReducer
from elasticdl.elastic.torch_kit.refusals import Optimizers
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.elastic.training.check import require_one

OTHERS = (
    "the workers made gradients of different parameters in one manual_backward, which of them are trained being each worker's own choice: let "
    "toggle_optimizer and requires_grad depend on the batch's number, the epoch or the step, and not on what one worker has seen or counted"
)


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
        self._counts = [
            (vars(each), names_of_plain(each))
            for each in private.counts_of([trainer.fit_loop.epoch_loop.manual_optimization])
        ]
        self._before: tuple[list[dict[str, Any]], list[bool]] = ([], [])
        self._in_step = self._in_backward = False
        self._hooks: dict[int, Any] = {}  # by the ids of parameters
        self.has_trained = False  # this worker has made a step of the job
        self._watch()

    def run(self, training_step: Callable[[], Any]) -> None:
        """Raises:
        WorldBroken: a worker is lost, and the training step has not run to its end.
        """
        self._in_step = True
        try:
            self._output = training_step()
        except TornStep as torn:
            raise torn.failure from None
        finally:
            self._in_step = False

    def take_output(self) -> Any:
        """What the last training step has returned; it is not kept."""
        output, self._output = self._output, None
        return output

    def close(self) -> None:
        """The parameters are as if they had never been here."""
        for hook in self._hooks.values():
            hook.remove()
        for reducer in self._reducers.values():
            reducer.drop_buckets()

    def _require_one(self, mine: str, line: str) -> None:
        require_one(self._job.collective, self._job.worker_id, mine, line, trained=self.has_trained)

    def begin_step(self) -> None:
        self._watch()
        self._before = (
            [{name: values[name] for name in names} for values, names in self._counts],
            [parameter.requires_grad for parameter in self._parameters],
        )

    def begin_again(self) -> None:
        """The training step is called once more: what else it has changed is as before."""
        counts, trained = self._before
        for (values, _), before in zip(self._counts, counts, strict=True):
            values.update(before)
        for parameter, was_trained in zip(self._parameters, trained, strict=True):
            parameter.requires_grad_(was_trained)

    def sum(self, backward: Callable[[], None]) -> None:
        """The gradients that ``backward`` makes, over all workers; added to those that are there.

        Raises:
            TornStep: a worker is lost.
        """
        if self._job.size == 1:
            self._make(backward)
            return
        earlier = [None if each.grad is None else each.grad.clone() for each in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        self._make(backward)
        every = self._parameters
        trained = tuple((id(parameter), parameter.requires_grad) for parameter in every)
        if trained not in self._reducers:
            self._reducers[trained] = GradientReducer(
                lambda: every,
                (),
                self._job.collective,
                leaves_missing_grads_none=True,
                warn=None if self._reducers else self._job.warn,
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

    def _watch(self) -> None:
        """The parameters that the optimizers have by now."""
        self._parameters, own = self.optimizers.parameters, OwnHook(self._accumulated)
        for parameter in self._parameters:
            if parameter.requires_grad and id(parameter) not in self._hooks:
                hook = parameter.register_post_accumulate_grad_hook(own)  # type: ignore[no-untyped-call]
                self._hooks[id(parameter)] = hook

    def _make(self, backward: Callable[[], None]) -> None:
        self._in_backward = True
        try:
            backward()
        finally:
            self._in_backward = False

    def _accumulated(self, _: torch.Tensor) -> None:
        if self._in_step and not self._in_backward:
            raise UserError(
                "loss.backward() was called in training_step, whose gradients are not summed over the workers: call "
                "self.manual_backward(loss)"
            )
