"""How much memory a process holds in each of its worlds."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import psutil
import torch

from elasticdl.elastic.torch.gpu import forget_peak, memory_of

SETTLED_STEPS = 3  # until what the first steps of a world need is there


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
