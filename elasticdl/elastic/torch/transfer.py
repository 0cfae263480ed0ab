"""Sending a nested state (``state_dict``s and plain values) from rank 0 to all, tensors in bulk."""

from __future__ import annotations

import io
from typing import Any

import torch

from elasticdl.elastic.core.tensor_tree import put_tensors, take_tensors
from elasticdl.elastic.torch.collective import TorchCollective

# Smaller tensors travel together in one buffer; larger ones by themselves, without being copied first.
BULK_ELEMENTS = 1 << 16


def broadcast_state(state: Any, collective: TorchCollective, device: torch.device) -> Any:
    """Rank 0's nested state, on every rank; tensors that rank 0 has on a GPU arrive on ``device``.

    Raises:
        WorldBroken: nothing was received; the caller's own state is untouched.
    """
    if collective.world.size == 1:
        return state
    if collective.world.rank == 0:
        tensors: list[torch.Tensor] = []
        outline = take_tensors(state, torch.Tensor, tensors)
        shapes = [(tuple(t.shape), t.dtype, t.device.type) for t in tensors]
        buffer = io.BytesIO()
        torch.save((outline, shapes), buffer)
        collective.broadcast_bytes(buffer.getvalue(), "elasticdl.outline")
        _broadcast_tensors([tensor.detach().contiguous() for tensor in tensors], collective)
        return state
    received = collective.broadcast_bytes(b"", "elasticdl.outline")
    # Comes from another member of the same job, over the job's own connections.
    outline, shapes = torch.load(io.BytesIO(received), weights_only=False)
    tensors = [
        torch.empty(shape, dtype=dtype, device=device if kind != "cpu" else "cpu") for shape, dtype, kind in shapes
    ]
    _broadcast_tensors(tensors, collective)
    return put_tensors(outline, tensors)


def _broadcast_tensors(tensors: list[torch.Tensor], collective: TorchCollective) -> None:
    """One buffer for all small tensors of a kind; every rank lays it out in the same way."""
    large = [tensor for tensor in tensors if tensor.numel() > BULK_ELEMENTS]
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if 0 < tensor.numel() <= BULK_ELEMENTS:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    bulks = [torch.cat([tensor.reshape(-1) for tensor in group]) for group in kinds.values()]
    collective.broadcast_([*large, *bulks], "elasticdl.sync")
    if collective.world.rank == 0:
        return
    for group, bulk in zip(kinds.values(), bulks, strict=True):
        for tensor, part in zip(group, torch.split(bulk, [tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(part.view(tensor.shape))
