"""What workers say to each other between two steps, or between two batches of one: rank 0's decisions, and means."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import torch

from elasticdl.elastic.core.errors import WorldBroken
from elasticdl.elastic.core.step_times import Activity
from elasticdl.elastic.torch.context import ElasticContext
from elasticdl.elastic.torch.steps import Steps

log = logging.getLogger(__name__)


class Decisions:
    """Each is one small collective, which the scripts of all workers call alike."""

    def __init__(self, job: ElasticContext) -> None:
        self.steps: Steps | None = None  # while this worker calls what the others call
        self.said = 0  # by the others, in the step in hand, before this worker has come
        self._job = job
        self._unheard_in = -1  # the world that broke while something was said

    def of_first(self, value: Any) -> Any:
        """Rank 0's value, on all workers."""
        if self._is_passed_over():
            return value
        self._job.advance(Activity.WAIT)
        try:
            return pickle.loads(self._job.collective.broadcast_bytes(pickle.dumps(value), "elasticdl.decision"))
        except WorldBroken as failure:
            self._fall_silent("a decision", failure)
            return value
        finally:
            self._job.advance(Activity.UPDATE)

    def anybody(self, wish: bool) -> bool | None:
        """Whether any worker wishes it; None: the world has broken, and the answer comes when it is asked again."""
        steps = self.steps
        if steps is None or self._job.size == 1:
            return wish
        if self._is_passed_over():
            # Who is on its way wishes nothing: what it has seen is not the job's. The others have gone on here.
            return None if self._unheard_in == self._job.world.version else False
        if self._job.session.core.stopping is not None:  # it leaves, and the others go on
            wish = False
        self._job.advance(Activity.WAIT)
        wishes = torch.tensor([float(wish)], dtype=torch.float64)
        try:
            self._job.collective.sum_([wishes], "elasticdl.anybody")
        except WorldBroken as failure:
            self._unheard_in = self._job.world.version
            log.info("whether to stop is asked again after the next step: %s", failure)
            return None
        finally:
            self._job.advance(Activity.UPDATE)
        return bool(wishes.item() > 0)

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over the workers."""
        if not torch.is_floating_point(tensor) or self._is_passed_over():
            return tensor
        self._job.advance(Activity.WAIT)
        total = tensor.detach().double() / self._job.size
        try:
            self._job.collective.sum_([total], "elasticdl.mean")
        except WorldBroken as failure:
            self._fall_silent("a mean", failure)
            return tensor
        finally:
            self._job.advance(Activity.UPDATE)
        return total.to(tensor.dtype)

    def _fall_silent(self, what: str, failure: WorldBroken) -> None:
        """Until the next step, which mends the world."""
        self._unheard_in = self._job.world.version
        self._job.warn(f"{what} is each worker's own: {failure}")

    def _is_passed_over(self) -> bool:
        """Nobody else says something here: this worker is alone, or on its way; the world has broken; or the others were this far
        already when their step was torn, of which this worker makes all batches. Between two of these there may be a
        validation, or a callback's decision.
        """
        steps = self.steps
        if steps is None or self._job.size == 1 or steps.is_behind:
            return True
        nobody_hears = self._unheard_in == self._job.world.version
        if not steps.hand:
            return nobody_hears
        steps.place.means += 1
        return nobody_hears or steps.place.means <= self.said
