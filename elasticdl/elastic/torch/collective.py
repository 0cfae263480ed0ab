"""Reductions and broadcasts of torch tensors within the present world."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from elasticdl.elastic.collectives.horovod import Bytes, HorovodCollective, import_horovod_for
from elasticdl.elastic.collectives.port import Endpoint

# Between two looks at whether a collective is done: a small part of the time waited so far, within bounds in seconds.
SLEEP_PART = 1 / 16
SHORTEST_SLEEP = 50e-6
LONGEST_SLEEP = 1e-3


def import_horovod() -> ModuleType:
    """``horovod.torch``, or one line that says what is missing.

    Raises:
        UserError: Horovod is not installed, was built without torch, or without Gloo.
    """
    return import_horovod_for("torch", "PyTorch")


class TorchCollective(HorovodCollective):
    """Collectives on torch tensors; in a world of one they cost nothing, and Horovod is still there for the user.

    Tensors may be on any device. Unless Horovod can reduce on the GPU (NCCL, one worker per GPU), they are staged
    through host memory.
    """

    def __init__(self, hvd: ModuleType | None, endpoint: Endpoint | None, *, reduce_on_gpu: bool) -> None:
        """Without ``hvd`` only worlds of one are possible (a script that runs alone)."""
        super().__init__(hvd, endpoint)
        self._reduce_on_gpu = reduce_on_gpu

    def sum_(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        """Replace each tensor by its sum over the world, in place. All ranks get the same bits.

        Raises:
            WorldBroken: the contents of the tensors are undefined.
        """
        self._in_place(tensors, name, lambda hvd, tensor, key: hvd.allreduce_async_(tensor, op=hvd.Sum, name=key))

    def broadcast_(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        """Replace each tensor by that of rank 0, in place.

        Raises:
            WorldBroken: the contents of the tensors are undefined.
        """
        self._in_place(tensors, name, lambda hvd, tensor, key: hvd.broadcast_async_(tensor, root_rank=0, name=key))

    def gather_rows(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """All ranks' tensors one below the other, in rank order; only the first dimension may differ.

        Raises:
            WorldBroken: nothing was gathered.
        """
        if self.world.size == 1:
            return tensor
        with self._guard() as hvd:
            gathered: torch.Tensor = _wait(hvd, hvd.allgather_async(self._stage(tensor), name=name))
            return gathered

    def barrier(self, name: str) -> None:
        self.sum_([torch.zeros(1)], name)

    def _broadcast_array(self, array: Bytes, name: str) -> Bytes:
        self.broadcast_([torch.from_numpy(array)], name)
        return array

    def _in_place(
        self, tensors: Sequence[torch.Tensor], name: str, begin: Callable[[ModuleType, torch.Tensor, str], Any]
    ) -> None:
        """One collective on each tensor, all under way at once."""
        if self.world.size == 1:
            return
        with self._guard() as hvd:
            staged = [self._stage(tensor) for tensor in tensors]
            for handle in [begin(hvd, tensor, f"{name}.{index}") for index, tensor in enumerate(staged)]:
                _wait(hvd, handle)
            _unstage(tensors, staged)

    def _stage(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device.type == "cpu" or self._reduce_on_gpu else tensor.cpu()

    def _is_failure(self, error: Exception) -> bool:
        # HorovodInternalError is a RuntimeError.
        return isinstance(error, RuntimeError) or (
            isinstance(error, ValueError) and "not been initialized" in str(error)
        )


def _wait(hvd: ModuleType, handle: Any) -> Any:
    """The result of a collective. ``hvd.synchronize`` alone spins, on a core that the transfer itself may need."""
    began = time.monotonic()
    while not hvd.poll(handle):
        waited = time.monotonic() - began
        time.sleep(min(max(waited * SLEEP_PART, SHORTEST_SLEEP), LONGEST_SLEEP))
    return hvd.synchronize(handle)


def _unstage(tensors: Sequence[torch.Tensor], staged: Sequence[torch.Tensor]) -> None:
    for tensor, copy in zip(tensors, staged, strict=True):
        if copy is not tensor:
            tensor.copy_(copy)
