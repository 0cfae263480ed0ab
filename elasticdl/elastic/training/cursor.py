"""Where training stands in the data, and which samples this worker takes next; what all frameworks share of it."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sized
from typing import Any, Generic, TypeVar

import numpy as np

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import BatchPlan, Progress, SampleOrder, StepPlan
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.training.data_facts import TRAINING, Source
from elasticdl.elastic.training.job import JobContext

BatchT = TypeVar("BatchT", bound="StepBatch")

_END = object()  # of what was loaded


def seed_generators(seed: int) -> None:
    """Python's and NumPy's global ones."""
    random.seed(seed)
    np.random.seed(seed)


class StepBatch:
    """This worker's share of one global batch: iterate over its micro-batches, once."""

    def __init__(self, plan: StepPlan, samples: Iterator[Any], job: JobContext) -> None:
        self.plan = plan
        self.micro_batch = -1  # number of the present one, from 0
        self.over = False  # the loader has given another, or the world has changed
        self._samples = samples
        self._job = job

    @property
    def share(self) -> float:
        """The part of the global batch that is this worker's."""
        return self.plan.samples / self.plan.batch

    @property
    def micro_batch_size(self) -> int:
        """Samples of the present micro-batch; 0 before the first."""
        return self.plan.micro_batches[self.micro_batch].samples if self.micro_batch >= 0 else 0

    def require_present(self) -> None:
        """Raises UserError if this batch is not the one that the present step is made on."""
        if self.over:
            raise UserError(
                f"the batch of step {self.plan.step} is over, as the loader has given a later one or the workers have "
                "changed: use each batch up before the next is fetched"
            )

    def __iter__(self) -> Iterator[Any]:
        if self.micro_batch >= 0:
            raise UserError(
                f"the micro-batches of step {self.plan.step} are loaded once, and something has gone through them before "
                "(`in`, list(), a second loop): keep what is needed again in a list"
            )
        for number in range(len(self.plan.micro_batches)):
            self.require_present()
            self._job.advance(Activity.DATA)
            self.micro_batch = number
            sample = next(self._samples, _END)
            self._job.advance(Activity.COMPUTE)
            if sample is _END:
                raise RuntimeError("nothing was loaded for this batch: iterate over it within the loop that gave it")
            yield sample


def _length(data: Sized) -> int:
    """Of what may be a stream, which has none."""
    try:
        return len(data)
    except TypeError:
        raise UserError(
            f"the data set is a {type(data).__name__} without len(), and what is only iterated over can't be divided among workers that come "
            "and go: give a data set with __len__ and __getitem__"
        ) from None


class Ordered:
    """A cursor in an order of ours: each sample once per epoch. It is moved on by steps, and not by iterating."""

    def __init__(
        self,
        job: JobContext,
        data: Sized | int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        steps_per_epoch: int = 0,
    ) -> None:
        """``data``: the data set, or the number of its samples. ``steps_per_epoch``: see `SampleOrder`.

        Raises:
            UserError: the data set has no length, or no samples, or fewer than a step takes; or an epoch's steps depend on the workers.
        """
        if steps_per_epoch and not job.policy.fixed:
            raise UserError(
                "steps_per_epoch: with a batch size per worker the samples of a step depend on the number of workers: give "
                "elastic.init() a global batch size"
            )
        samples = data if isinstance(data, int) else _length(data)
        if samples < 1:
            raise UserError(f"the data set has {samples} samples; expected at least one")
        self.order = SampleOrder(samples, job.policy, job.seed, shuffle, drop_last, steps_per_epoch)
        self.order.require_step(workers=1)
        self.sources = [] if isinstance(data, int) else [Source.of(TRAINING, data)]
        self.current: StepBatch | None = None  # the step that is being made
        self.settings_changed: Callable[[], bool] = lambda: False  # of the optimizer, since they were saved
        self.step_begins: Callable[[], None] = lambda: None  # the state looks at itself
        self._over = (-1, Progress())  # world and place in which the last batch of an epoch was behind
        self._job = job

    @property
    def progress(self) -> Progress:
        return self._job.progress

    def epochs(self, count: int) -> Iterator[int]:
        """Epochs from the present one up to ``count``, the first perhaps partly done."""
        while self.progress.epoch < count:
            epoch = self.progress.epoch
            yield epoch
            if self.progress.epoch == epoch:  # no commit has ended it
                self._job.epoch_ended()

    def begin(self, batch: BatchT) -> BatchT:
        """From here on the present step is made on this batch, which is given to the training function."""
        self.drop()
        self.step_begins()
        self._job.begin(batch.plan, self.settings_changed)
        self.current = batch
        return batch

    def end(self) -> None:
        """There is no further batch in this epoch."""
        self.drop()
        self._over = (self._job.world.version, self.progress)
        self._job.batches_over()

    def drop(self) -> None:
        """The present batch, if any, is over."""
        if self.current is not None:
            self.current.over = True
        self.current = None
        self._over = (-1, Progress())

    @property
    def at_end(self) -> bool:
        """Whether no step is left of the present epoch."""
        return not self.order.remaining_steps(self.progress, self._job.world.size)

    def __len__(self) -> int:
        """Steps of a whole epoch. With a fixed global batch always the same number, else that of the present workers.

        Raises:
            UserError: it depends on the workers, and there are none yet.
        """
        if not (self.order.policy.fixed or self._job.has_world):
            raise UserError(
                "len(loader): with batch_size_per_worker the steps of an epoch depend on the number of workers: ask within "
                "the function under @elastic.run, or give elastic.init(global_batch_size=...)"
            )
        return self.order.remaining_steps(Progress(), self._job.world.size)

    def batches(self, workers: int) -> Iterator[BatchPlan]:
        return self.order.batches(self.progress, workers)

    def plans(self) -> Iterator[StepPlan]:
        """This worker's part of the steps from where training stands to the end of the epoch, in the present world.

        Raises:
            UserError: it was gone through, and the epoch has not ended.
        """
        world = self._job.world
        if self.at_end and self._over == (world.version, self.progress):
            raise UserError(
                f"the loader has no further batch in epoch {self.progress.epoch + 1}, and its loop begins again: go through the epochs by "
                "`for epoch in loader.epochs(n)`, which goes on where training stands, and not by range(n)"
            )
        return self.order.steps(self.progress, world.rank, world.size, self._job.spread)


CursorT = TypeVar("CursorT", bound=Ordered)


class ElasticLoader(ABC, Generic[CursorT]):
    """Yields one `StepBatch` per step from where training stands to the end of the epoch."""

    def __init__(self, sampler: CursorT) -> None:
        self.sampler = sampler

    @abstractmethod
    def __iter__(self) -> Iterator[StepBatch]: ...

    def epochs(self, count: int) -> Iterator[int]:
        """Epochs from the present one up to ``count``, the first perhaps partly done."""
        return self.sampler.epochs(count)

    def __len__(self) -> int:
        """Steps of a whole epoch; see `Ordered`."""
        return len(self.sampler)
