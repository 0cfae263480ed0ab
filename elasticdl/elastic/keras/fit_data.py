"""What ``fit`` is given as data, as samples that can be taken by index: the order of samples is the job's business.

And what is refused of a compiled model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import step_seed
from elasticdl.elastic.keras.loader import Dataset, Indices
from elasticdl.elastic.training.cursor import seed_generators
from elasticdl.tensorflow import keras, tf

# -- a compiled model whose batches are to be divided --


def check_compiled(model: keras.Model, call: str) -> None:
    """``call``: by which the model was given. It may have been compiled before that, or loaded as it was compiled.

    Raises:
        UserError: the optimizer accumulates gradients, or a loss is no mean.
    """
    if any(map(_accumulates, _with_parts(model.optimizer))):
        raise UserError(f"{call}: Model accumulates gradients by itself; give it the optimizer without accumulation")
    if has_loss(model, "sum", "none", None):
        raise UserError(
            f'{call}: a loss with reduction="sum" or None is a sum over the batch; use reduction="sum_over_batch_size"'
        )


def has_loss(model: keras.Model, *reductions: str | None) -> bool:
    return any(
        isinstance(loss, keras.losses.Loss) and loss.reduction in reductions for loss in keras.tree.flatten(model.loss)
    )


def _accumulates(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "gradient_accumulation_steps", None)) or hasattr(optimizer, "accumulated")


def _with_parts(optimizer: Any) -> Iterator[Any]:
    """The optimizer, and those of which it is made."""
    yield optimizer
    inner = [getattr(optimizer, "inner_optimizer", None), *(getattr(optimizer, "optimizers", None) or ())]
    for part in inner:
        if part is not None:
            yield from _with_parts(part)


WITH_WEIGHTS = 3  # parts of a sample that has a weight


@dataclass(frozen=True, slots=True)
class Samples:
    """Each sample is a pair (inputs, labels); with weights it is (inputs, (labels, weight))."""

    dataset: Dataset
    weighted: bool = False
    batches: Batches | None = None  # what they come from, in its own order, which is not to be shuffled

    @property
    def told(self) -> int:
        """Calls of hooks."""
        return self.batches.told if self.batches is not None else 0

    def tell(self, count: int, seed: int) -> None:
        """See `Batches.tell`."""
        if self.batches is not None:
            self.batches.tell(count, seed)

    def __len__(self) -> int:
        return len(self.dataset)


class Columns:
    """Inputs, labels and perhaps weights in memory, each an array or nested ones, with one row a sample."""

    def __init__(self, inputs: Any, labels: Any, weights: Any = None) -> None:
        """Raises UserError if the numbers of rows differ, or something has no rows."""
        targets = labels
        if weights is not None:
            kind = keras.config.floatx()
            targets = (labels, keras.tree.map_structure(lambda weight: np.asarray(weight, kind), weights))
        self._columns = keras.tree.map_structure(np.asarray, (inputs, targets))
        flat = keras.tree.flatten(self._columns)
        if not all(column.ndim for column in flat):  # as Keras has it, a list is no array but one for each of its items
            raise UserError("fit(x, y): a number stands where an array belongs; make arrays of lists by numpy.array()")
        lengths = {len(column) for column in flat}
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


# What a PyDataset is told, in turn: Keras resets it before the first pass, too.
HOOKS = ("on_epoch_end", "on_epoch_begin")


class Batches:
    """A ``PyDataset`` by samples. All its batches have as many as the first; the last may have fewer."""

    def __init__(self, source: keras.utils.PyDataset) -> None:
        """Raises UserError if it has no end, or its first batch no samples."""
        self.told = 0  # hooks that were called
        count = source.num_batches
        if not count:
            raise UserError("fit(x): a PyDataset needs a number of batches, by __len__")
        self._source = source
        self.held = vars(source)  # with the order of samples, which all workers must have alike
        self._count = count
        self._last: tuple[int, Any] | None = None  # what was asked for last: samples come in order
        self._size: int = _rows(self._batch(0))
        if not self._size:
            raise UserError(f"fit(x): the first batch of the {type(source).__name__} is empty; expected some samples")
        self._length: int = self._size * (count - 1) + _rows(self._batch(count - 1))

    def tell(self, count: int, seed: int) -> None:
        """Call its hooks until there were so many calls; nothing may be loaded meanwhile.

        A worker that comes later calls those that it has missed, one by one. Each draws from Python's and NumPy's
        generators what it draws on every other worker of the job, whose seed is ``seed``.
        """
        while self.told < count:
            self._last = None
            seed_generators(step_seed(seed, -1 - self.told, 0))  # of no step
            hook = HOOKS[self.told % len(HOOKS)]
            getattr(self._source, hook)()
            self.told += 1
            if self._source.num_batches != self._count:
                raise UserError(
                    f"fit(x): the {type(self._source).__name__} has {self._source.num_batches} batches after {hook}(), and had "
                    f"{self._count}; all passes must have as many"
                )

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
    """Samples by index from what is given to ``fit`` as ``x``, ``y`` and ``sample_weight``."""
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
        return Samples(cast(Dataset, Columns(x, y, weights)), weights is not None)
    if y is not None or weights is not None:
        raise UserError(f"{call}: give labels and weights within the {type(x).__name__}, as (inputs, labels, weights)")
    if arrays:
        raise UserError(f"{call}: there are no labels; give y, or a data set of pairs (inputs, labels)")
    dataset = Batches(x) if batches else x
    first = dataset[0] if len(dataset) else None
    weighted = isinstance(first, tuple) and len(first) == WITH_WEIGHTS
    return Samples(cast(Dataset, Weighted(dataset) if weighted else dataset), weighted, dataset if batches else None)


def weigh_classes(labels: Any, weights: Mapping[int, float]) -> Any:
    """The weight of each sample by its class, as Keras understands ``class_weight``."""
    if labels is None or keras.tree.is_nested(labels):
        raise UserError(
            "fit(class_weight=): only for a model with one output, with y as one array; give sample_weight, or weights within the data "
            "set, as (inputs, labels, weights)"
        )
    classes = np.asarray(labels)
    if classes.ndim > 1:
        classes = classes[..., 0] if classes.shape[-1] == 1 else classes.argmax(-1)
    found, places = np.unique(np.rint(classes).astype(np.int64), return_inverse=True)
    return np.array([weights.get(int(each), 1.0) for each in found])[places]


@dataclass(frozen=True, slots=True)
class FitData:
    """What to train on, and what to validate on."""

    training: Samples
    validation: Samples | None = None

    @classmethod
    def of(
        cls,
        x: Any,
        y: Any,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        validation_data: Any = None,
        validation_split: float = 0.0,
    ) -> FitData:
        """Of what ``fit`` was given."""
        if class_weight is not None:
            if sample_weight is not None:
                raise UserError("fit(class_weight=, sample_weight=): give one of them, as Keras takes no more")
            sample_weight = weigh_classes(y, class_weight)
        training = open_data(x, y, sample_weight)
        if validation_data is not None:
            validation = _open_validation(validation_data)
            if not len(validation):
                raise UserError("fit(validation_data=): there are no samples; leave it out, or give at least one")
            return cls(training, validation)
        if not validation_split:
            return cls(training)
        if not isinstance(training.dataset, Columns):
            raise UserError("fit(validation_split=) needs arrays; give validation_data")
        first, last = training.dataset.split(validation_split)
        return cls(Samples(first, training.weighted), Samples(last, training.weighted))


def _open_validation(given: Any) -> Samples:
    parts = tuple(given) if isinstance(given, tuple | list) else (given, None)
    if len(parts) not in (2, WITH_WEIGHTS):
        raise UserError("fit(validation_data=): expected (x, y) or (x, y, sample_weight), or a data set")
    weights = parts[2] if len(parts) == WITH_WEIGHTS else None
    return open_data(parts[0], parts[1], weights, "fit(validation_data=)")
