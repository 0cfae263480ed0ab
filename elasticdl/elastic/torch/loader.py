"""The elastic data loader: the steps that remain, cut for the present world."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import tee
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from elasticdl.elastic.order import step_seed
from elasticdl.elastic.progress import Progress, SampleOrder, StepPlan
from elasticdl.elastic.torch.reducer import GradientReducer
from elasticdl.elastic.torch.rng import seed_step
from elasticdl.elastic.world import World


class Host(Protocol):
    """What a loader asks of the job it belongs to."""

    @property
    def world(self) -> World: ...

    @property
    def device(self) -> torch.device: ...

    def advance(self, *, waiting: bool) -> None: ...

    def record_samples(self, plan: StepPlan) -> None: ...


class StepBatch:
    """This worker's share of one global batch: iterate over its micro-batches.

    For each, call `backward` with the mean loss over the micro-batch: it is weighed so that the gradients of all
    workers sum up to the mean over the global batch.
    """

    def __init__(self, plan: StepPlan, samples: Iterator[Any], host: Host, reducer: GradientReducer) -> None:
        self.plan = plan
        self._samples = samples
        self._host = host
        self._reducer = reducer
        self._current = 0

    @property
    def share(self) -> float:
        """The part of the global batch that is this worker's."""
        return sum(len(indices) for indices in self.plan.micro_batches) / self.plan.batch

    def __iter__(self) -> Iterator[Any]:
        for indices in self.plan.micro_batches:
            self._host.advance(waiting=False)
            self._current = len(indices)
            yield to_device(next(self._samples), self._host.device)

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean loss of the present micro-batch, scaled by its part of the global batch; call it once for each."""
        self._reducer.add_loss(loss, self._current)
        return loss * (self._current / self.plan.batch)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradient of the present micro-batch from its mean loss."""
        self.weigh(loss).backward()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """How samples are fetched; as in ``torch.utils.data.DataLoader``."""

    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None


class ElasticDataLoader:
    """Yields one `StepBatch` per step from where training stands to the end of the epoch.

    What is left of an epoch is cut anew whenever the world changes; every sample is used exactly once per epoch.
    Moved on by the training state after each optimizer step, not by iterating.
    """

    def __init__(self, dataset: Dataset[Any], order: SampleOrder, host: Host, options: LoaderOptions) -> None:
        self.dataset = dataset
        self.order = order
        self.progress = Progress()
        self._host = host
        self._options = options
        self._reducer: GradientReducer | None = None
        self.current: StepBatch | None = None  # the step that is being made

    def attach(self, reducer: GradientReducer) -> None:
        """Say where gradients are accumulated; done by the training state."""
        self._reducer = reducer

    def epochs(self, count: int) -> Iterator[int]:
        """Epochs from the present one up to ``count``, the first perhaps partly done."""
        while self.progress.epoch < count:
            yield self.progress.epoch
            self.progress = self.progress.next_epoch()

    def __iter__(self) -> Iterator[StepBatch]:
        if self._reducer is None:
            raise RuntimeError("give the loader to TorchState(loader=...) before iterating over it")
        world = self._host.world
        # Torch's loader may run ahead of the steps; cutting the whole epoch first would be part of every pause.
        plans, ahead = tee(self.order.steps(self.progress, world.rank, world.size))
        micro_batches = (indices for plan in ahead for indices in plan.micro_batches)
        first_seed = step_seed(self.order.seed, self.progress.step + 1, world.rank)
        samples = iter(fetch(self.dataset, micro_batches, self._options, self._host.device, seed=first_seed))
        for plan in plans:
            seed_step(self.order.seed, plan.step, world.rank)
            self._reducer.begin()
            self._host.record_samples(plan)
            self.current = StepBatch(plan, samples, self._host, self._reducer)
            yield self.current
        self.current = None


class _Batches(Sampler[list[int]]):
    """Batches of indices as torch's loader wants them; to be read once."""

    def __init__(self, batches: Iterable[npt.NDArray[Any]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return (indices.tolist() for indices in self._batches)


def fetch(
    dataset: Dataset[Any],
    batches: Iterable[npt.NDArray[Any]],
    options: LoaderOptions,
    device: torch.device,
    *,
    seed: int = 0,
) -> DataLoader[Any]:
    """Torch's own loader over given batches of indices; pinned memory when they go to a GPU.

    ``seed`` is what its processes, if there are any, draw from.
    """
    return DataLoader(
        dataset,
        batch_sampler=_Batches(batches),
        num_workers=options.num_workers,
        collate_fn=options.collate_fn,
        pin_memory=device.type == "cuda",
        # Its own generator: the loader must not draw from the global one, which is seeded step by step.
        generator=torch.Generator().manual_seed(seed),
        # A fork would take the session's threads and locks along.
        multiprocessing_context="forkserver" if options.num_workers else None,
    )


def to_device(sample: Any, device: torch.device) -> Any:
    """Tensors within tuples, lists and dicts moved to the device, all else as it is."""
    if isinstance(sample, torch.Tensor):
        return sample.to(device, non_blocking=True)
    if isinstance(sample, dict):
        return {key: to_device(value, device) for key, value in sample.items()}
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        return type(sample)(*(to_device(value, device) for value in sample))
    if isinstance(sample, list | tuple):
        return type(sample)(to_device(value, device) for value in sample)
    return sample
