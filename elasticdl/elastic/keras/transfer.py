"""Sending a nested state of TensorFlow tensors from rank 0 to all."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from elasticdl.elastic.collectives import transfer
from elasticdl.elastic.collectives.port import Bytes, Collective


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
