"""How a global batch is divided among workers and micro-batches: the only place that does so.

Each rank has a contiguous run of the batch's samples, in rank order, and runs it in micro-batches. Each micro-batch's mean gradient is weighed by its samples / G, for G samples in the batch, and all are summed:
this is the mean over the batch, however it is divided. Nobody exceeds the largest micro-batch, and each sample counts once.

(The formula of the Run:ai library floors twice, so that it overruns M and loses samples: G=256, M=64 on three GPUs
gives micro-batches of 85 and a batch of 255.)

Beside the division: the order of an epoch's samples, and where in it training stands.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from elasticdl.common.errors import UserError

Samples = npt.NDArray[np.int64] | Sequence[Any]  # what a sampler gives: mostly indices
_ADDRESS = " at 0x"  # of an object in memory, which no other process has


def checksum_of(samples: Samples) -> int:
    """Of what a sampler gives, in this order. It is the same in every process, also for indices that are no numbers."""
    try:
        content = samples.tobytes() if isinstance(samples, np.ndarray) else array("q", samples).tobytes()
    except (TypeError, OverflowError):
        content = plain_text(list(samples)).encode()
    return zlib.crc32(content)


def plain_text(value: Any) -> str:
    """The same in every process, whatever it is: of what does not say its content (a file, a thread, a function), the kind."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  it may be anybody's
        return type(value).__name__
    return type(value).__name__ if _ADDRESS in text or text.startswith("<") else text


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """The two policies, of which exactly one holds.

    Fixed global batch: ``global_batch`` samples a step whatever the number of workers. Fixed batch per worker:
    ``worker_batch`` samples a step and worker, so that the global batch grows with the workers.
    """

    global_batch: int | None
    worker_batch: int | None
    max_micro_batch: int | None = None

    @property
    def fixed(self) -> bool:
        """Whether the global batch stays the same when workers come and go."""
        return self.global_batch is not None

    def batch_size(self, workers: int) -> int:
        """Samples of a whole step with this many workers."""
        if self.global_batch is not None:
            return self.global_batch
        assert self.worker_batch is not None
        return self.worker_batch * workers

    @property
    def most_at_once(self) -> int:
        """Samples that a worker may have to compute at once."""
        return self.max_micro_batch or self.batch_size(1)


def split(total: int, parts: int) -> tuple[int, ...]:
    """``total`` as ``parts`` whole numbers that differ by at most one, the larger ones first."""
    small, larger = divmod(total, parts)
    return (small + 1,) * larger + (small,) * (parts - larger)


