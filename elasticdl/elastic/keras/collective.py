"""Reductions and broadcasts of TensorFlow tensors within the present world.

They run eagerly, beside the traced functions and not inside them: a graph that holds no collective knows nothing of the
world, and need not be traced again when it changes. A blocked one waits without Python's lock and without spinning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from elasticdl.elastic.collectives import transfer
from elasticdl.elastic.collectives.horovod import HorovodCollective
from elasticdl.elastic.collectives.port import Bytes, Collective


class KerasCollective(HorovodCollective):
    """Collectives on TensorFlow tensors; NumPy arrays are taken, too, and what is returned are tensors."""

    module = "horovod.tensorflow"
    title = "TensorFlow"

    def sum(self, tensor: Any, name: str) -> tf.Tensor:
        """As `sum_all`, of one tensor."""
        return self.sum_all([tensor], name)[0]

    def sum_all(self, tensors: Sequence[Any], name: str) -> list[tf.Tensor]:
        """The sum of each tensor over the world; all are of one dtype. All ranks get the same bits.

        Raises:
            WorldBroken: a member was lost, and nothing was received.
        """
        if self.world.size == 1:
            return [tf.convert_to_tensor(tensor) for tensor in tensors]
        with self._guard() as hvd, tf.device(None if self._reduce_on_gpu else "CPU:0"):
            # hvd.grouped_allreduce would look at the world's size by further operations: a millisecond.
            return list(hvd.mpi_ops._grouped_allreduce(list(tensors), name=name, op=hvd.Sum))

    def barrier(self, name: str) -> None:
        self.sum(np.zeros(1, np.float32), name)

    def broadcast_array(self, array: Bytes, name: str) -> Bytes:
        if self.world.size == 1:
            return array
        with self._guard() as hvd, tf.device("CPU:0"):
            return np.asarray(hvd.broadcast(array, 0, name=name))

    def _sum_array(self, array: Any, name: str) -> Any:
        return self.sum(array, name).numpy()

    def _send_to_root(self, array: Bytes, name: str) -> Bytes:
        with self._guard() as hvd, tf.device("CPU:0"):
            splits = np.zeros(self.world.size, np.int32)
            splits[0] = len(array)
            return np.asarray(hvd.alltoall(array, splits, name=name)[0])


def broadcast_state(state: Any, collective: Collective) -> Any:
    """As `transfer.broadcast_state`; tensors arrive on the host."""
    return transfer.broadcast_state(state, collective, _TensorFlowFormat())


class _TensorFlowFormat:
    kind = tf.Tensor

    def size(self, tensor: tf.Tensor) -> int:
        return int(math.prod(tensor.shape) * tensor.dtype.size)

    def describe(self, tensor: tf.Tensor) -> tuple[tuple[int, ...], str]:
        return tuple(tensor.shape), tensor.dtype.name

    def to_bytes(self, tensor: tf.Tensor) -> Bytes:
        return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)

    def from_bytes(self, content: Bytes, description: tuple[tuple[int, ...], str]) -> tf.Tensor:
        shape, dtype = description
        with tf.device("CPU:0"):
            return tf.convert_to_tensor(content.view(tf.as_dtype(dtype).as_numpy_dtype).reshape(shape))
