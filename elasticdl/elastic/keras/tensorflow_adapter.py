"""TensorFlow's tensors for the engines of `elasticdl.elastic.collectives`.

Collectives run eagerly, beside the traced functions and not inside them: a graph that holds no collective knows nothing of
the world, and need not be traced again when it changes. A blocked one waits without Python's lock and without spinning.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np

from elasticdl.elastic.collectives.tensor_adapter import Bytes
from elasticdl.elastic.keras.backend import count_gpus
from elasticdl.tensorflow import tf

HOST = "CPU:0"


class TensorFlowTensors:
    title, horovod, kind = "TensorFlow", "horovod.tensorflow", tf.Tensor
    lends_gpu_memory = False

    @property
    def has_gpu(self) -> bool:
        return count_gpus() > 0

    def operations(self, module: ModuleType, *, on_gpu: bool) -> Any:
        return _Operations(module, on_gpu=on_gpu)

    def lend(self, tensor: Any, *, natively: bool) -> Any:
        if natively or not isinstance(tensor, tf.Tensor):
            return tensor
        return tf.experimental.dlpack.to_dlpack(tensor) if _is_on_host(tensor) else tensor.numpy()

    def copy_to_host(self, lent: Any) -> None:
        """Horovod's operations do that for TensorFlow."""

    def summed(self, tensor: tf.Tensor, result: Any) -> tf.Tensor:
        is_done = not isinstance(result, tf.Tensor) and _is_on_host(tensor)  # in the tensor's own memory
        return tensor if is_done else self.arrived(tensor, result)

    def arrived(self, tensor: tf.Tensor, result: Any) -> tf.Tensor:
        return result if isinstance(result, tf.Tensor) else tf.experimental.dlpack.from_dlpack(result.__dlpack__())

    def size(self, tensor: tf.Tensor) -> int:
        return int(math.prod(tensor.shape) * tensor.dtype.size)

    def describe(self, tensor: tf.Tensor, *, on_host: bool) -> tuple[tuple[int, ...], str]:
        return tuple(tensor.shape), tensor.dtype.name

    def to_bytes(self, tensor: tf.Tensor) -> Bytes:
        return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)

    def read(self, content: Bytes, cut: slice) -> Bytes:
        return content[cut]

    def from_bytes(self, content: Bytes, description: tuple[tuple[int, ...], str]) -> tf.Tensor:
        shape, dtype = description
        with tf.device(HOST):
            return tf.convert_to_tensor(content.view(tf.as_dtype(dtype).as_numpy_dtype).reshape(shape))


def _is_on_host(tensor: tf.Tensor) -> bool:
    return bool(tensor.device.endswith(HOST))


class _Operations:
    """``horovod.tensorflow`` with the names of ``horovod.torch``; each operation is done when it returns."""

    def __init__(self, hvd: ModuleType, *, on_gpu: bool) -> None:
        self._hvd, self._device = hvd, None if on_gpu else HOST
        self.Sum = hvd.Sum

    def allreduce_async_(self, tensor: Any, *, op: Any, name: str) -> tf.Tensor:
        with tf.device(self._device):
            # hvd.allreduce would look at the world's size by further operations: a millisecond.
            return self._hvd.mpi_ops._allreduce(tf.convert_to_tensor(tensor), name=name, op=op)

    def broadcast_async_(self, tensor: Any, *, root_rank: int, name: str) -> tf.Tensor:
        with tf.device(HOST):
            return self._hvd.broadcast(tensor, root_rank, name=name)

    def alltoall_async(self, tensor: Any, splits: Any, name: str) -> Any:
        with tf.device(HOST if isinstance(tensor, np.ndarray) else self._device):
            return tuple(self._hvd.alltoall(tensor, splits, name=name))

    def poll(self, handle: Any) -> bool:
        return True

    def synchronize(self, handle: Any) -> Any:
        return handle
