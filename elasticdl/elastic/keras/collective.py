"""Reductions and broadcasts of TensorFlow tensors within the present world.

They run eagerly, beside the traced functions and not inside them: a graph that holds no collective knows nothing of the
world, and need not be traced again when it changes. A blocked one waits without Python's lock and without spinning.
"""

from __future__ import annotations

import importlib
import math
from abc import abstractmethod
from typing import Any

import numpy as np

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives import transfer
from elasticdl.elastic.collectives.horovod import HorovodCollective
from elasticdl.elastic.collectives.port import Bytes, Collective
from elasticdl.elastic.link.store import Endpoint
from elasticdl.tensorflow import tf


class KerasCollective(Collective):
    """Collectives on TensorFlow tensors; NumPy arrays are taken, too, and what is returned are tensors."""

    def sum(self, tensor: Any, name: str) -> tf.Tensor:
        """The sum over the world. All ranks get the same bits.

        Raises:
            WorldBroken: a member was lost, and nothing was received.
        """
        if self.world.size == 1:
            return tf.convert_to_tensor(tensor)
        self._count(name)
        return self._sum_tensor(tensor, name)

    def sum_into(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """As `sum`, of a tensor that nobody uses again: its memory may be that of the result."""
        return self.sum(tensor, name)

    def barrier(self, name: str) -> None:
        self.sum(np.zeros(1, np.float32), name)

    def _sum_array(self, array: Any, name: str) -> Any:
        return self.sum(array, name).numpy()

    @abstractmethod
    def _sum_tensor(self, tensor: Any, name: str) -> tf.Tensor:
        """As `sum`, in a world of several."""


class HorovodKeras(HorovodCollective, KerasCollective):
    module = "horovod.tensorflow"
    title = "TensorFlow"

    def broadcast_array(self, array: Bytes, name: str) -> Bytes:
        if self.world.size == 1:
            return array
        self._count(name)
        with self._guard() as hvd, tf.device("CPU:0"):
            return np.asarray(hvd.broadcast(array, 0, name=name))

    def _sum_tensor(self, tensor: Any, name: str) -> tf.Tensor:
        with self._guard() as hvd, tf.device(None if self._reduce_on_gpu else "CPU:0"):
            # hvd.allreduce would look at the world's size by further operations: a millisecond.
            return hvd.mpi_ops._allreduce(tf.convert_to_tensor(tensor), name=name, op=hvd.Sum)

    def _exchange(self, array: Bytes, sent: list[int], received: list[int], name: str) -> Bytes:
        self._count(name)
        with self._guard() as hvd, tf.device("CPU:0"):
            return np.asarray(hvd.alltoall(array, np.array(sent, np.int32), name=name)[0])


def open_collective(endpoint: Endpoint | None, engine: str, *, has_gpu: bool) -> KerasCollective:
    """For worlds of one if there is no endpoint. ``engine``: as ``--collective``.

    Raises:
        UserError: what is asked for is not installed.
    """
    if endpoint is None or HorovodKeras.is_wanted(engine):
        return HorovodKeras.open(endpoint, has_gpu=has_gpu)
    return _open_distributed(endpoint)


def require_collective(engine: str) -> None:
    """Raises:
    UserError: what ``--collective`` names is not installed.
    """
    if HorovodKeras.is_wanted(engine):
        HorovodKeras.require_horovod()
        return
    try:
        importlib.import_module("torch")
    except ImportError as error:
        needed = "Horovod with TensorFlow, or PyTorch (--collective torch), is needed; neither can be imported"
        raise UserError(f"{needed} ({error}): install torch, or build Horovod with `make setup`") from error


def _open_distributed(endpoint: Endpoint) -> KerasCollective:
    require_collective("torch")
    import torch

    from elasticdl.elastic.collectives.torch_distributed import TorchDistributed

    class DistributedKeras(TorchDistributed, KerasCollective):
        """Shares memory with TensorFlow instead of copying, where it may."""

        def broadcast_array(self, array: Bytes, name: str) -> Bytes:
            if self.world.size > 1:
                self._count(name)
                with self._guard():
                    self._wait(self._begin_broadcast(torch.from_numpy(array), name))
            return array

        def sum_into(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
            if self.world.size == 1 or not tensor.device.endswith("CPU:0"):
                return self.sum(tensor, name)
            self._count(name)
            self._sum_here(torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor)), name)
            return tensor

        def _sum_tensor(self, tensor: Any, name: str) -> tf.Tensor:
            array = tensor.numpy() if isinstance(tensor, tf.Tensor) else np.array(tensor)  # a copy
            self._sum_here(torch.from_numpy(array), name)
            return tf.convert_to_tensor(array)

        def _sum_here(self, tensor: torch.Tensor, name: str) -> None:
            with self._guard():
                self._wait(self._begin_sum(tensor, name))

    return DistributedKeras(endpoint)


def broadcast_state(state: Any, collective: Collective, *, to_all: bool = False) -> Any:
    """As `transfer.broadcast_state`; tensors arrive on the host."""
    return transfer.broadcast_state(state, collective, _TensorFlowFormat(), to_all=to_all)


class _TensorFlowFormat:
    kind = tf.Tensor

    def size(self, tensor: tf.Tensor) -> int:
        return int(math.prod(tensor.shape) * tensor.dtype.size)

    def describe(self, tensor: tf.Tensor) -> tuple[tuple[int, ...], str]:
        return tuple(tensor.shape), tensor.dtype.name

    def new_buffer(self, size: int) -> Bytes:
        return np.empty(size, np.uint8)

    def to_bytes(self, tensor: tf.Tensor) -> Bytes:
        return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)

    def read(self, content: Bytes, cut: slice, place: Bytes) -> None:
        place[:] = content[cut]

    def finish_reading(self) -> None:
        """It is done."""

    def from_bytes(self, content: Bytes, description: tuple[tuple[int, ...], str]) -> tf.Tensor:
        shape, dtype = description
        with tf.device("CPU:0"):
            return tf.convert_to_tensor(content.view(tf.as_dtype(dtype).as_numpy_dtype).reshape(shape))
