"""Measuring a training loop from inside: samples per second after a warm-up, and where the time of a step goes."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Meter:
    """Call `begin` before the first step, `lap` after each part of a step, and `done` after each step.

    After the warm-up the ranks agree on a number of steps, so that all stop after the same one.
    """

    def __init__(self, warm_up: int, seconds: float, agree: Callable[[int], int]) -> None:
        """``agree``: returns the number that rank 0 passes, on every rank."""
        self._warm_up = warm_up
        self._seconds = seconds
        self._agree = agree
        self._laps: dict[str, list[float]] = {}
        self._spent: dict[str, float] = {}
        self._steps = 0
        self._target = 0
        self._started_at = self._cpu_before = self._half_at = self._last = 0.0
        self.begun = False
        self._result: dict[str, Any] = {}

    def begin(self) -> None:
        self.begun = True
        self._half_at = self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """The time since the last call went into this part of the step."""
        now = time.perf_counter()
        self._laps.setdefault(name, []).append(now - self._last)
        self._last = now

    def spend(self, name: str, seconds: float) -> None:
        """Some time of a step, whatever lap it is in, went into this."""
        self._spent[name] = self._spent.get(name, 0.0) + seconds

    @property
    def is_last(self) -> bool:
        """Whether the present step is the last."""
        return bool(self._target) and self._steps == self._target - 1

    def done(self) -> bool:
        """Whether this was the last step."""
        self._steps += 1
        if self._target == 0 and self._steps == self._warm_up // 2:
            self._half_at = time.perf_counter()  # the first steps may compile something
        elif self._target == 0 and self._steps == self._warm_up:
            self._start()
        elif self._target and self._steps == self._target:
            self._finish()
            return True
        return False

    def _start(self) -> None:
        step = (time.perf_counter() - self._half_at) / (self._warm_up - self._warm_up // 2)
        self._target = self._agree(max(1, round(self._seconds / step)))
        self._steps = 0
        self._laps.clear()
        self._spent.clear()
        self._started_at = self._last = time.perf_counter()
        self._cpu_before = time.process_time()

    def _finish(self) -> None:
        seconds = time.perf_counter() - self._started_at
        spent = {name: 1e3 * each / self._target for name, each in self._spent.items()}
        self._result = {
            "steps": self._target,
            "seconds": seconds,
            "cpu_ms_per_step": 1e3 * (time.process_time() - self._cpu_before) / self._target,
            "laps_ms": {**{name: 1e3 * statistics.fmean(laps) for name, laps in self._laps.items()}, **spent},
            "laps_median_ms": {**{name: 1e3 * statistics.median(laps) for name, laps in self._laps.items()}, **spent},
        }

    def write(self, folder: Path, rank: int) -> None:
        (folder / f"rank-{rank}.json").write_text(json.dumps(self._result))
