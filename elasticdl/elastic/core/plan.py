"""How a global batch is divided among workers and micro-batches: the only place that does so.

A batch is a row of numbered *units*, of one sample or of several. Each rank has a contiguous run of them, in rank order, and runs it
in micro-batches. Each micro-batch's mean gradient is weighed by its samples / G, for G samples in the batch, and all are summed:
this is the mean over the batch, however it is divided. Nobody exceeds the largest micro-batch, and each sample counts once.

(The formula of the Run:ai library floors twice, so that it overruns M and loses samples: G=256, M=64 on three GPUs
gives micro-batches of 85 and a batch of 255.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.int64] | Sequence[Any]  # what a sampler gives: mostly indices


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """The two policies, of which exactly one holds.

    Fixed global batch: ``global_batch`` samples a step whatever the number of workers. Fixed batch per worker:
    ``worker_batch`` samples a step and worker, so that the global batch grows with the workers.
    """

    global_batch: int | None
    worker_batch: int | None
    max_micro_batch: int | None = None

    def __post_init__(self) -> None:
        if (self.global_batch is None) == (self.worker_batch is None):
            raise ValueError("give either global_batch or worker_batch")
        for name in ("global_batch", "worker_batch", "max_micro_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")

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


def step_seed(seed: int, step: int, unit: int) -> int:
    """Seed of every random draw (dropout, augmentation) for a run that begins with this unit of a step; 32 bits.

    Not who makes the run decides, but what is in it: a step that is repeated draws the same numbers, also if another worker
    makes that run of it. All of a batch begins with unit 0, so that one worker draws by (seed, step) alone.
    """
    # NumPy's SeedSequence does as much in a hundred times the time, which each step would pay.
    digest = hashlib.blake2b(f"{seed} {step} {unit}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one worker runs through the model at once.

    ``indices``: a slice of the batch. ``weight``: its part of the mean over the batch; 0 if another worker runs these samples,
    too, and they count there. ``unit``: the number of its first. ``seed``: of its random draws.
    """

    indices: Samples
    weight: float
    unit: int = 0
    seed: int = 0

    @property
    def samples(self) -> int:
        """Those that count."""
        return len(self.indices) if self.weight else 0


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A global batch, divided.

    ``whole``: its samples, in order. ``shares``: units of each rank. ``unit``: samples of one; the last may have fewer.
    ``seed``, ``step``: from which random draws are seeded.
    """

    whole: Samples
    shares: tuple[int, ...]
    unit: int = 1
    seed: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        if sum(self.shares) != (units := -(-len(self.whole) // self.unit)):
            raise ValueError(f"shares {self.shares} of a batch of {units} units: expected {units} in all")

    @classmethod
    def equal(
        cls, whole: Samples, workers: int, *, least: int = 1, most: int | None = None, seed: int = 0, step: int = 0
    ) -> Self:
        """By `equal_shares`."""
        return cls(whole, equal_shares(len(whole), workers, least, most), seed=seed, step=step)

    def run(self, rank: int) -> range:
        """The numbers of this rank's units."""
        first = sum(self.shares[:rank])
        return range(first, first + self.shares[rank])

    def seed_of(self, rank: int) -> int:
        """Of what this rank draws in the step, if it is not seeded for each micro-batch."""
        return step_seed(self.seed, self.step, self.run(rank).start)

    def mine(self, rank: int, most: int | None = None, least: int = 1) -> tuple[MicroBatch, ...]:
        """The run of this rank in as few micro-batches as can be, whose sizes differ by one unit at most; none without a unit.

        ``most``: samples of one, at least a unit. ``least``: none has fewer, even if one has more than ``most`` then.
        """
        if not (run := self.run(rank)):
            return ()
        parts = -(-len(run) // max(1, most // self.unit)) if most else 1
        parts = max(1, min(parts, len(run) * self.unit // least))
        ends = accumulate(split(len(run), parts), initial=run.start)
        return tuple(self._micro_batch(start, end) for start, end in pairwise(ends))

    def whole_run(self, rank: int) -> MicroBatch:
        """The run of this rank as one micro-batch, for a loop that must be given something in each step.

        If the run is empty, it is the first one of another rank, with weight 0.
        """
        if mine := self.mine(rank):
            return mine[0]
        others = (replace(self.mine(other)[0], weight=0.0) for other, units in enumerate(self.shares) if units)
        return next(others, MicroBatch((), 0.0))

    def _micro_batch(self, start: int, end: int) -> MicroBatch:
        """Of the units from ``start`` up to ``end``."""
        indices = self.whole[start * self.unit : end * self.unit]
        return MicroBatch(indices, len(indices) / len(self.whole), start, step_seed(self.seed, self.step, start))
