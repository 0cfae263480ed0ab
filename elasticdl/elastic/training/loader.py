"""What the elastic data loaders of all frameworks share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from elasticdl.elastic.training.sampler import DataCursor

CursorT = TypeVar("CursorT", bound=DataCursor)


class ElasticLoader(Generic[CursorT]):
    """Yields one `StepBatch` per step from where training stands to the end of the epoch."""

    def __init__(self, sampler: CursorT) -> None:
        self.sampler = sampler

    def epochs(self, count: int) -> Iterator[int]:
        """Epochs from the present one up to ``count``, the first perhaps partly done."""
        return self.sampler.epochs(count)

    def __len__(self) -> int:
        """Steps of a whole epoch; see `DataCursor`."""
        return len(self.sampler)
