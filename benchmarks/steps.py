"""Pauses, and steps lost or made twice, from the step logs of the surviving processes: the same for every system."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.processes import Growing

ORDINARY_STEPS = 31


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a step log."""

    time: float
    number: int
    world: str
    size: int


@dataclass(frozen=True, slots=True)
class Gap:
    """What a change cost the survivors. ``pause`` of each (seconds, less an ordinary step).

    ``redone``: steps that had been completed before and were made again after; ``lost``: numbers that nobody made.
    """

    pauses: tuple[float, ...]
    ordinary: float
    redone: int
    lost: int
    from_event: float  # until the last survivor had made its first step in the new world


class StepLogs:
    """Reads the step logs of a folder as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, Growing] = {}
        self.steps: dict[int, list[Step]] = {}  # by process id

    def read(self) -> dict[int, list[Step]]:
        for path in self._folder.glob("steps-*.log"):
            if lines := self._files.setdefault(path, Growing(path)).new_lines():
                self.steps.setdefault(int(path.stem.partition("-")[2]), []).extend(map(_parse, lines))
        return self.steps

    def newest_world(self, pids: Iterable[int]) -> int:
        """In which all of these processes have made a step; worlds are numbered."""
        steps = self.read()
        return min(int(steps[pid][-1].world) for pid in pids)

    def active(self, size: int, after: float, count: int) -> set[int]:
        """Processes that made at least so many steps in a world of this size since then, one of them the last."""
        found = set()
        for pid, steps in self.read().items():
            recent = [step for step in steps[-2 * count :] if step.time > after and step.size == size]
            if len(recent) >= count and steps[-1].size == size:
                found.add(pid)
        return found


def _parse(line: str) -> Step:
    time, number, world, size = line.split()
    return Step(float(time), int(number), world, int(size))


def ordinary_step(steps: Sequence[Step]) -> float:
    """Median duration of the last steps of one process; 0 if there are none."""
    durations = [later.time - earlier.time for earlier, later in pairwise(steps[-ORDINARY_STEPS - 1 :])]
    return statistics.median(durations) if durations else 0.0


def split_at(steps: Sequence[Step], event: float, is_new: Iterable[bool]) -> tuple[list[Step], list[Step]]:
    """Steps before and after the change: it lies before the first step after ``event`` that is of the new world."""
    for index, (step, new) in enumerate(zip(steps, is_new, strict=True)):
        if new and step.time > event:
            return list(steps[:index]), list(steps[index:])
    return list(steps), []


def gap_between(halves: Sequence[tuple[list[Step], list[Step]]], event: float) -> Gap:
    """Raises:
    ValueError: a survivor has no step before, or none after.
    """
    if not halves or not all(before and after for before, after in halves):
        raise ValueError("a survivor has no step on one side of the change")
    ordinary = [ordinary_step(before) for before, _ in halves]
    pauses = [after[0].time - before[-1].time - usual for (before, after), usual in zip(halves, ordinary, strict=True)]
    last = max(before[-1].number for before, _ in halves)
    first = min(after[0].number for _, after in halves)
    return Gap(
        pauses=tuple(pauses),
        ordinary=statistics.median(ordinary),
        redone=max(0, last - first + 1),
        lost=max(0, first - last - 1),
        from_event=max(after[0].time for _, after in halves) - event,
    )
