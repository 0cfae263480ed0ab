"""Sending a nested state of torch tensors from rank 0 to all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elasticdl.elastic.collectives import transfer
from elasticdl.elastic.collectives.port import Bytes, Collective
from elasticdl.elastic.collectives.transfer import take_tensors

COPIED_WHEN_LOADED = ("model", "optimizer")  # parts of the state that need not arrive on the device


def broadcast_state(state: dict[str, Any], collective: Collective, device: torch.device) -> dict[str, Any]:
    """As `transfer.broadcast_state`; values that rank 0 has on a GPU arrive on ``device``, model and optimizer on the host."""
    received: dict[str, Any] = transfer.broadcast_state(state, collective, _TorchFormat(device, _on_device(state)))
    return received


def _on_device(state: Mapping[str, Any]) -> frozenset[int]:
    tensors: list[torch.Tensor] = []
    take_tensors([part for name, part in state.items() if name not in COPIED_WHEN_LOADED], torch.Tensor, tensors)
    return frozenset(id(tensor) for tensor in tensors if tensor.device.type != "cpu")


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
