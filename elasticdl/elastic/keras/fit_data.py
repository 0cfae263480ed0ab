"""What ``fit`` is given as data, as samples that can be taken by index: the order of samples is the job's business."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from elasticdl.common.errors import UserError
from elasticdl.elastic.keras.fit_checks import require_arrays, require_numbers
from elasticdl.elastic.keras.loader import Dataset, Indices

WITH_WEIGHTS = 3  # parts of a sample that has a weight


@dataclass(frozen=True, slots=True)
class Samples:
    """Each sample is a pair (inputs, labels); with weights it is (inputs, (labels, weight))."""

    dataset: Dataset
    weighted: bool = False
    in_order: bool = False  # they must not be shuffled

    def __len__(self) -> int:
        return len(self.dataset)


class Columns:
    """Inputs, labels and perhaps weights in memory, each an array or nested ones, with one row a sample."""

    def __init__(self, inputs: Any, labels: Any, weights: Any = None) -> None:
        """Raises:
        UserError: the numbers of rows differ.
        """
        targets = labels
        if weights is not None:
            kind = keras.config.floatx()
            targets = (labels, keras.tree.map_structure(lambda weight: np.asarray(weight, kind), weights))
        self._columns = keras.tree.map_structure(np.asarray, (inputs, targets))
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
        UserError: it has no end, or its first batch no samples.
        """
        count = source.num_batches
        if not count:
            raise UserError("fit(x): a PyDataset needs a number of batches, by __len__")
        self._source = source
        self._count = count
        self._last: tuple[int, Any] | None = None  # what was asked for last: samples come in order
        self._size = _rows(self._batch(0))
        if not self._size:
            raise UserError(f"fit(x): the first batch of the {type(source).__name__} is empty; expected some samples")
        self._length: int = self._size * (count - 1) + _rows(self._batch(count - 1))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        number, row = divmod(index, self._size)
        return keras.tree.map_structure(lambda column: np.asarray(column)[row], self._batch(number))

    def _batch(self, number: int) -> Any:
        if self._last is None or self._last[0] != number:
            batch = self._source[number]
            if not isinstance(batch, tuple | list) or len(batch) not in (2, WITH_WEIGHTS):
                raise UserError(
                    "fit(x): a batch of a PyDataset must be (inputs, labels) or (inputs, labels, sample weights)"
                )
            self._check_size(number, _rows(batch))
            self._last = number, tuple(batch)
        return self._last[1]

    def _check_size(self, number: int, rows: int) -> None:
        """That samples can be counted through all batches."""
        if number and (rows > self._size or (rows < self._size and number < self._count - 1)):
            raise UserError(
                f"fit(x): batch {number} of the {type(self._source).__name__} has {rows} samples, and the first has "
                f"{self._size}; all must have as many, and only the last may have fewer"
            )


def _rows(batch: Any) -> int:
    require_arrays("fit(x)", {"a batch": batch})
    return len(keras.tree.flatten(batch)[0])


class Weighted:
    """A data set whose samples are (inputs, labels, weight)."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        inputs, labels, weight = self._source[index]
        return inputs, (labels, np.asarray(weight, keras.config.floatx()))


def open_data(x: Any, y: Any, weights: Any = None, call: str = "fit(x, y)") -> Samples:
    """Samples by index from what is given to ``fit`` as ``x``, ``y`` and ``sample_weight``.

    Raises:
        UserError: they can't be taken by index.
    """
    if x is None:
        raise UserError(f"{call}: there are no data; give arrays x and y, or a data set as x")
    batches = isinstance(x, keras.utils.PyDataset)
    arrays = isinstance(x, np.ndarray | tf.Tensor | dict | list | tuple) or hasattr(x, "__array__")
    by_index = batches or arrays or (hasattr(x, "__getitem__") and hasattr(x, "__len__"))
    if not by_index or isinstance(x, tf.data.Dataset | str | bytes):
        raise UserError(
            f"{call}: a {type(x).__name__} can't be read by index, so the order of samples can't stay the same when workers "
            "change; give arrays, a keras.utils.PyDataset, or an object with __len__ and __getitem__"
        )
    if not batches and y is not None:
        given = {"y": y} if weights is None else {"y": y, "sample_weight": weights}
        require_arrays(call, {"x": x, **given})
        require_numbers(call, given)
        return Samples(cast(Dataset, Columns(x, y, weights)), weights is not None)
    if y is not None or weights is not None:
        raise UserError(f"{call}: give labels and weights within the {type(x).__name__}, as (inputs, labels, weights)")
    if arrays:
        raise UserError(f"{call}: there are no labels; give y, or a data set of pairs (inputs, labels)")
    return _open_dataset(Batches(x) if batches else x, call, in_order=batches)


def weigh_classes(labels: Any, weights: Mapping[int, float]) -> Any:
    """The weight of each sample by its class, as Keras understands ``class_weight``.

    Raises:
        UserError: there are labels of several outputs, or some that are no numbers.
    """
    if keras.tree.is_nested(labels):
        raise UserError("fit(class_weight=): only for a model with one output, with y as one array; give sample_weight")
    require_arrays("fit(x, y)", {"y": labels})
    require_numbers("fit(x, y)", {"y": labels})
    classes = np.asarray(labels)
    if classes.ndim > 1:
        classes = classes[..., 0] if classes.shape[-1] == 1 else classes.argmax(-1)
    found, places = np.unique(np.rint(classes).astype(np.int64), return_inverse=True)
    return np.array([weights.get(int(each), 1.0) for each in found])[places]


def _open_dataset(dataset: Any, call: str, *, in_order: bool) -> Samples:
    first = dataset[0] if len(dataset) else None
    weighted = isinstance(first, tuple) and len(first) == WITH_WEIGHTS
    if isinstance(first, tuple) and len(first) in (2, WITH_WEIGHTS):
        require_numbers(call, dict(zip(("the labels", "the weights"), first[1:], strict=False)))
    return Samples(cast(Dataset, Weighted(dataset) if weighted else dataset), weighted, in_order)
