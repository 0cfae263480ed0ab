"""Tensors as views into flat memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TypeVar

import torch

TensorT = TypeVar("TensorT", bound=torch.Tensor)
Kind = tuple[torch.dtype, torch.device]
# Views start at multiples of this many elements, so that vectorised kernels meet aligned memory.
ALIGNMENT = 16


def by_kind(tensors: Iterable[TensorT]) -> dict[Kind, list[TensorT]]:
    kinds: dict[Kind, list[TensorT]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return kinds


def aligned(tensor: torch.Tensor) -> int:
    """Elements that it takes in flat memory."""
    return -(-tensor.numel() // ALIGNMENT) * ALIGNMENT


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Those of a copy that keeps its memory format: its own if it fills its memory, in whatever order, else a contiguous one's."""
    own = tensor.stride()
    if torch.empty_like(tensor, device="meta").stride() == own:
        return own
    return torch.empty(tensor.shape, device="meta").stride()


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements as flat memory, which has them by `strides_of`; a copy only if it has gaps."""
    if tensor.stride() != strides_of(tensor):
        tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,))


def flat_views(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Zeroed flat memory for tensors of one kind, and for each of them a view of its shape."""
    sizes = [aligned(tensor) for tensor in tensors]
    flat = torch.zeros(sum(sizes), dtype=tensors[0].dtype, device=tensors[0].device)
    starts = accumulate(sizes, initial=0)
    return flat, [
        flat[start : start + tensor.numel()].view(tensor.shape) for tensor, start in zip(tensors, starts, strict=False)
    ]
