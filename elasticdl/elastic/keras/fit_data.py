"""What ``fit`` is given as data, as samples that can be taken by index: the order of samples is the job's business."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, cast

import numpy as np

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import step_seed
from elasticdl.elastic.keras.data_attributes import DataAttributes
from elasticdl.elastic.keras.fit_arguments import is_number, require, shown
from elasticdl.elastic.keras.loader import Dataset, Indices
from elasticdl.elastic.training.cursor import seed_generators
from elasticdl.tensorflow import keras, tf

NOT_NUMBERS = "OUSMm"  # NumPy's kinds: objects, texts, bytes, dates and times
WITH_WEIGHTS = 3  # parts of a sample that has a weight


@dataclass(frozen=True, slots=True)
class Samples:
    """Each sample is a pair (inputs, labels); with weights it is (inputs, (labels, weight))."""

    dataset: Dataset
    weighted: bool = False
    attributes: DataAttributes = field(default_factory=lambda: DataAttributes(None))  # of the script's own data set
    batches: Batches | None = None  # what they come from, in its own order

    @property
    def in_order(self) -> bool:
        """They must not be shuffled."""
        return self.batches is not None

    def tell(self, count: int, seed: int) -> None:
        """See `Batches.tell`."""
        if self.batches is not None:
            self.batches.tell(count, seed)

    @property
    def stands(self) -> dict[str, Any]:
        """Where the data set is: what it was told of epochs, and what it keeps."""
        return {"told": self.batches.told if self.batches is not None else 0, "kept": self.attributes.taken()}

    def bring(self, stands: Mapping[str, Any], seed: int) -> None:
        """To where another worker's is."""
        self.tell(stands["told"], seed)
        self.attributes.put(stands["kept"])

    def __len__(self) -> int:
        return len(self.dataset)


class Columns:
    """Inputs, labels and perhaps weights in memory, each an array or nested ones, with one row a sample."""

    def __init__(self, inputs: Any, labels: Any, weights: Any = None) -> None:
        """Raises UserError if the numbers of rows differ."""
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


# What a PyDataset hears of one pass, in a circle: Keras resets it before the first pass, and before each validation.
TRAINING = ("on_epoch_end", "on_epoch_begin")
VALIDATION = ("on_epoch_end", "on_epoch_begin", "on_epoch_end")


