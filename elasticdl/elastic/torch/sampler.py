"""The elastic sampler: which samples this worker takes next, exact for any history of workers."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from itertools import tee
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Sampler

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.progress import SampleOrder, StepPlan
from elasticdl.elastic.script.children import require_guard
from elasticdl.elastic.torch.device import to_device
from elasticdl.elastic.torch.reducer import GradientReducer
from elasticdl.elastic.torch.rng import seed_step
from elasticdl.elastic.training import sampler
from elasticdl.elastic.training.sampler import Host as JobHost


class Host(JobHost, Protocol):
    """What a sampler asks of the job it belongs to."""

    @property
    def device(self) -> torch.device: ...


class StepBatch(sampler.StepBatch):
    """This worker's share of one global batch: iterate over its micro-batches.

    For each, call `backward` with the mean loss over the micro-batch: it is weighed so that the gradients of all
    workers sum up to the mean over the global batch.
    """

    def __init__(self, plan: StepPlan, samples: Iterator[Any], host: Host, reducer: GradientReducer) -> None:
        super().__init__(plan, (to_device(sample, host.device) for sample in samples), host)
        self._reducer = reducer

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            self._reducer.rewind()
            yield sample

    @property
    def untaken(self) -> int:
        """Micro-batches that the training function has not asked for."""
        return len(self.plan.micro_batches) - 1 - self.micro_batch

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean loss of the present micro-batch, scaled by its part of the global batch; call it once for each."""
        self.require_present()
        weight = self.micro_batch_size / self.plan.batch
        self._reducer.add_loss(loss, self.micro_batch_size)
        self._reducer.add_moves(weight, lead=self._host.world.rank == self.micro_batch == 0)
        return loss * weight

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradient of the present micro-batch from its mean loss."""
        self.weigh(loss).backward()  # type: ignore[no-untyped-call]


class ElasticSampler(sampler.DataCursor, Sampler[list[int]]):
    """A batch sampler for ``torch.utils.data.DataLoader``: each batch of indices is one micro-batch of this worker.

    Iterate over `steps`, not over the loader: workers have unequal numbers of micro-batches, and each has to take part
    in every step. What is left of an epoch is cut anew whenever the world changes; every sample is used exactly once
    per epoch. Moved on by the training state after each optimizer step, not by iterating: samples that a loader has
    fetched ahead do not count.
    """

    current: StepBatch | None

    def __init__(self, order: SampleOrder, host: Host) -> None:
        super().__init__(order, host)
        self._job = host
        self._reducer: GradientReducer | None = None
        self._ahead: Iterator[StepPlan] | None = None
        self.guarded = False  # the script was read: it may be edited while it runs

    def attach(self, reducer: GradientReducer) -> None:
        """Say where gradients are accumulated; done by the training state."""
        self._reducer = reducer

    def steps(self, loader: Iterable[Any]) -> Iterator[StepBatch]:
        """One `StepBatch` per step from where training stands to the end of the epoch, on what ``loader`` loads.

        ``loader`` gives one item for each micro-batch that it draws from this sampler, in order; it may run ahead.

        Raises:
            UserError: it draws from another sampler, or would fork.
        """
        if self._reducer is None:
            raise RuntimeError("give the sampler or its loader to TorchState(...) before iterating over it")
        if isinstance(loader, DataLoader):
            _require_usable(loader, self)
        # Torch's loader may run ahead of the steps; cutting the whole epoch first would be part of every pause.
        plans, ahead = tee(self.plans())
        self._ahead = ahead
        rank = self._job.world.rank
        # Torch's loader draws the seed of its processes from the global generator.
        seed_step(self.order.seed, self.progress.step + 1, rank)
        samples = iter(loader)
        try:
            for plan in plans:
                seed_step(self.order.seed, plan.step, rank)
                self._reducer.begin()
                batch = StepBatch(plan, samples, self._job, self._reducer)
                yield self.begin(batch)
                for _ in range(batch.untaken):  # else they would be taken for those of the next step
                    next(samples, None)
            self.end()
        finally:
            if self._ahead is ahead:  # else this is the late end of an abandoned iteration
                self._ahead = None

    def __iter__(self) -> Iterator[list[int]]:
        if self._ahead is None:
            raise RuntimeError("iterate over sampler.steps(loader), not over the loader or the sampler itself")
        return (indices.tolist() for plan in self._ahead for indices in plan.micro_batches)


def _require_usable(loader: DataLoader[Any], own: ElasticSampler) -> None:
    if loader.batch_sampler is not own:
        raise UserError(
            "sampler.steps(loader): the loader draws from another sampler; make it DataLoader(dataset, batch_sampler=sampler)"
        )
    context = loader.multiprocessing_context or multiprocessing
    if loader.num_workers and context.get_start_method() == "fork":
        raise UserError(
            "sampler.steps(loader): its processes would be forked, and take this one's threads and locks along; "
            'make it DataLoader(..., num_workers=..., multiprocessing_context="forkserver")'
        )
    if loader.num_workers and not own.guarded:
        require_guard(loader.num_workers)
        own.guarded = True
