"""What ``fit`` is given as data, as samples that can be taken by index: the order of samples is the job's business.

And what is refused of its arguments.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, cast

import numpy as np

from elasticdl.common.errors import ArgumentError, UserError
from elasticdl.elastic.core.plan import step_seed
from elasticdl.elastic.keras.loader import Dataset, Indices
from elasticdl.elastic.training.cursor import seed_generators
from elasticdl.tensorflow import keras, tf

# What ``compile`` and ``fit`` were given, made into what elastic training needs; what it can't do is refused in one line.

log = logging.getLogger(__name__)


def require(name: str, value: Any, right: str, *, holds: bool) -> None:
    """Raises ArgumentError unless the value of this argument of ``fit`` is ``right``."""
    if not holds:
        raise ArgumentError(f"fit({name}={shown(value)}): must be {right}")


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _is_frequency(value: Any) -> bool:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Container):
        return _is_whole(value, 1)
    return not isinstance(value, Iterable) or all(_is_whole(each, 1) for each in value)


def shown(value: Any) -> str:
    """One line, and not a long one."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


# What to do instead of giving an argument that is refused.
INSTEAD = {
    "validation_steps": "validation is on all of validation_data; leave it out, or give fewer samples there",
}


@dataclass(frozen=True, slots=True)
class FitOptions:
    """What ``fit`` is told besides data and callbacks."""

    epochs: int
    initial_epoch: int
    verbose: int
    shuffle: bool
    validation_freq: int | Container[int]
    steps_per_epoch: int | None = None  # of a pass through the samples, or what is left of it

    def __post_init__(self) -> None:
        """Raises ArgumentError if there is no such epoch, or no such frequency."""
        least = "a whole number of at least 0"
        require("epochs", self.epochs, least, holds=_is_whole(self.epochs, 0))
        require("initial_epoch", self.initial_epoch, least, holds=_is_whole(self.initial_epoch, 0))
        often, steps = self.validation_freq, self.steps_per_epoch
        right = "a whole number of at least 1, or a list of epochs, counted from 1"
        require("validation_freq", often, right, holds=_is_frequency(often))
        right = "a whole number of at least 1, or None"
        require("steps_per_epoch", steps, right, holds=steps is None or _is_whole(steps, 1))

    def validates(self, epoch: int) -> bool:
        """Whether there is a validation at the end of this epoch, counted from 0."""
        if isinstance(self.validation_freq, Container):
            return epoch + 1 in self.validation_freq
        return (epoch + 1) % self.validation_freq == 0


def refuse(others: Mapping[str, Any]) -> None:
    """Raises UserError if some argument that means something was given."""
    for name, value in others.items():
        if value is not None:
            raise UserError(f"fit({name}=) is not supported: {INSTEAD.get(name, 'leave it out')}")


def bounded(number: Any, most: int | None) -> Any:
    """``number``, as `fit` was given it, or what Keras's configuration allows for a trial (``keras.config.set_max_epochs``)."""
    if most is None or not (number is None or _is_whole(number, 0)):  # what is no number is refused as such
        return number
    return most if number is None else min(number, most)


def verbosity(verbose: int | str, *, alone: bool) -> int:
    """Raises ArgumentError if Keras knows no such value."""
    if verbose == "auto":
        return 1 if alone else 2  # a line for each epoch in a log
    if verbose not in (0, 1, 2):
        raise ArgumentError(f'fit(verbose={verbose!r}): must be "auto", 0, 1 or 2')
    return int(verbose)


def complete(callbacks: Any, verbose: int) -> tuple[keras.callbacks.History, list[keras.callbacks.Callback]]:
    """The history, and all callbacks with it and what shows progress, in Keras's order."""
    given = [each for each in keras.tree.flatten(callbacks) if each is not None]
    for callback in given:
        if not isinstance(callback, keras.callbacks.Callback):
            raise UserError(f"fit(callbacks=): {type(callback).__name__} is not a keras.callbacks.Callback")
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise UserError("fit(callbacks=): BackupAndRestore is not supported; use ModelCheckpoint")
    histories = [each for each in given if isinstance(each, keras.callbacks.History)]
    history = histories[0] if histories else keras.callbacks.History()
    progress = [keras.callbacks.ProgbarLogger()] if verbose else []
    return history, [*progress, *given, *([] if histories else [history])]


# -- a compiled model whose batches are to be divided --

MEAN = '"sum_over_batch_size"'


def check_compiled(model: keras.Model, call: str) -> None:
    """``call``: by which the model was given. It may have been compiled before that, or loaded as it was compiled.

    Raises:
        UserError: the optimizer accumulates gradients, or a loss is no mean.
    """
    if any(map(_accumulates, _with_parts(model.optimizer))):
        raise UserError(f"{call}: Model accumulates gradients by itself; give it the optimizer without accumulation")
    if has_loss(model, "sum"):
        raise UserError(f'{call}: a loss with reduction="sum" depends on the batch; use {MEAN}')
    if has_loss(model, "none", None):
        raise UserError(
            f"{call}: a loss with reduction=None gives one value for each sample, and Keras sums them; use {MEAN}"
        )


def warn_of_eagerness(model: keras.Model) -> None:
    if model.run_eagerly:
        log.warning(
            "compile(run_eagerly=True) is not looked at: Python code of the model and the loss runs when they are traced, and "
            "not in each step"
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


NOT_NUMBERS = "OUSMm"  # NumPy's kinds: objects, texts, bytes, dates and times
WITH_WEIGHTS = 3  # parts of a sample that has a weight


@dataclass(frozen=True, slots=True)
class Samples:
    """Each sample is a pair (inputs, labels); with weights it is (inputs, (labels, weight))."""

    dataset: Dataset
    weighted: bool = False
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
        """Where the data set is: what it was told of epochs."""
        return {"told": self.batches.told if self.batches is not None else 0}

    def bring(self, stands: Mapping[str, Any], seed: int) -> None:
        """To where another worker's is."""
        self.tell(stands["told"], seed)

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
    return _open_dataset(Batches(x, hooks) if batches else x, call)


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


def _open_dataset(dataset: Any, call: str) -> Samples:
    first = dataset[0] if len(dataset) else None
    weighted = isinstance(first, tuple) and len(first) == WITH_WEIGHTS
    if isinstance(first, tuple) and len(first) in (2, WITH_WEIGHTS):
        require_numbers(call, dict(zip(("the labels", "the weights"), first[1:], strict=False)))
    batches = dataset if isinstance(dataset, Batches) else None
    return Samples(cast(Dataset, Weighted(dataset) if weighted else dataset), weighted, batches)


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
