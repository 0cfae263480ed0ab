"""PyTorch's tensors, on any device, for the engines of `elasticdl.elastic.collectives`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch

from elasticdl.elastic.collectives.tensor_adapter import Bytes
from elasticdl.elastic.torch_kit.flat import in_memory_order, strides_of
from elasticdl.elastic.torch_kit.gpu import HostCopy, choose_device, new_stream

_Description = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]  # shape, strides, type, whether on the device


class TorchTensors:
    title, horovod, kind = "PyTorch", "horovod.torch", torch.Tensor
    lends_gpu_memory = True

    def __init__(self) -> None:
        self._device = choose_device()
        self._stream: torch.cuda.Stream | None = None  # for what is copied to the host

    @property
    def has_gpu(self) -> bool:
        return self._device.type != "cpu"

    def operations(self, module: ModuleType, *, on_gpu: bool) -> Any:
        return module

    def lend(self, tensor: Any, *, natively: bool) -> torch.Tensor:
        lent = torch.from_numpy(tensor) if isinstance(tensor, np.ndarray) else _real(tensor).contiguous()
        # Which Horovod does not know in PyTorch.
        return lent.float() if natively and lent.dtype == torch.bfloat16 else lent

    def copy_to_host(self, lent: torch.Tensor) -> HostCopy | None:
        if lent.device.type == "cpu":
            return None
        self._stream = self._stream or new_stream(lent.device)
        return HostCopy(lent, self._stream)

    def summed(self, tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        target = _real(tensor)
        if result.data_ptr() != target.data_ptr():  # the engine has worked on a copy
            target.copy_(result, non_blocking=True)
        return tensor

    def arrived(self, tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        made = result.to(tensor.device, _real(tensor).dtype)
        return torch.view_as_complex(made) if tensor.is_complex() else made

    def size(self, tensor: torch.Tensor) -> int:
        return tensor.numel() * tensor.element_size()

    def describe(self, tensor: torch.Tensor, *, on_host: bool) -> _Description:
        return tuple(tensor.shape), strides_of(tensor), tensor.dtype, not on_host and tensor.device.type != "cpu"

    def to_bytes(self, tensor: torch.Tensor) -> torch.Tensor:
        return in_memory_order(tensor.detach()).view(torch.uint8)

    def read(self, content: torch.Tensor, cut: slice) -> Bytes:
        part = content[cut]
        copy = self.copy_to_host(part)
        read: Bytes = (copy.wait() if copy else part).numpy()
        return read

    def from_bytes(self, content: Bytes, description: _Description) -> torch.Tensor:
        shape, strides, dtype, on_device = description
        # PyTorch does not take an empty array for one of another type.
        flat = torch.from_numpy(content).view(dtype) if len(content) else torch.empty(0, dtype=dtype)
        tensor = flat.as_strided(shape, strides)
        return tensor.to(self._device) if on_device else tensor


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs: neither Horovod nor NCCL knows them."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