@lru_cache(maxsize=64)
def equal_shares(batch: int, workers: int, least: int = 1, most: int | None = None) -> tuple[int, ...]:
    """Samples of each rank: floor(batch / workers) or one more.

    ``least``: samples of a share that is not empty, if the batch has as many, and of a micro-batch. With more than one, some
    workers may have no sample. ``most``: samples of a micro-batch.
    """
    step = least if most == least else 1  # then only whole micro-batches leave none that is too small
    steps, rest = divmod(batch, step)
    dividing = max(1, min(workers, batch // least))
    first, *others = (step * share for share in split(steps, dividing))
    return (first + rest, *others, *[0] * (workers - dividing))


def step_seed(seed: int, step: int, first: int) -> int:
    """Seed of every random draw (dropout, augmentation) for a run that begins with this sample of a step; 32 bits.

    Not who makes the run decides, but what is in it: a step that is repeated draws the same numbers, also if another worker
    makes that run of it. All of a batch begins with sample 0, so that one worker draws by (seed, step) alone.
    """
    # NumPy's SeedSequence does as much in a hundred times the time, which each step would pay.
    digest = hashlib.blake2b(f"{seed} {step} {first}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one worker runs through the model at once.

    ``indices``: a slice of the batch. ``weight``: its part of the mean over the batch; 0 if another worker runs these samples,
    too, and they count there. ``first``: the number of its first sample in the batch. ``seed``: of its random draws.
    """

    indices: Samples
    weight: float
    first: int = 0
    seed: int = 0

    @property
    def samples(self) -> int:
        """Those that count."""
        return len(self.indices) if self.weight else 0


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A global batch, divided.

    ``whole``: its samples, in order. ``shares``: samples of each rank. ``seed``, ``step``: from which random draws are seeded.
    """

    whole: Samples
    shares: tuple[int, ...]
    seed: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        if sum(self.shares) != len(self.whole):
            raise ValueError(f"shares {self.shares} of a batch of {len(self.whole)}: expected as many in all")

    @classmethod
    def equal(
        cls, whole: Samples, workers: int, *, least: int = 1, most: int | None = None, seed: int = 0, step: int = 0
    ) -> Self:
        """By `equal_shares`."""
        return cls(whole, equal_shares(len(whole), workers, least, most), seed=seed, step=step)

    def run(self, rank: int) -> range:
        """The numbers of this rank's samples in the batch."""
        first = sum(self.shares[:rank])
        return range(first, first + self.shares[rank])

    def seed_of(self, rank: int) -> int:
        """Of what this rank draws in the step, if it is not seeded for each micro-batch."""
        return step_seed(self.seed, self.step, self.run(rank).start)

    def mine(self, rank: int, most: int | None = None, least: int = 1) -> tuple[MicroBatch, ...]:
        """The run of this rank in as few micro-batches as can be, whose sizes differ by one at most; none without a sample.

        ``most``: samples of one. ``least``: none has fewer, even if one has more than ``most`` then.
        """
        if not (run := self.run(rank)):
            return ()
        parts = -(-len(run) // most) if most else 1
        parts = max(1, min(parts, len(run) // least))
        ends = accumulate(split(len(run), parts), initial=run.start)
        return tuple(self._micro_batch(start, end) for start, end in pairwise(ends))

    def alike(self, rank: int, together: int, most: int | None) -> tuple[MicroBatch, ...]:
        """As `mine`, in as many micro-batches as the other ranks of its worker have: ``together``, which come one after the other. What they run
        waits for each other. One without a sample is another one, with weight 0."""
        largest = self.largest(rank, together)
        count = -(-largest // max(most or largest, 1))
        run = self.run(rank)
        if not run:
            return (self.whole_run(rank),) * count
        ends = accumulate(split(len(run), count), initial=run.start)
        made = [self._micro_batch(start, end) for start, end in pairwise(ends)]
        return tuple(each if len(each.indices) else replace(made[0], weight=0.0) for each in made)

    def largest(self, rank: int, together: int) -> int:
        """Samples of the largest share of this rank's worker, which has so many ranks; at least 1."""
        first = rank - rank % together
        return max(*self.shares[first : first + together], 1)

    def whole_run(self, rank: int) -> MicroBatch:
        """The run of this rank as one micro-batch, for a loop that must be given something in each step.

        If the run is empty, it is the first one of another rank, with weight 0.
        """
        if mine := self.mine(rank):
            return mine[0]
        others = (replace(self.mine(other)[0], weight=0.0) for other, share in enumerate(self.shares) if share)
        return next(others, MicroBatch((), 0.0))

    def _micro_batch(self, start: int, end: int) -> MicroBatch:
        indices = self.whole[start:end]
        return MicroBatch(indices, len(indices) / len(self.whole), start, step_seed(self.seed, self.step, start))


@dataclass(frozen=True, slots=True)
class Spread:
    """How the processes of a worker share its part of a batch: in so many ``parts``, of which this process has one.

    With FSDP each has samples of its own, and FSDP makes the mean of their gradients. With tensor parallelism all have the same: then one of
    them counts the samples.
    """

    parts: int = 1
    part: int = 0
    counts: bool = True

    def place(self, rank: int, size: int) -> tuple[int, int]:
        """The number of this process's part of a global batch, and how many parts there are. ``rank``, ``size``: of the world."""
        return rank * self.parts + self.part, size * self.parts


WHOLE = Spread()


# Where training stands, and what comes next: epochs, the order of their samples, steps.


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


@lru_cache(maxsize=1)  # it is cut anew in each world, and making the order of many samples takes seconds
def epoch_order(samples: int, seed: int, epoch: int, *, shuffle: bool = True) -> npt.NDArray[np.int64]:
    """Indices of all samples in the order of this epoch, shape (samples,); every index exactly once.

    A pure function, so that no history of workers can change it. Philox is counter-based: (seed, epoch) select independent streams, on every platform the same.
    """
    order = np.arange(samples, dtype=np.int64)
    if shuffle:
        np.random.Generator(np.random.Philox(key=[seed, epoch])).shuffle(order)
    order.setflags(write=False)  # plans are slices of it
    return order


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The data set as the plan sees it: a number of samples, and how they are ordered and cut."""

    samples: int
    policy: BatchPolicy
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False  # whether a pass ends where no whole global batch is left
    steps_per_epoch: int = 0  # an epoch is so many steps of a pass, or what is left of it; 0: a whole pass
    least: int = 1  # samples of a micro-batch, if the global batch has as many

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
        if not self.remaining_steps(Progress(), workers):
            raise UserError(
                f"drop_last=True: the {self.samples} samples of an epoch are fewer than one global batch of "
                f"{self.policy.batch_size(workers)}; expected at least as many"
            )

    def steps(self, progress: Progress, rank: int, workers: int, spread: Spread = WHOLE) -> Iterator[StepPlan]:
        """The steps from ``progress`` to the end of its epoch; unless it is left out, the last batch is simply smaller.

        Raises:
            UserError: with so many workers an epoch has no step.
        """
        self.require_step(workers)
        for plan in self.batches(progress, workers):
            after = progress.after(len(plan.whole))
            place = rank
            if spread.parts == 1:
                mine = plan.mine(rank, self.policy.max_micro_batch)
            else:
                place, parts = spread.place(rank, workers)
                plan = BatchPlan.equal(plan.whole, parts, least=self.least, seed=plan.seed, step=plan.step)
                mine = plan.alike(place, spread.parts, self.policy.max_micro_batch)
            at = (progress.epoch, progress.step + 1, len(plan.whole))
            yield StepPlan(*at, after, mine, whole=plan.whole, seed=plan.seed_of(place))
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
        return epoch_order(self.samples, self.seed, number, shuffle=self.shuffle)[first:end]

    def _place_of(self, epoch: int) -> tuple[int, int, int]:
        """The pass that this epoch is part of, and where in it the epoch begins and ends, in samples."""
        if not self.steps_per_epoch:
            return epoch, 0, self.samples
        number, part = divmod(epoch, self._epochs_of_pass)
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


@dataclass(frozen=True, slots=True)
class PartOrder(SampleOrder):
    """One pass in the data set's own order, in parts that never change: part k has the samples from k times ``policy.worker_batch`` on.

    A step gives each worker one part, the last of the pass to as many workers as it has parts. So whoever makes a part, and however
    often, makes it of the same samples.
    """

    def batches(self, progress: Progress, workers: int) -> Iterator[BatchPlan]:
        part, size = self.policy.batch_size(1), self.policy.batch_size(workers)
        for number in range(self.remaining_steps(progress, workers)):
            start = progress.position + number * size
            whole = range(start, min(start + size, self.samples))
            shares = (min(part, max(len(whole) - part * rank, 0)) for rank in range(workers))
            yield BatchPlan(whole, tuple(shares), seed=self.seed, step=progress.step + 1 + number)
