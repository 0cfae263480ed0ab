"""The one place where the device of a worker is chosen."""

from __future__ import annotations

import os
from types import ModuleType

import torch

from elasticdl.common.environment import SHARED_GPU


def choose_device() -> torch.device:
    """The GPU that the launcher made visible, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def can_reduce_on_gpu(hvd: ModuleType, device: torch.device) -> bool:
    """Whether Horovod may be handed CUDA tensors: it was built with NCCL, and no GPU has two workers."""
    return device.type == "cuda" and bool(hvd.nccl_built()) and SHARED_GPU not in os.environ
