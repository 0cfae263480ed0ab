"""How a global batch is divided among workers and micro-batches, exactly.

For a global batch of G samples, at most M samples in one micro-batch and N workers, worker r takes floor(G/N)
or ceil(G/N) samples (the first G mod N workers one more, unless a micro-batch needs more than one sample), in ceil(share/M) micro-batches whose sizes differ by at
most one. Nobody exceeds M and the sum over all is exactly G. Weighing each micro-batch's mean gradient by its
size / G and reducing by Sum gives the mean over the global batch for every G, M and N.

(The formula of the Run:ai library floors twice, so that it overruns M and loses samples: G=256, M=64 on three GPUs
gives micro-batches of 85 and a batch of 255.)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise


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


def shares_of(batch: int, workers: int, least: int = 1, max_micro_batch: int | None = None) -> tuple[int, ...]:
    """Samples of every worker, in rank order. ``least``: of a share, and of a micro-batch, that is not empty, if the batch has as many.

    With one of 1 all workers take part that can; else some may have no sample.
    """
    unit = least if max_micro_batch == least else 1  # of which larger micro-batches leave nothing over
    units, rest = divmod(batch, unit)
    dividing = max(1, min(workers, batch // least))
    first, *others = (unit * share for share in split(units, dividing))
    return (first + rest, *others, *[0] * (workers - dividing))


def micro_batches(share: int, max_micro_batch: int | None) -> tuple[int, ...]:
    """Sizes of the micro-batches in which a worker runs its share; empty for a share of 0."""
    if share == 0:
        return ()
    return split(share, -(-share // max_micro_batch) if max_micro_batch else 1)


def plan_step(batch: int, workers: int, max_micro_batch: int | None) -> tuple[tuple[int, ...], ...]:
    """Micro-batch sizes of every worker, in rank order, for one step on ``batch`` samples."""
    return tuple(micro_batches(share, max_micro_batch) for share in split(batch, workers))


def worker_slices(
    batch: int, rank: int, workers: int, max_micro_batch: int | None, least: int = 1
) -> tuple[slice, ...]:
    """The micro-batches of one worker as ranges within the step's batch of ``batch`` samples. ``least``: see `shares_of`."""
    shares = shares_of(batch, workers, least, max_micro_batch)
    first = sum(shares[:rank])
    ends = list(accumulate(micro_batches(shares[rank], max_micro_batch), initial=first))
    return tuple(slice(start, stop) for start, stop in pairwise(ends))
