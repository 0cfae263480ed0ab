"""Where training stands, and what comes next: epochs, position in samples, steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from elasticdl.elastic.batch_plan import BatchPolicy, worker_slices
from elasticdl.elastic.order import epoch_order


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
    """One step as one worker sees it."""

    epoch: int
    step: int  # number of the step that this is, from 1
    batch: int  # samples in the global batch
    after: Progress  # where training stands when this step has been made
    micro_batches: tuple[npt.NDArray[np.int64], ...]  # sample indices of this worker, one array a micro-batch


def remaining_steps(samples: int, position: int, policy: BatchPolicy, workers: int) -> int:
    """Steps to the end of the epoch; the last one may be smaller."""
    return -(-max(samples - position, 0) // policy.batch_size(workers))


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The data set as the plan sees it: a number of samples, and how they are ordered and cut."""

    samples: int
    policy: BatchPolicy
    seed: int = 0
    shuffle: bool = True

    def steps(self, progress: Progress, rank: int, workers: int) -> Iterator[StepPlan]:
        """The steps from ``progress`` to the end of its epoch; the last batch is simply smaller."""
        order = epoch_order(self.samples, self.seed, progress.epoch, shuffle=self.shuffle)
        size = self.policy.batch_size(workers)
        while progress.position < self.samples:
            indices = order[progress.position : progress.position + size]
            cuts = worker_slices(len(indices), rank, workers, self.policy.max_micro_batch)
            after = progress.after(len(indices))
            yield StepPlan(
                epoch=progress.epoch,
                step=progress.step + 1,
                batch=len(indices),
                after=after,
                micro_batches=tuple(indices[cut.start : cut.stop] for cut in cuts),
            )
            progress = after
