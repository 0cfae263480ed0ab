"""Holding all workers at a step until the driver says go, so that each world begins at a step known beforehand.

A change of workers takes effect after the step that follows its announcement, whenever that comes. So the workers wait
at the end of a step; the driver sees that, asks for the change, waits until the master has announced it, and says go:
the next step is the last one of the old world. What the two say to each other are files in the job's shared folder.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from elasticdl.callbacks import Callback, Logs

SECONDS = 280.0  # a worker that makes no progress for 300 is taken to be stuck
POLL = 0.02


class Hold(Callback):
    """In a worker: waits after each of these steps."""

    def __init__(self, folder: Path, steps: Sequence[int], seconds: float = SECONDS) -> None:
        self._folder = folder
        self._steps = frozenset(steps)
        self._seconds = seconds
        self._rank = 0

    def on_world_change(self, size: int, rank: int) -> None:
        self._rank = rank

    def on_train_batch_end(self, step: int, logs: Logs) -> None:
        if step not in self._steps:
            return
        if self._rank == 0:
            held_file(self._folder, step).touch()
        deadline = time.monotonic() + self._seconds
        while not go_file(self._folder, step).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"held after step {step}: no go from the driver within {self._seconds:g} s")
            time.sleep(POLL)


def held_file(folder: Path, step: int) -> Path:
    """Is there once the workers wait."""
    return folder / f"held-{step}"


def go_file(folder: Path, step: int) -> Path:
    """Is there once they may go on."""
    return folder / f"go-{step}"
