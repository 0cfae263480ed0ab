"""From indices to micro-batches of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt


class Arrays:
    """INTERFACE. A data set of arrays of equal length, as (inputs, labels): ``Arrays(images, labels)``."""


def fetch(dataset: Any, batches: Iterable[npt.NDArray[np.int64]]) -> Iterator[Any]:
    """INTERFACE. Micro-batches of tensors for given batches of indices, loaded ahead by a thread; close it when done.

    ``dataset`` has ``__len__`` and one of: ``fetch(indices)`` -> the whole batch as arrays, (inputs, labels);
    ``__getitems__(indices)`` -> list of samples; ``__getitem__(index)`` -> one sample (inputs, labels), each of which
    may be an array, number, string, or a dict/tuple of those. Samples are stacked leaf by leaf.
    """
    raise NotImplementedError
