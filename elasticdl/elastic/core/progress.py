"""Where training stands, and what comes next: epochs, the order of their samples, steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.agreement import checksum_of
from elasticdl.elastic.core.plan import BatchPlan, BatchPolicy, MicroBatch, Samples


@dataclass(frozen=True, slots=True)
class Progress:
    """Everything before this point has been trained on exactly once.

    ``position`` counts samples of the epoch, not steps, so that it means the same for any number of workers;
    ``samples`` those of all epochs.
    """

    epoch: int = 0
    position: int = 0
    step: int = 0
    samples: int = 0

    def after(self, samples: int) -> Progress:
        return replace(self, position=self.position + samples, step=self.step + 1, samples=self.samples + samples)

    def next_epoch(self) -> Progress:
        return replace(self, epoch=self.epoch + 1, position=0)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step as one worker sees it: a `BatchPlan`, or several of which the step is made, and this worker's part."""

    epoch: int
    step: int  # number of the step that this is, from 1
    batch: int  # samples in the global batch
    after: Progress  # where training stands when this step has been made
    micro_batches: tuple[MicroBatch, ...]  # this worker's
    ends_epoch: bool = False  # as far as nobody else knows who has the order of samples
    whole: Samples = ()  # the samples of the global batch, as this worker believes; empty if nobody knows
    seed: int = 0  # of what this worker draws in the step

    @property
    def samples(self) -> int:
        """This worker's."""
        return sum(micro_batch.samples for micro_batch in self.micro_batches)

    @property
    def checksum(self) -> int:
        """The same for all who make this step on the same samples."""
        return checksum_of(self.whole) ^ self.epoch


def epoch_order(samples: int, seed: int, epoch: int, *, shuffle: bool = True) -> npt.NDArray[np.int64]:
    """Indices of all samples in the order of this epoch, shape (samples,); every index exactly once.

    A pure function, so that no history of workers can change it. Philox is counter-based: (seed, epoch) select independent streams, on every platform the same.
    """
    if not shuffle:
        return np.arange(samples, dtype=np.int64)
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return generator.permutation(samples).astype(np.int64, copy=False)


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The data set as the plan sees it: a number of samples, and how they are ordered and cut."""

    samples: int
    policy: BatchPolicy
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False  # whether a pass ends where no whole global batch is left
    steps_per_epoch: int = 0  # an epoch is so many steps of a pass, or what is left of it; 0: a whole pass
    first_epoch: int = 0  # with which a pass begins
    least: int = 1  # samples of a micro-batch, if the global batch has as many
    # Of the pass that was asked for last, which is cut anew in each world: making the order of many samples takes seconds.
    _order: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def remaining_steps(self, progress: Progress, workers: int) -> int:
        """Steps to the end of the epoch, if the number of workers stays as it is."""
        _, first, end = self._place_of(progress.epoch)
        whole, rest = divmod(max(end - first - progress.position, 0), self.policy.batch_size(workers))
        return whole if self.drop_last else whole + (rest > 0)

    def total_steps(self, progress: Progress, epochs: int, workers: int) -> int:
        """Steps of the whole training of so many epochs, if the number of workers stays as it is."""

        def steps(of: range) -> int:
            return sum(self.remaining_steps(Progress(epoch), workers) for epoch in of)

        later = range(progress.epoch + 1, epochs)
        passes, rest = divmod(len(later), self._epochs_of_pass)  # epochs may be many: 10**9 is a way to say "for ever"
        to_come = passes * steps(later[: self._epochs_of_pass]) + steps(later[:rest])
        return progress.step + self.remaining_steps(progress, workers) + to_come

    def require_step(self, workers: int) -> None:
        """Raises:
        UserError: an epoch would be over before its first step.
        """
        if not self.remaining_steps(Progress(self.first_epoch), workers):
            raise UserError(
                f"drop_last=True: the {self.samples} samples of an epoch are fewer than one global batch of "
                f"{self.policy.batch_size(workers)}; expected at least as many"
            )

    def steps(self, progress: Progress, rank: int, workers: int) -> Iterator[StepPlan]:
        """The steps from ``progress`` to the end of its epoch; unless it is left out, the last batch is simply smaller.

        Raises:
            UserError: with so many workers an epoch has no step.
        """
        self.require_step(workers)
        for plan in self.batches(progress, workers):
            after = progress.after(len(plan.whole))
            mine = plan.mine(rank, self.policy.max_micro_batch)
            at = (progress.epoch, progress.step + 1, len(plan.whole))
            yield StepPlan(*at, after, mine, whole=plan.whole, seed=plan.seed_of(rank))
            progress = after

    def batches(self, progress: Progress, workers: int) -> Iterator[BatchPlan]:
        """The global batches of these steps. Each is divided when it is asked for: a change of workers takes no time for what is left."""
        order, size = self._of_epoch(progress.epoch), self.policy.batch_size(workers)
        for number in range(self.remaining_steps(progress, workers)):
            start = progress.position + number * size
            yield BatchPlan.equal(
                order[start : start + size],
                workers,
                least=self.least,
                most=self.policy.max_micro_batch,
                seed=self.seed,
                step=progress.step + 1 + number,
            )

    def _of_epoch(self, epoch: int) -> npt.NDArray[np.int64]:
        number, first, end = self._place_of(epoch)
        order = self._order.get(number)
        if order is None:
            self._order.clear()  # two orders of many samples may be too much for the memory
            order = epoch_order(self.samples, self.seed, number, shuffle=self.shuffle)
            order.setflags(write=False)  # plans are slices of it
            self._order[number] = order
        return order[first:end]

    def _place_of(self, epoch: int) -> tuple[int, int, int]:
        """The pass that this epoch is part of, and where in it the epoch begins and ends, in samples."""
        if not self.steps_per_epoch:
            return epoch, 0, self.samples
        number, part = divmod(epoch - self.first_epoch, self._epochs_of_pass)
        size = self._epoch_samples
        return number, part * size, min((part + 1) * size, self.samples)

    @property
    def _epochs_of_pass(self) -> int:
        if not self.steps_per_epoch:
            return 1
        batch = self.policy.batch_size(1)
        trained = self.samples // batch * batch if self.drop_last else self.samples
        return max(-(-trained // self._epoch_samples), 1)

    @property
    def _epoch_samples(self) -> int:
        return self.steps_per_epoch * self.policy.batch_size(1)
