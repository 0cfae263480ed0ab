"""Tensors as views into flat memory, and as arrays of the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch

from elasticdl.elastic.training.fingerprint import Array, as_array

TensorT = TypeVar("TensorT", bound=torch.Tensor)
Kind = tuple[torch.dtype, torch.device]
# Views start at multiples of this many elements, so that vectorised kernels meet aligned memory.
ALIGNMENT = 16
_WIDER = {torch.bfloat16: torch.float32, torch.complex32: torch.complex64}  # what NumPy does not know, without loss


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


def host_array(value: Any) -> Array:
    """A tensor's numbers on the host, of a type that NumPy knows; what is no tensor as `as_array` has it."""
    if not isinstance(value, torch.Tensor):
        return as_array(value)
    tensor = value.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.dtype in _WIDER:
        tensor = tensor.to(_WIDER[tensor.dtype])
    elif tensor.is_floating_point() and tensor.itemsize < 2:  # eight bits in one of several ways
        tensor = tensor.float()
    array: Array = tensor.cpu().numpy()
    return array
