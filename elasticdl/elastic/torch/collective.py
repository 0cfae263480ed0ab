"""Reductions and broadcasts of torch tensors within the present world."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from elasticdl.elastic.collectives import transfer
from elasticdl.elastic.collectives.horovod import HorovodCollective
from elasticdl.elastic.collectives.port import Bytes, Collective
from elasticdl.elastic.collectives.transfer import take_tensors

# Between two looks at whether a collective is done: a small part of the time waited so far, within bounds in seconds.
SLEEP_PART = 1 / 16
SHORTEST_SLEEP = 50e-6
LONGEST_SLEEP = 1e-3


class TorchCollective(HorovodCollective):
    """Collectives on torch tensors, on any device."""

    module = "horovod.torch"
    title = "PyTorch"

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

    def barrier(self, name: str) -> None:
        self.sum_([torch.zeros(1)], name)

    def broadcast_array(self, array: Bytes, name: str) -> Bytes:
        self.broadcast_([torch.from_numpy(array)], name)
        return array

    def _sum_array(self, array: Any, name: str) -> Any:
        self.sum_([torch.from_numpy(array)], name)
        return array

    def _send_to_root(self, array: Bytes, name: str) -> Bytes:
        with self._guard() as hvd:
            splits = torch.zeros(self.world.size, dtype=torch.int32)
            splits[0] = len(array)
            received, _ = _wait(hvd, hvd.alltoall_async(torch.from_numpy(array), splits, name))
            return np.asarray(received)

    def _in_place(
        self, tensors: Sequence[torch.Tensor], name: str, begin: Callable[[ModuleType, torch.Tensor, str], Any]
    ) -> None:
        """One collective on each tensor, all under way at once."""
        if self.world.size == 1:
            return
        with self._guard() as hvd:
            direct = [self._reduce_on_gpu or tensor.device.type == "cpu" for tensor in tensors]
            staged = [tensor if as_is else tensor.cpu() for tensor, as_is in zip(tensors, direct, strict=True)]
            for handle in [begin(hvd, tensor, f"{name}.{index}") for index, tensor in enumerate(staged)]:
                _wait(hvd, handle)
            for tensor, copy in zip(tensors, staged, strict=True):
                if copy is not tensor:
                    tensor.copy_(copy)


def _wait(hvd: ModuleType, handle: Any) -> Any:
    """The result of a collective. ``hvd.synchronize`` alone spins, on a core that the transfer itself may need."""
    began = time.monotonic()
    while not hvd.poll(handle):
        waited = time.monotonic() - began
        time.sleep(min(max(waited * SLEEP_PART, SHORTEST_SLEEP), LONGEST_SLEEP))
    return hvd.synchronize(handle)


COPIED_WHEN_LOADED = ("model", "optimizer")  # parts of the state that need not arrive on the device


def broadcast_state(state: dict[str, Any], collective: Collective, device: torch.device) -> dict[str, Any]:
    """As `transfer.broadcast_state`; values that rank 0 has on a GPU arrive on ``device``, model and optimizer on the host."""
    tensors: list[torch.Tensor] = []
    take_tensors([part for name, part in state.items() if name not in COPIED_WHEN_LOADED], torch.Tensor, tensors)
    on_device = frozenset(id(tensor) for tensor in tensors if tensor.device.type != "cpu")
    received: dict[str, Any] = transfer.broadcast_state(state, collective, _TorchFormat(device, on_device))
    return received


@dataclass(frozen=True, slots=True)
class _TorchFormat:
    device: torch.device
    on_device: frozenset[int]  # ids of the tensors that arrive there
    kind: type = torch.Tensor

    def size(self, tensor: torch.Tensor) -> int:
        return tensor.numel() * tensor.element_size()

    def describe(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype, bool]:
        return tuple(tensor.shape), tensor.dtype, id(tensor) in self.on_device

    def to_bytes(self, tensor: torch.Tensor) -> Bytes:
        content: Bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return content

    def from_bytes(self, content: Bytes, description: tuple[tuple[int, ...], torch.dtype, bool]) -> torch.Tensor:
        shape, dtype, on_device = description
        # PyTorch does not take an empty array for one of another type.
        flat = torch.from_numpy(content).view(dtype) if len(content) else torch.empty(0, dtype=dtype)
        tensor = flat.view(shape)
        return tensor.to(self.device) if on_device else tensor
