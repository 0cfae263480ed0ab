"""The one place where the device of a worker is chosen, and how samples get there."""

from __future__ import annotations

from typing import Any

import torch


def choose_device() -> torch.device:
    """The GPU that the launcher made visible, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def to_device(sample: Any, device: torch.device) -> Any:
    """Tensors within tuples, lists and dicts moved to the device, all else as it is."""
    if isinstance(sample, torch.Tensor):
        return sample.to(device, non_blocking=True)
    if isinstance(sample, dict):
        return {key: to_device(value, device) for key, value in sample.items()}
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        return type(sample)(*(to_device(value, device) for value in sample))
    if isinstance(sample, list | tuple):
        return type(sample)(to_device(value, device) for value in sample)
    return sample
