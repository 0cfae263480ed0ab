"""What workers say to each other between two steps, or between two batches of one: rank 0's decisions, and means."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import Any

import torch

from elasticdl.elastic.core.errors import WorldBroken
from elasticdl.elastic.core.step_times import Activity
from elasticdl.elastic.torch_kit.participant.steps import Steps
from elasticdl.elastic.torch_kit.torch_job import ElasticContext

log = logging.getLogger(__name__)


class Decisions:
    """Each is one small collective, which the scripts of all workers call alike."""

    def __init__(self, job: ElasticContext) -> None:
        self.steps: Steps | None = None  # while this worker calls what the others call
        self.is_manual = False  # the optimization
        self._job = job
        self._unheard_in = -1  # the world that broke while something was said

    def of_first(self, value: Any) -> Any:
        """Rank 0's value, on all workers."""

        def tell() -> Any:
            return pickle.loads(self._job.collective.broadcast_bytes(pickle.dumps(value), "elasticdl.decision"))

        return self._agreed("a decision", tell, value)

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over the workers."""
        if not torch.is_floating_point(tensor):
            return tensor

        def tell() -> torch.Tensor:
            total = tensor.detach().cpu().double() / self._job.size
            self._job.collective.sum_asked(total, "a mean (sync_dist=True)")
            return total.to(tensor.dtype)

        found: torch.Tensor = self._agreed("a mean", tell, tensor)
        return found.to(tensor.device)  # of another worker it may be known

    def anybody(self, wish: bool) -> bool | None:
        """Whether any worker wishes it; None: the world has broken, and the answer comes when it is asked again."""
        steps = self.steps
        if steps is None or (self._job.size == 1 and not steps.is_torn):
            return wish
        if steps.is_catching_up:  # what it has seen is not the job's
            return False

        def tell() -> bool:
            wishes = torch.tensor([float(wish and not self._job.is_told_to_leave)], dtype=torch.float64)
            self._job.collective.sum_asked(wishes, "the question whether to stop")
            return bool(wishes.item() > 0)

        if not _is_within(steps) and self._unheard_in == self._job.world.version:
            return None
        try:
            return bool(self._told(steps, tell, own=False, mends=True))  # it is asked outside of training steps
        except WorldBroken as failure:
            self._unheard_in = self._job.world.version
            log.info("whether to stop is asked again after the next step: %s", failure)
            return None

    def _agreed(self, what: str, tell: Callable[[], Any], own: Any) -> Any:
        steps = self.steps
        if steps is None or (self._job.size == 1 and not steps.is_torn) or steps.is_catching_up:
            return own
        if not _is_within(steps) and self._unheard_in == self._job.world.version:
            return own
        try:
            return self._told(
                steps, tell, own, mends=not self.is_manual
            )  # a training step that is manual is begun again
        except WorldBroken as failure:  # until the next step, which mends the world
            self._unheard_in = self._job.world.version
            steps.place.answers.has_own = True
            self._job.warn(f"{what} is each worker's own: {failure}")
            return own

    def _told(self, steps: Steps, tell: Callable[[], Any], own: Any, *, mends: bool) -> Any:
        def waiting() -> Any:
            self._job.advance(Activity.WAIT)
            try:
                return tell()
            finally:
                self._job.advance(Activity.UPDATE)

        if not _is_within(steps):
            return waiting()
        answer = steps.ask(waiting, mends=mends)
        return own if answer is None and not steps.open_batches else answer


def _is_within(steps: Steps) -> bool:
    """A step has begun, whose gradients are yet to be summed: the world can be mended."""
    return bool(steps.open_batches) and not steps.is_reduced
