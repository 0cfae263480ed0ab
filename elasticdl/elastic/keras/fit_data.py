"""What ``fit`` is given as data, as samples that can be taken by index: the order of samples is the job's business."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from elasticdl.common.errors import UserError
from elasticdl.elastic.keras.loader import Dataset, Indices


class Columns:
    """Inputs and labels in memory, each an array or nested ones, with one row a sample."""

    def __init__(self, inputs: Any, labels: Any) -> None:
        """Raises:
        UserError: the numbers of rows differ.
        """
        self._columns = keras.tree.map_structure(np.asarray, (inputs, labels))
        lengths = {len(column) if column.ndim else 1 for column in keras.tree.flatten(self._columns)}
        if len(lengths) != 1:
            raise UserError(f"fit(x, y): arrays with different numbers of samples: {sorted(lengths)}")
        self._length = lengths.pop()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return keras.tree.map_structure(lambda column: column[index], self._columns)

    def __getitems__(self, indices: Sequence[int] | Indices) -> Any:
        return keras.tree.map_structure(lambda column: column[indices], self._columns)

    def split(self, share: float) -> tuple[Columns, Columns]:
        """The first samples, and the last as a ``share`` of all of them."""
        cut = int(self._length * (1 - share))
        if not 0 < cut < self._length:
            raise UserError(
                f"fit(validation_split={share}): expected a part of {self._length} samples, above 0 and below 1"
            )
        rows = np.arange(self._length)
        return Columns(*self.__getitems__(rows[:cut])), Columns(*self.__getitems__(rows[cut:]))


class Batches:
    """A ``PyDataset`` by samples. All its batches have as many as the first; the last may have fewer."""

    def __init__(self, source: keras.utils.PyDataset) -> None:
        """Raises:
        UserError: it has no end.
        """
        count = source.num_batches
        if not count:
            raise UserError("fit(x): a PyDataset needs a number of batches, by __len__")
        self._source = source
        self._last: tuple[int, Any] | None = None  # what was asked for last: samples come in order
        self._size = self._rows(0)
        self._length: int = self._size * (count - 1) + self._rows(count - 1)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        number, row = divmod(index, self._size)
        return keras.tree.map_structure(lambda column: np.asarray(column)[row], self._batch(number))

    def _batch(self, number: int) -> Any:
        if self._last is None or self._last[0] != number:
            batch = self._source[number]
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise UserError(
                    "fit(x): a batch of a PyDataset must be a pair (inputs, labels), without sample weights"
                )
            self._last = number, tuple(batch)
        return self._last[1]

    def _rows(self, number: int) -> int:
        return len(keras.tree.flatten(self._batch(number))[0])


def open_data(x: Any, y: Any, call: str = "fit(x, y)") -> Dataset:
    """Samples by index from what is given to ``fit`` as ``x`` and ``y``.

    Raises:
        UserError: they can't be taken by index.
    """
    if isinstance(x, keras.utils.PyDataset):
        return cast(Dataset, Batches(x))
    if isinstance(x, tf.data.Dataset) or hasattr(x, "__next__"):
        raise UserError(
            f"{call}: a {type(x).__name__} can't be read by index, so the order of samples can't stay the same when workers "
            "change; give arrays, a keras.utils.PyDataset, or an object with __len__ and __getitem__"
        )
    if y is not None:
        return cast(Dataset, Columns(x, y))
    if not hasattr(x, "__getitem__") or isinstance(x, np.ndarray | tf.Tensor | dict | list | tuple):
        raise UserError(f"{call}: there are no labels; give y, or a data set of pairs (inputs, labels)")
    return cast(Dataset, x)
