"""A data set of arrays in memory, for model-zoo modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticdl.data.records import by_column

Array = NDArray[Any]


class Arrays:
    """Inputs and labels, one row a sample: an array each, or inputs as a dict of arrays.

    ``transform(inputs)`` is applied to each batch of inputs that is fetched, for instance to augment images.
    """

    def __init__(
        self, inputs: Array | dict[str, Array], labels: Array, transform: Callable[[Any], Any] | None = None
    ) -> None:
        columns = inputs if isinstance(inputs, dict) else {"": inputs}
        for name, column in columns.items():
            if len(column) != len(labels):
                raise ValueError(f"inputs {name}: {len(column)} rows, but there are {len(labels)} labels")
        self.inputs, self.labels, self.transform = inputs, labels, transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        inputs, labels = self.__getitems__([index])
        return by_column(lambda columns: columns[0][0], [inputs]), labels[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Any, Array]:
        """A whole batch, inputs and labels, in the order of the indices."""
        rows = np.asarray(indices)
        taken = by_column(lambda columns: columns[0][rows], [self.inputs])
        return self.transform(taken) if self.transform else taken, self.labels[rows]
