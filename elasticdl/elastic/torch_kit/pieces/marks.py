"""A number that stands for a tensor's bits: `elasticdl.elastic.training.fingerprint.mark`, computed where the tensor is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from elasticdl.elastic.torch_kit.gpu import HostCopy
from elasticdl.elastic.training.fingerprint import COLUMNS, WEIGHTS, WORD, Marks, mark

_UNSIGNED = (1 << 64) - 1


def marks_of(tensors: Sequence[Any]) -> Marks:
    """From a device comes one small copy, for which the host waits only when it asks for the marks."""
    on_devices: dict[torch.device, list[int]] = {}
    made: list[int] = [0] * len(tensors)
    for number, each in enumerate(tensors):
        if is_lazy(each):
            continue
        if isinstance(each, torch.Tensor) and each.device.type != "cpu":
            on_devices.setdefault(each.device, []).append(number)
        else:
            made[number] = mark(_on_host(each) if isinstance(each, torch.Tensor) else np.asarray(each))
    copies = {device: HostCopy(device_marks([tensors[i] for i in found])) for device, found in on_devices.items()}

    def wait() -> list[int]:
        for device, numbers in on_devices.items():
            for number, each in zip(numbers, copies[device].wait().tolist(), strict=True):
                made[number] = each & _UNSIGNED
        return made

    return wait


@torch.no_grad()
def device_marks(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of tensors of one device, there."""
    weights = torch.from_numpy(WEIGHTS).to(tensors[0].device)
    return torch.stack([_device_mark(_bits(each), weights) for each in tensors])


def _device_mark(raw: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    whole = len(raw) // WORD * WORD
    if raw.storage_offset() % WORD:  # a view of words must begin with one
        raw = raw.clone()
    words = raw[:whole].view(torch.int64)
    square = len(words) // COLUMNS * COLUMNS
    total = torch.tensor(len(raw), device=raw.device)
    if square:
        total = total + (words[:square].view(-1, COLUMNS).sum(0) * weights).sum()
    rest, tail = words[square:], raw[whole:].long()
    return total + (rest * weights[: len(rest)]).sum() + (tail * weights[COLUMNS - len(tail) :]).sum()


def _on_host(tensor: torch.Tensor) -> Any:
    """Its bits, without a copy where that can be."""
    if tensor.layout is torch.strided and tensor.dtype in (torch.float32, torch.float64, torch.int64):
        return tensor.detach().numpy()
    return _bits(tensor).numpy()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes, in the order of its elements."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor.view(-1).view(torch.uint8)
