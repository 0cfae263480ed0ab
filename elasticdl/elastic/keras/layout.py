"""How the sums of a step lie in one buffer: a traced function and the collective hand each other one tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from elasticdl.tensorflow import tf

Shape = tuple[int, ...]
Sums = list[tf.Tensor]

ROW = 16  # elements: at least the 64 bytes by which TensorFlow aligns memory


class Layout:
    """Rows of numbers: those of each gradient, then those of the other variables, then the report for the host.

    Each gradient begins at a row, so TensorFlow takes it out without copying it. The other variables' sums are copied:
    a variable that kept a piece of the buffer would keep all of it in memory.
    """

    def __init__(self, gradients: Sequence[Shape], others: Sequence[Shape], report: Sequence[Shape]) -> None:
        self._gradients = list(gradients)
        self._others = [math.prod(shape) for shape in others]
        self._shapes = [*gradients, *others]
        self._report = sum(map(math.prod, report))
        sizes = [*(math.prod(shape) for shape in gradients), sum(self._others), self._report]
        self._rows = [-(-size // ROW) for size in sizes]
        self._padding = [rows * ROW - size for rows, size in zip(self._rows, sizes, strict=True)]

    # -- while a function is traced --

    def pack(self, sums: Sums, report: Sums) -> tf.Tensor:
        """``sums``: of gradients and other variables. Returns all, shape (rows, ROW)."""
        count = len(self._gradients)
        parts = [*([each] for each in sums[:count]), sums[count:], report]
        flat = [
            tf.reshape(each, [-1])
            for part, padding in zip(parts, self._padding, strict=True)
            for each in (*part, tf.zeros(padding, report[0].dtype))
        ]
        return tf.reshape(tf.concat(flat, 0), [-1, ROW])

    def unpack(self, rows: tf.Tensor) -> Sums:
        """The sums of gradients and other variables."""
        *parts, others, _ = tf.split(rows, self._rows)
        flat = [self._without(padding, part) for part, padding in zip(parts, self._padding, strict=False)]
        flat += tf.split(self._without(self._padding[-2], others), self._others) if self._others else []
        return [tf.reshape(part, shape) for part, shape in zip(flat, self._shapes, strict=True)]

    @staticmethod
    def _without(padding: int, rows: tf.Tensor) -> tf.Tensor:
        return tf.reshape(rows, [-1])[:-padding] if padding else tf.reshape(rows, [-1])

    # -- on the host --

    def read_report(self, rows: tf.Tensor) -> Any:
        """All numbers of the report, as an array."""
        start = sum(self._rows[:-1])
        on_host = rows.device.endswith("CPU:0")
        last = np.asarray(memoryview(rows))[start:] if on_host else rows[start:].numpy()
        return last.ravel()[: self._report].copy()

    def nothing(self, ballot: Sequence[float], dtype: str) -> tf.Tensor:
        """Zeros, but for the end of the report."""
        flat = np.zeros(sum(self._rows) * ROW, dtype)
        end = flat.size - self._padding[-1]
        flat[end - len(ballot) : end] = ballot
        return tf.convert_to_tensor(flat.reshape(-1, ROW))