class Batches:
    """A ``PyDataset`` by samples. All its batches have as many as the first; the last may have fewer."""

    def __init__(self, source: keras.utils.PyDataset, hooks: Sequence[str] = TRAINING) -> None:
        """Raises UserError if it has no end, or its first batch no samples."""
        self.told = 0  # hooks that were called
        self._hooks = hooks
        count = source.num_batches
        if not count:
            raise UserError("fit(x): a PyDataset needs a number of batches, by __len__")
        self._source = source
        self._count = count
        self._length = 0  # not known yet
        self._last: tuple[int, Any] | None = None  # what was asked for last: samples come in order
        self._size = _rows(self._batch(0))
        if not self._size:
            raise UserError(f"fit(x): the first batch of the {type(source).__name__} is empty; expected some samples")
        self._length = self._size * (count - 1) + _rows(self._batch(count - 1))

    def tell(self, count: int, seed: int) -> None:
        """Call its hooks until there were so many calls; nothing may be loaded meanwhile.

        A worker that comes later calls those that it has missed, one by one. Each draws from Python's and NumPy's
        generators what it draws on every other worker of the job, whose seed is ``seed``.
        """
        while self.told < count:
            self._last = None
            seed_generators(step_seed(seed, -1 - self.told, 0))  # of no step
            hook = self._hooks[self.told % len(self._hooks)]
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
        """That samples can be counted through all batches, in every pass."""
        if number and (rows > self._size or (rows < self._size and number < self._count - 1)):
            raise UserError(
                f"fit(x): batch {number} of the {type(self._source).__name__} has {rows} samples, and the first has "
                f"{self._size}; all must have as many, and only the last may have fewer"
            )
        if self._length and rows != (before := min(self._size, self._length - number * self._size)):
            raise UserError(
                f"fit(x): batch {number} of the {type(self._source).__name__} has {rows} samples, and had {before} in the pass "
                "before; all passes must have as many"
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


def open_data(x: Any, y: Any, weights: Any = None, call: str = "fit(x, y)", hooks: Sequence[str] = TRAINING) -> Samples:
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
        given = {"y": y} if weights is None else {"y": y, "sample_weight": weights}
        require_arrays(call, {"x": x, **given})
        require_numbers(call, given)
        return Samples(cast(Dataset, Columns(x, y, weights)), weights is not None)
    if y is not None or weights is not None:
        raise UserError(f"{call}: give labels and weights within the {type(x).__name__}, as (inputs, labels, weights)")
    if arrays:
        raise UserError(f"{call}: there are no labels; give y, or a data set of pairs (inputs, labels)")
    attributes = DataAttributes(x)
    return _open_dataset(Batches(x, hooks) if batches else x, call, attributes)


def weigh_classes(labels: Any, weights: Mapping[int, float]) -> Any:
    """The weight of each sample by its class, as Keras understands ``class_weight``."""
    if keras.tree.is_nested(labels):
        raise UserError("fit(class_weight=): only for a model with one output, with y as one array; give sample_weight")
    require_arrays("fit(x, y)", {"y": labels})
    require_numbers("fit(x, y)", {"y": labels})
    classes = np.asarray(labels)
    if classes.ndim > 1:
        classes = classes[..., 0] if classes.shape[-1] == 1 else classes.argmax(-1)
    found, places = np.unique(np.rint(classes).astype(np.int64), return_inverse=True)
    return np.array([weights.get(int(each), 1.0) for each in found])[places]


def _open_dataset(dataset: Any, call: str, attributes: DataAttributes) -> Samples:
    first = dataset[0] if len(dataset) else None
    weighted = isinstance(first, tuple) and len(first) == WITH_WEIGHTS
    if isinstance(first, tuple) and len(first) in (2, WITH_WEIGHTS):
        require_numbers(call, dict(zip(("the labels", "the weights"), first[1:], strict=False)))
    batches = dataset if isinstance(dataset, Batches) else None
    attributes.have_read()
    return Samples(cast(Dataset, Weighted(dataset) if weighted else dataset), weighted, attributes, batches)


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
        right = "a number of at least 0 and below 1, the share of the samples to validate on"
        is_share = is_number(validation_split) and 0 <= validation_split < 1
        require("validation_split", validation_split, right, holds=is_share)
        training = open_data(x, y, _weights(y, sample_weight, class_weight))
        if validation_data is not None:
            return cls(training, _open_validation(validation_data))
        if not validation_split:
            return cls(training)
        if not isinstance(training.dataset, Columns):
            raise UserError("fit(validation_split=) needs arrays; give validation_data")
        first, last = training.dataset.split(validation_split)
        return cls(Samples(first, training.weighted), Samples(last, training.weighted))

    @property
    def stands(self) -> list[dict[str, Any]]:
        """Where the data sets are. Nothing may be loaded meanwhile."""
        return [samples.stands for samples in (self.training, self.validation) if samples is not None]

    def bring(self, stands: Sequence[Mapping[str, Any]], seed: int) -> None:
        """Bring data sets to where those of another worker are."""
        present = [samples for samples in (self.training, self.validation) if samples is not None]
        for samples, one in zip(present, stands, strict=True):
            samples.bring(one, seed)

    def check(self, model: keras.Model) -> None:
        """Raises:
        UserError: there are no samples to validate on, or weights that the model's loss can't be multiplied by.
        """
        if self.validation is not None and not len(self.validation):
            raise UserError("fit(validation_data=): there are no samples; leave it out, or give at least one")
        for call, samples in (("fit(x, y)", self.training), ("fit(validation_data=)", self.validation)):
            if samples is not None and samples.weighted and len(samples):
                check_weights(call, samples.dataset[0][1][1], model)


def _weights(y: Any, sample_weight: Any, class_weight: Mapping[int, float] | None) -> Any:
    if class_weight is None:
        return sample_weight
    holds = isinstance(class_weight, Mapping) and all(
        is_number(number) and number == int(number) and is_number(weight) for number, weight in class_weight.items()
    )
    right = "a dict of weights by the number of the class, as {0: 1.0, 1: 2.5}"
    require("class_weight", class_weight, right, holds=holds)
    if sample_weight is not None:
        raise UserError("fit(class_weight=, sample_weight=): give one of them, as Keras takes no more")
    if y is None:
        raise UserError(
            "fit(class_weight=) needs y as an array; give the weights within the data set, as (inputs, labels, weights)"
        )
    return weigh_classes(y, class_weight)


def _open_validation(given: Any) -> Samples:
    parts = tuple(given) if isinstance(given, tuple | list) else (given, None)
    if len(parts) not in (2, WITH_WEIGHTS):
        raise UserError("fit(validation_data=): expected (x, y) or (x, y, sample_weight), or a data set")
    weights = parts[2] if len(parts) == WITH_WEIGHTS else None
    return open_data(parts[0], parts[1], weights, "fit(validation_data=)", VALIDATION)


# -- what can be told to be wrong before anything is trained --


def require_arrays(call: str, given: Mapping[str, Any]) -> None:
    """As Keras has it, a list is no array but one for each of its items."""
    for name, value in given.items():
        for leaf in keras.tree.flatten(value):
            if not np.ndim(leaf):
                raise UserError(
                    f"{call}: {name} has {_article(leaf)} where an array belongs; make arrays of lists by numpy.array()"
                )


def require_numbers(call: str, given: Mapping[str, Any]) -> None:
    """Raises UserError if one of the ``given`` is no number, or array of such, or nested ones."""
    for name, value in given.items():
        for leaf in keras.tree.flatten(value):
            array = np.asarray(leaf)
            first = array.flat[0] if array.size else 0
            if array.dtype.kind in NOT_NUMBERS and not isinstance(first, Real):
                raise UserError(f"{call}: {name} must be numbers, not {shown(first)}; classes are numbered from 0")


def check_weights(call: str, weights: Any, model: keras.Model) -> None:
    """``weights``: of one sample. Keras's own losses leave out the last axis of what the model gives; others are not
    known, so what they are multiplied by is not looked at.
    """
    outputs = getattr(model, "outputs", None)
    if not outputs or not all(map(_is_kerass, keras.tree.flatten(model.loss))):
        return
    wanted = [tuple(output.shape[1:-1]) for output in outputs]
    for leaf in keras.tree.flatten(weights):
        shape = np.shape(leaf)
        core = shape[:-1] if shape[-1:] == (1,) else shape
        if not any(_broadcasts(core, each) for each in wanted):
            steps = " or ".join(f"(samples, {', '.join(map(str, each))})" for each in wanted if each)
            raise UserError(
                f"{call}: sample weights of shape (samples, {', '.join(map(str, shape))}) don't fit the loss; expected "
                f"(samples,){' or ' if steps else ''}{steps}"
            )


def _broadcasts(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) <= len(wanted) and all(
        size == 1 or other in (None, size) for size, other in zip(shape, wanted, strict=False)
    )


def _is_kerass(loss: Any) -> bool:
    return isinstance(loss, str) or str(getattr(loss, "__module__", "")).startswith("keras.")


def _article(value: Any) -> str:
    name = type(value).__name__
    return "nothing" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
