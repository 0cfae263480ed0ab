"""Which samples this worker takes next, exact for any history of workers; what all frameworks share of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from elasticdl.elastic.progress import Progress, SampleOrder, StepPlan
from elasticdl.elastic.world import World

_END = object()  # of what was loaded


class Host(Protocol):
    """What a sampler asks of the job it belongs to."""

    @property
    def world(self) -> World: ...

    def advance(self, *, waiting: bool) -> None: ...

    def record_samples(self, plan: StepPlan) -> None: ...


class StepBatch:
    """This worker's share of one global batch: iterate over its micro-batches."""

    def __init__(self, plan: StepPlan, samples: Iterator[Any], host: Host) -> None:
        self.plan = plan
        self.micro_batch = -1  # number of the present one, from 0
        self._samples = samples
        self._host = host

    @property
    def share(self) -> float:
        """The part of the global batch that is this worker's."""
        return sum(len(indices) for indices in self.plan.micro_batches) / self.plan.batch

    @property
    def micro_batch_size(self) -> int:
        """Samples of the present micro-batch; 0 before the first."""
        return len(self.plan.micro_batches[self.micro_batch]) if self.micro_batch >= 0 else 0

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self.plan.micro_batches)):
            self._host.advance(waiting=False)
            self.micro_batch = number
            sample = next(self._samples, _END)
            if sample is _END:
                raise RuntimeError("nothing was loaded for this batch: iterate over it within the loop that gave it")
            yield sample


class EpochPosition:
    """Where training stands in the data set: moved on by the training state after each optimizer step, not by iterating.

    What is left of an epoch is cut anew whenever the world changes; every sample is used exactly once per epoch.
    """

    def __init__(self, order: SampleOrder, host: Host) -> None:
        self.order = order
        self.progress = Progress()
        self.current: StepBatch | None = None  # the step that is being made
        self._host = host

    def epochs(self, count: int) -> Iterator[int]:
        """Epochs from the present one up to ``count``, the first perhaps partly done."""
        while self.progress.epoch < count:
            yield self.progress.epoch
            self.progress = self.progress.next_epoch()

    @property
    def at_end(self) -> bool:
        """Whether nothing is left of the present epoch."""
        return self.progress.position >= self.order.samples

    def plans(self) -> Iterator[StepPlan]:
        """This worker's part of the steps from where training stands to the end of the epoch, in the present world."""
        world = self._host.world
        return self.order.steps(self.progress, world.rank, world.size)
