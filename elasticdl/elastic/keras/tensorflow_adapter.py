"""TensorFlow's tensors for the engines of `elasticdl.elastic.collectives`.

Collectives run eagerly, beside the traced functions and not inside them: a graph that holds no collective knows nothing of
the world, and need not be traced again when it changes. A blocked one waits without Python's lock and without spinning.

And what a job asks of Keras's backend: that it is TensorFlow, its seed, its devices.
"""

from __future__ import annotations

import contextlib
import math
from types import ModuleType
from typing import Any

import numpy as np

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.port import Bytes
from elasticdl.elastic.training.runtime import SEED, used_streams_kept
from elasticdl.tensorflow import keras, tf

# TensorFlow as Keras's backend, and its devices.


def require_backend() -> None:
    """Raises UserError if Keras computes on something else than TensorFlow."""
    if keras.config.backend() != "tensorflow":
        raise UserError(
            f"Keras computes on {keras.config.backend()}; elasticdl needs TensorFlow there: set KERAS_BACKEND=tensorflow"
        )


def seed_keras(seed: int) -> None:
    """All generators from which initial weights are drawn; unless the script has done so, as by ``keras.utils.set_random_seed``."""
    if tf.compat.v1.get_seed(0)[0] in (None, SEED):
        with used_streams_kept():
            keras.utils.set_random_seed(seed % 2**32)  # NumPy's global generator takes no more


def prepare_devices() -> None:
    """Take GPU memory as it is needed, not all of it at once; TensorFlow uses the GPU that the launcher made visible."""
    for gpu in tf.config.list_physical_devices("GPU"):
        # Refused for a device that has been used or divided: by a model that was built before, which has taken its
        # memory as TF_FORCE_GPU_ALLOW_GROWTH says (workers have it), or by the user's own wish.
        with contextlib.suppress(RuntimeError, ValueError):
            if not tf.config.experimental.get_memory_growth(gpu):
                tf.config.experimental.set_memory_growth(gpu, True)


def count_gpus() -> int:
    return len(tf.config.list_physical_devices("GPU"))


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

    def to_host(self, lent: Any) -> Any:
        """Horovod's operations do that for TensorFlow."""
        return lent

    def summed(self, tensor: tf.Tensor, result: Any) -> tf.Tensor:
        if not isinstance(result, tf.Tensor) and _is_on_host(tensor):  # in the tensor's own memory
            return tensor
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
        with tf.device(HOST):
            return tuple(self._hvd.alltoall(tensor, splits, name=name))

    def poll(self, handle: Any) -> bool:
        return True

    def synchronize(self, handle: Any) -> Any:
        return handle
