"""The non-trainable variables of a model, by what a step does to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

SEED_NAME = "seed_generator_state"  # as Keras names the state of a SeedGenerator


class OtherVariables:
    """What a model has besides its trainable variables. Methods are called while a function is traced.

    - Statistics (floating point, as of batch norm): the mean over all micro-batches of a step, weighed by samples.
    - Counters (integers): move by what the step's very first micro-batch moves them, whatever the number of workers.
    - Seeds (of dropout, augmentation): given anew to each micro-batch, and never changed in the model.
    - Anything else (strings, booleans) stays as it is.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self._all = list(variables)
        seeds = [v for v in variables if v.path.rpartition("/")[2] == SEED_NAME]
        self._seeds = {id(variable): number for number, variable in enumerate(seeds)}
        self._statistics = [i for i, v in enumerate(variables) if tf.as_dtype(v.dtype).is_floating]
        self._counters = [
            i for i, v in enumerate(variables) if tf.as_dtype(v.dtype).is_integer and id(v) not in self._seeds
        ]
        moved = [self._all[i] for i in (*self._statistics, *self._counters)]
        self.shapes = [tuple(v.shape) for v in moved]
        self.dtypes = ["float64" if tf.as_dtype(v.dtype) == tf.float64 else "float32" for v in moved]

    def values(self, draw: tf.Tensor) -> list[tf.Tensor]:
        """What a micro-batch starts with; ``draw``: two int64, seed and first count of its random draws."""
        return [
            self._seed(self._seeds[id(variable)], variable, draw)
            if id(variable) in self._seeds
            else tf.convert_to_tensor(variable.value)
            for variable in self._all
        ]

    def moves(self, old: Sequence[Any], new: Sequence[Any], weight: tf.Tensor, lead: tf.Tensor) -> list[tf.Tensor]:
        """What a micro-batch contributes to the sums of its step; ``lead`` is 1 for the first of all, else 0."""
        statistics = [tf.cast(new[i], tf.float64) * tf.cast(weight, tf.float64) for i in self._statistics]
        counters = [tf.cast(new[i] - old[i], tf.float64) * tf.cast(lead, tf.float64) for i in self._counters]
        return [tf.cast(move, dtype) for move, dtype in zip((*statistics, *counters), self.dtypes, strict=True)]

    def assign(self, sums: Sequence[tf.Tensor]) -> None:
        """Set the variables to what the sums of all micro-batches say."""
        count = len(self._statistics)
        for i, value in zip(self._statistics, sums[:count], strict=True):
            self._all[i].assign(tf.cast(value, self._all[i].dtype))
        for i, moved in zip(self._counters, sums[count:], strict=True):
            self._all[i].assign_add(tf.cast(tf.round(moved), self._all[i].dtype))

    @staticmethod
    def _seed(number: int, variable: Any, draw: tf.Tensor) -> tf.Tensor:
        seed = tf.stack([draw[0] + (number << 32), draw[1]])
        return tf.cast(seed, variable.dtype)
