"""Reductions and broadcasts of TensorFlow tensors within the present world.

They run eagerly, beside the traced functions and not inside them: a graph that holds no collective knows nothing of the
world, and need not be traced again when it changes. A blocked one waits without Python's lock and without spinning.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

from elasticdl.elastic.collectives.horovod import Bytes, HorovodCollective, import_horovod_for
from elasticdl.elastic.collectives.port import Endpoint


def import_horovod() -> ModuleType:
    """``horovod.tensorflow``, or one line that says what is missing.

    Raises:
        UserError: Horovod is not installed, was built without TensorFlow, or without Gloo.
    """
    return import_horovod_for("tensorflow", "TensorFlow")


class KerasCollective(HorovodCollective):
    """Collectives on TensorFlow tensors; NumPy arrays are taken, too, and what is returned are tensors.

    Unless Horovod can reduce on the GPU (NCCL, one worker per GPU), tensors travel through host memory.
    """

    def __init__(self, hvd: ModuleType | None, endpoint: Endpoint | None, *, reduce_on_gpu: bool) -> None:
        """Without ``hvd`` only worlds of one are possible (a script that runs alone)."""
        super().__init__(hvd, endpoint)
        self._device = None if reduce_on_gpu else "CPU:0"

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
        with self._guard() as hvd, tf.device(self._device):
            # hvd.grouped_allreduce would look at the world's size by further operations: a millisecond.
            return list(hvd.mpi_ops._grouped_allreduce(list(tensors), name=name, op=hvd.Sum))

    def broadcast(self, tensors: Sequence[Any], name: str) -> list[tf.Tensor]:
        """The tensors of rank 0; those of the others give shapes and dtypes.

        Raises:
            WorldBroken: nothing was received.
        """
        if self.world.size == 1:
            return [tf.convert_to_tensor(tensor) for tensor in tensors]
        with self._guard() as hvd, tf.device(self._device):
            return [hvd.broadcast(tensor, 0, name=f"{name}.{index}") for index, tensor in enumerate(tensors)]

    def gather_rows(self, tensor: Any, name: str) -> tf.Tensor:
        """All ranks' tensors one below the other, in rank order; only the first dimension may differ.

        Raises:
            WorldBroken: nothing was gathered.
        """
        if self.world.size == 1:
            return tf.convert_to_tensor(tensor)
        with self._guard() as hvd, tf.device(self._device):
            return hvd.allgather(tensor, name=name)

    def barrier(self, name: str) -> None:
        self.sum(np.zeros(1, np.float32), name)

    def _broadcast_array(self, array: Bytes, name: str) -> Bytes:
        received: Bytes = self.broadcast([array], name)[0].numpy()
        return received

    def _is_failure(self, error: Exception) -> bool:
        return is_failure(error)


def is_failure(error: BaseException) -> bool:
    """Whether a lost member is the cause of an error that a Horovod operation has raised.

    Horovod says "unknown" when the wire fails and "aborted" when it was shut down by somebody; "failed precondition"
    also when ranks disagree on a tensor's shape, which is a fault of the caller.
    """
    if "Horovod" not in str(error):
        return False
    if isinstance(error, tf.errors.UnknownError | tf.errors.AbortedError | tf.errors.CancelledError):
        return True
    return isinstance(error, tf.errors.FailedPreconditionError | ValueError) and "not been initialized" in str(error)
