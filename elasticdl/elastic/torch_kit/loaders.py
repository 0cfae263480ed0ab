"""The elastic sampler: which samples this worker takes next, exact for any history of workers."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import replace
from functools import partial
from itertools import tee
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import StepPlan
from elasticdl.elastic.torch_kit.reducer import GradientReducer
from elasticdl.elastic.torch_kit.tensors import ElasticContext, seed_generators
from elasticdl.elastic.training import cursor
from elasticdl.elastic.training.cursor import ElasticLoader, Ordered
from elasticdl.elastic.training.pieces import mapped

Collate = Callable[[list[Any]], Any]
# Reduces the gradients of a step, the last of which a given call makes; None: they are there.
Reduce = Callable[[Callable[[], object] | None], None]


def to_device(sample: Any, device: torch.device) -> Any:
    """Tensors within tuples, lists and dicts moved to the device, all else as it is."""
    return mapped(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf, sample)


class StepBatch(cursor.StepBatch):
    """This worker's share of one global batch: iterate over its micro-batches.

    For each, call `backward` with the mean loss over the micro-batch: it is weighed so that the gradients of all
    workers sum up to the mean over the global batch. That is what they are after the last micro-batch.
    """

    def __init__(
        self,
        plan: StepPlan,
        samples: Iterator[Any],
        job: ElasticContext,
        reducer: GradientReducer,
        reduce: Reduce,
    ) -> None:
        super().__init__(plan, (to_device(sample, job.device) for sample in samples), job)
        self._reducer = reducer
        self._reduce = reduce

    def __iter__(self) -> Iterator[Any]:
        self._reducer.begin_passes()
        for sample in super().__iter__():
            self._reducer.reset_buffers()
            yield sample
        if not self.plan.micro_batches:
            self._reduce(None)

    @property
    def untaken(self) -> int:
        """Micro-batches that the training function has not asked for."""
        return len(self.plan.micro_batches) - 1 - self.micro_batch

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean loss of the present micro-batch, scaled by its part of the global batch; call it once for each.

        Instead of `backward`, where the backward pass is the script's own, as with a GradScaler.

        Args:
            loss: a tensor of one element, the mean over the micro-batch.

        Raises:
            UserError: the batch is over, or the loss is no mean.
        """
        self._reducer.weighed.expect()
        return self._count(loss)

    def _count(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, weighed."""
        self.require_present()
        self._reducer.weighed.look(loss, self.micro_batch_size)
        weight = self.micro_batch_size / self.plan.batch
        is_first = self._job.world.rank == self.micro_batch == 0
        self._reducer.add(loss, self.micro_batch_size, weight=weight, is_first=is_first)
        return loss * (weight * self._job.spread.parts)  # FSDP makes the mean over the processes of a worker

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradient of the present micro-batch from its mean loss.

        With the last micro-batch gradients are reduced, while they are made: as with DistributedDataParallel they are the same
        on all workers afterwards.

        Args:
            loss: a tensor of one element, the mean over the micro-batch.

        Raises:
            UserError: the batch is over, or the loss is no mean.
            WorldBroken: the step is torn; parameters are untouched.
        """
        backward: Callable[[], object] = self._count(loss).backward
        if self.untaken:
            self._reducer.backward(backward, last=False)
        else:
            self._reduce(backward)


class ElasticSampler(Ordered, Sampler[list[int]]):
    """A batch sampler for ``torch.utils.data.DataLoader``: each batch of indices is one micro-batch of this worker.

    Iterate over `steps`, not over the loader: workers have unequal numbers of micro-batches, and each has to take part
    in every step. What is left of an epoch is cut anew whenever the world changes; every sample is used exactly once
    per epoch. Moved on by the training state after each optimizer step, not by iterating: samples that a loader has
    fetched ahead do not count.
    """

    current: StepBatch | None
    _job: ElasticContext

    def __init__(
        self, job: ElasticContext, data: Sized | int, *, shuffle: bool = True, drop_last: bool = False
    ) -> None:
        super().__init__(job, data, shuffle=shuffle, drop_last=drop_last)
        self._reducer: GradientReducer | None = None
        self._reduce: Reduce = lambda backward: None
        self._ahead: Iterator[StepPlan] | None = None

    def attach(self, reducer: GradientReducer, reduce: Reduce, least: int = 1) -> None:
        """Say where gradients are accumulated, and what reduces them; done by the training state. ``least``: samples of a micro-batch."""
        self.order = replace(self.order, least=least)
        self._reducer, self._reduce = reducer, reduce

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
        samples: Iterator[Any] | None = None
        try:
            for plan in plans:
                if samples is None:  # torch's loader draws the seed of its processes from the global generator
                    seed_generators(plan.seed)
                    samples = iter(loader)
                seed_generators(plan.seed)
                self._reducer.open()
                self._reducer.drop_gradients()
                batch = StepBatch(plan, samples, self._job, self._reducer, self._reduce)
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
        return (np.asarray(each.indices).tolist() for plan in self._ahead for each in plan.micro_batches)


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


class ElasticDataLoader(ElasticLoader[ElasticSampler]):
    """Yields one `StepBatch` per step from where training stands to the end of the epoch; see `ElasticSampler`."""

    def __init__(
        self,
        job: ElasticContext,
        dataset: Dataset[Any],
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
    ) -> None:
        super().__init__(ElasticSampler(job, dataset, shuffle=shuffle, drop_last=drop_last))  # type: ignore[arg-type]
        self.dataset = dataset
        self._fetch = partial(fetch, dataset, self.sampler, job.device, num_workers=num_workers, collate_fn=collate_fn)

    def __iter__(self) -> Iterator[StepBatch]:
        return self.sampler.steps(self._fetch())


def fetch(
    dataset: Dataset[Any],
    batches: Iterable[list[int]],
    device: torch.device,
    *,
    num_workers: int = 0,
    collate_fn: Collate | None = None,
    generator: torch.Generator | None = None,
) -> DataLoader[Any]:
    """Torch's own loader over given batches of indices; pinned memory when they go to a GPU.

    ``generator``: from which the seed of its processes, if there are any, is drawn; else the global one.
    """
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=num_workers,
        collate_fn=collate_fn,
        pin_memory=device.type != "cpu",
        generator=generator,
        # A fork would take the session's threads and locks along.
        multiprocessing_context="forkserver" if num_workers else None,
    )
