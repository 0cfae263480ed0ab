"""How the tensors of a step lie in the one flat buffer that is reduced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

# Tensors start at multiples of this many elements: TensorFlow then cuts the buffer without copying it.
ROW = 16


@dataclass(frozen=True)
class Layout:
    """Tensors of these shapes and dtypes, one after the other in a matrix with `ROW` columns; then the vote."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    vote: int

    @cached_property
    def dtype(self) -> str:
        """Wide enough for all: float64 if any of them is."""
        return "float64" if "float64" in self.dtypes else "float32"

    @cached_property
    def _rows(self) -> list[int]:
        return [-(-size // ROW) for size in (*self._sizes, self.vote)]

    @cached_property
    def _sizes(self) -> list[int]:
        return [int(np.prod(shape)) for shape in self.shapes]

    def pack(self, tensors: Sequence[tf.Tensor], vote: tf.Tensor) -> tf.Tensor:
        parts: list[Any] = []
        for tensor, size, rows in zip((*tensors, vote), (*self._sizes, self.vote), self._rows, strict=True):
            parts.append(tf.reshape(tf.cast(tensor, self.dtype), [-1]))
            if size % ROW:
                parts.append(tf.zeros([rows * ROW - size], self.dtype))
        return tf.reshape(tf.concat(parts, 0), [-1, ROW])

    def unpack(self, flat: tf.Tensor) -> list[tf.Tensor]:
        """The tensors; the vote is in the last row (`read_vote`)."""
        parts = tf.split(flat, self._rows)[:-1]
        return [
            tf.cast(tf.reshape(tf.reshape(part, [-1])[:size], shape), dtype)
            for part, size, shape, dtype in zip(parts, self._sizes, self.shapes, self.dtypes, strict=True)
        ]

    def read_vote(self, flat: tf.Tensor) -> list[float]:
        values: list[float] = flat[-1].numpy()[: self.vote].tolist()
        return values

    def zeros(self) -> list[tf.Tensor]:
        return [tf.zeros(shape, dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]
