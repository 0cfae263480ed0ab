"""What a training state does with PyTorch's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import IO, Any

import torch

from elasticdl.elastic.torch_kit.collective import broadcast_state
from elasticdl.elastic.torch_kit.flat import host_array
from elasticdl.elastic.torch_kit.pieces.marks import marks_of
from elasticdl.elastic.torch_kit.torch_job import ElasticContext
from elasticdl.elastic.training.fingerprint import Array, Marks

Modules = Callable[[], Sequence[torch.nn.Module]]  # the model, and others that were given along


class TorchTensors:
    """See `elasticdl.elastic.training.pieces.Tensors`."""

    read = staticmethod(partial(torch.load, map_location="cpu", weights_only=False))

    def __init__(self, job: ElasticContext) -> None:
        self._job = job

    def marks_of(self, arrays: Sequence[Any]) -> Marks:
        return marks_of(arrays)

    def host_array(self, value: Any) -> Array:
        return host_array(value)

    def broadcast(self, dumped: dict[str, Any], *, to_all: bool = False) -> dict[str, Any]:
        return broadcast_state(dumped, self._job.collective, self._job.device, to_all=to_all)

    def write(self, dumped: dict[str, Any], file: IO[bytes]) -> None:
        torch.save(dumped, file)


def copy_tensor(value: Any, before: Any) -> torch.Tensor | None:
    """See `elasticdl.elastic.training.copies.CopyTensor`."""
    if not _is_whole(value):
        return None
    alike = _is_whole(before) and (before.shape, before.dtype) == (value.shape, value.dtype)
    made: torch.Tensor = before if alike and before.device == value.device else torch.empty_like(value)
    with torch.no_grad():
        return made.copy_(value)


def _is_whole(value: Any) -> bool:
    """A plain tensor that shares its memory with no other."""
    return (
        type(value) is torch.Tensor
        and not value.requires_grad
        and value.layout is torch.strided
        and value.is_contiguous()
        and value.untyped_storage().nbytes() == value.numel() * value.element_size()
    )
