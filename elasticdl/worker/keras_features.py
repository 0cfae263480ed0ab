"""How the features of a module's samples get to its Keras model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticdl.elastic.keras.loader import load
from elasticdl.elastic.keras.step import LossFunction, widen
from elasticdl.worker.datasets import Datasets
from elasticdl.worker.first_samples import Attempt, Blame


def one_feature(model: keras.Model, data: Datasets) -> Datasets:
    """Where a model has one input, and samples have their features as a dict of one, the model is to be given its value.

    Keras 2 accepted the dict, and modules of ElasticDL count on it; Keras 3 refuses it unless the names agree.
    """
    if not _takes_one(model):
        return data
    training, evaluation = (OneFeature(each) if _gives_one(each) else each for each in (data.training, data.evaluation))
    return Datasets(training, evaluation)


@dataclass(frozen=True, slots=True)
class OneFeature:
    """A data set whose features are the value, where they were a dict of one."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return _bare(self.dataset[index])

    def __getitems__(self, indices: Sequence[int]) -> Any:
        get_many = getattr(self.dataset, "__getitems__", None)
        got = get_many(indices) if get_many else [self.dataset[index] for index in indices]
        return [_bare(sample) for sample in got] if isinstance(got, list) else _bare(got)


def try_out(model: keras.Model, loss: LossFunction, dataset: Any, where: Blame) -> Attempt:
    """For `require_fit`: a forward pass on the CPU. It builds a model that is not built, and changes no variable."""

    def attempt(samples: int, training: bool) -> None:
        with tf.device("CPU:0"), _kept(model.non_trainable_variables):
            where.run(
                lambda: load(dataset, np.arange(samples, dtype=np.int64)),
                functools.partial(model, training=training),
                lambda labels, outputs: loss(labels, keras.tree.map_structure(widen, outputs)),
            )

    return attempt


@contextlib.contextmanager
def _kept(variables: Sequence[Any]) -> Iterator[None]:
    before = [(variable, variable.numpy()) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


def _takes_one(model: keras.Model) -> bool:
    """A model whose call is Keras's own: Functional with one input that is not in a dict, or Sequential, built or not."""
    if type(model).call.__module__.partition(".")[0] != "keras":
        return False
    if isinstance(model, keras.Sequential):
        return True
    return len(getattr(model, "inputs", None) or ()) == 1 and not isinstance(model.input, Mapping)


def _gives_one(dataset: Any | None) -> bool:
    return dataset is not None and _is_one(dataset[0])


def _is_one(sample: Any) -> bool:
    return isinstance(sample, tuple) and len(sample) == 2 and isinstance(sample[0], Mapping) and len(sample[0]) == 1


def _bare(sample: Any) -> Any:
    return (*sample[0].values(), sample[1]) if _is_one(sample) else sample
