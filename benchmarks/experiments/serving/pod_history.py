"""When things happened to all pods of a namespace."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from benchmarks.pod_times import Fact, PodTimes, Times


class PodHistory(PodTimes):
    def all(self) -> dict[str, dict[Fact, float]]:
        """By the pod's name."""
        with self._news:
            return {name: dict(times) for name, times in self._times.items()}


def since(epoch: float, history: Mapping[str, Times]) -> dict[str, dict[Fact, float]]:
    """The same, counted from another moment."""
    return {name: {fact: time - epoch for fact, time in times.items()} for name, times in history.items()}


def write_history(path: Path, history: Mapping[str, Times]) -> None:
    with path.open("w", newline="") as lines:
        table = csv.writer(lines)
        table.writerow(("pod", *Fact))
        for name, times in sorted(history.items()):
            table.writerow((name, *(f"{times[fact]:.3f}" if fact in times else "" for fact in Fact)))
