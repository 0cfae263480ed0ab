"""The elastic data loader: torch's own loader over the elastic sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from elasticdl.elastic.torch.sampler import ElasticSampler, StepBatch
from elasticdl.elastic.training.loader import ElasticLoader


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """How samples are fetched; as in ``torch.utils.data.DataLoader``."""

    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None


class ElasticDataLoader(ElasticLoader[ElasticSampler]):
    """Yields one `StepBatch` per step from where training stands to the end of the epoch; see `ElasticSampler`."""

    def __init__(
        self, dataset: Dataset[Any], sampler: ElasticSampler, options: LoaderOptions, device: torch.device
    ) -> None:
        super().__init__(sampler)
        self.dataset = dataset
        self._options = options
        self._device = device

    def __iter__(self) -> Iterator[StepBatch]:
        return self.sampler.steps(fetch(self.dataset, self.sampler, self._options, self._device))


def fetch(
    dataset: Dataset[Any],
    batches: Iterable[list[int]],
    options: LoaderOptions,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> DataLoader[Any]:
    """Torch's own loader over given batches of indices; pinned memory when they go to a GPU.

    ``generator``: from which the seed of its processes, if there are any, is drawn; else the global one.
    """
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=options.num_workers,
        collate_fn=options.collate_fn,
        pin_memory=device.type == "cuda",
        generator=generator,
        # A fork would take the session's threads and locks along.
        multiprocessing_context="forkserver" if options.num_workers else None,
    )
