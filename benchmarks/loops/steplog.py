"""A line per step and process, so that pauses are measured in the same way for every system. Standard library only."""

from __future__ import annotations

import os
import time
from pathlib import Path


class StepLog:
    """Appends to a file of this process; times are of the system-wide monotonic clock."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"steps-{os.getpid()}.log").open("a", buffering=1)

    def step(self, number: int, world: str, size: int) -> None:
        """Step ``number`` is done; ``world`` names the membership it was made in."""
        self._file.write(f"{time.monotonic():.6f} {number} {world} {size}\n")
