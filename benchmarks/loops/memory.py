"""How much memory a process holds, on its GPU too, and in each of its worlds."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from elasticdl.elastic.torch_kit.gpu import GPU

SETTLED_STEPS = 3  # until what the first steps of a world need is there


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """In bytes."""

    allocated: int  # by tensors, now
    peak: int  # by tensors, since `forget_peak`
    reserved: int  # by torch's allocator, which keeps what was freed
    used: int  # of the whole device, by all processes


def memory_of(device: torch.device) -> DeviceMemory | None:
    """None on a CPU."""
    if device.type != GPU:
        return None
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(
        torch.cuda.memory_allocated(device),
        torch.cuda.max_memory_allocated(device),
        torch.cuda.memory_reserved(device),
        total - free,
    )


def forget_peak(device: torch.device) -> None:
    if device.type == GPU:
        torch.cuda.reset_peak_memory_stats(device)


class MemoryLog:
    """A line of JSON for each world, in a file of this process."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._path = folder / f"memory-{os.getpid()}.jsonl"
        self._device = device
        self._world = self._steps = 0

    def step(self, world: int, size: int) -> None:
        self._world, self._steps = world, self._steps + 1 if world == self._world else 1
        if self._steps != SETTLED_STEPS:
            return
        on_device = memory_of(self._device)
        line = {"world": world, "size": size, "host": psutil.Process().memory_info().rss} | (
            asdict(on_device) if on_device else {}
        )
        forget_peak(self._device)
        with self._path.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
