"""What a loop tells of its steps: a rate, a line per step, or when it began. Standard library only.

It is imported in the peers' own virtual environments, too.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESTING_SECONDS = 0.2  # of a worker that is there to be killed
REPLICA = "BENCHMARK_REPLICA"  # number of a replica group of torchft's that has several processes
PARTS_OF_A_CHECK = ("begin", "ballot", "judge", "step_made")


@dataclass(frozen=True, slots=True)
class Team:
    """What a loop knows of the other workers. ``agree``: rank 0's number, on all. ``world``: its name and size.

    ``settle`` waits until the device has computed what was asked of it.
    """

    agree: Callable[[int], int] = lambda number: number
    rank: Callable[[], int] = lambda: 0
    world: Callable[[], tuple[str, int]] = lambda: ("1", 1)
    settle: Callable[[], None] = lambda: None


def team_of_job(job: Callable[[], Any], settle: Callable[[], None] = lambda: None) -> Team:
    """Of an elasticdl job; ``job`` gives its context."""

    def agree(number: int) -> int:
        return int(job().collective.broadcast_bytes(str(number).encode(), "benchmark.steps"))

    return Team(agree, lambda: int(job().rank), lambda: (str(job().world.version), int(job().size)), settle)


class Record:
    """Call `begin` before the first step, `lap` after each part of a step, `made` and then `over` after each step."""

    warm = False  # whether the loop is to pay what a process pays for its first step before it joins
    team: Team | None = None

    def begin(self, team: Team) -> None:
        self.team = team

    def lap(self, name: str) -> None:
        """The time since the last call went into this part of the step."""

    def made(self, number: int) -> None:
        """Step ``number`` is done."""

    def over(self) -> bool:
        """Whether that was the last step."""
        return False

    def watch_checks(self) -> None:
        """What comparing the workers' states takes is of interest."""

    def watch_memory(self, kept: Callable[[], Mapping[str, int]]) -> None:
        """``kept``: bytes of what this process has in memory between two steps, by what it is."""

    def traces(self, counts: Mapping[str, int]) -> None:
        """How often this process has traced each of its functions."""


class Work(argparse.Namespace):
    """What `run` was told."""

    model: str
    samples: int
    way: str
    workers: int
    folder: Path
    warm_up: int
    seconds: float
    began: float
    record: Record


class Meter(Record):
    """Samples per second after a warm-up, and where the time of a step goes.

    After the warm-up the ranks agree on a number of steps, so that all stop after the same one.
    """

    def __init__(self, work: Work) -> None:
        self._folder = work.folder
        self._warm_up = work.warm_up
        self._seconds = work.seconds
        self._laps: dict[str, list[float]] = {}
        self._spent: dict[str, float] = {}
        self._steps = self._target = 0
        self._started_at = self._cpu_before = self._half_at = self._last = 0.0
        self._kept: Callable[[], Mapping[str, int]] = dict

    def begin(self, team: Team) -> None:
        super().begin(team)
        self._half_at = self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps.setdefault(name, []).append(now - self._last)
        self._last = now

    def watch_checks(self) -> None:
        """The `check` of a step is spent within its other parts."""
        from elasticdl.elastic.training.check import Check

        def timed(part: Any) -> Any:
            @functools.wraps(part)
            def run(*args: Any, **kwargs: Any) -> Any:
                began = time.perf_counter()
                try:
                    return part(*args, **kwargs)
                finally:
                    self._spent["check"] = self._spent.get("check", 0.0) + time.perf_counter() - began

            return run

        for name in PARTS_OF_A_CHECK:
            setattr(Check, name, timed(getattr(Check, name)))

    def watch_memory(self, kept: Callable[[], Mapping[str, int]]) -> None:
        self._kept = kept

    def over(self) -> bool:
        self._steps += 1
        if self._target and self._steps == self._target:
            self._finish()
            return True
        if not self._target and self._steps == self._warm_up // 2:
            self._half_at = time.perf_counter()  # the first steps may compile something
        elif not self._target and self._steps == self._warm_up:
            self._start()
        return False

    def _start(self) -> None:
        assert self.team is not None
        self.team.settle()
        step = (time.perf_counter() - self._half_at) / (self._warm_up - self._warm_up // 2)
        self._target = self.team.agree(max(1, round(self._seconds / step)))
        self._steps = 0
        self._laps.clear()
        self._spent.clear()
        self._started_at = self._last = time.perf_counter()
        self._cpu_before = time.process_time()

    def _finish(self) -> None:
        assert self.team is not None
        self.team.settle()
        laps = {name: statistics.fmean(laps) for name, laps in self._laps.items()}
        spent = {name: seconds / self._target for name, seconds in self._spent.items()}
        result = {
            "steps": self._target,
            "seconds": time.perf_counter() - self._started_at,
            "cpu_ms_per_step": 1e3 * (time.process_time() - self._cpu_before) / self._target,
            "laps_ms": {name: 1e3 * seconds for name, seconds in (laps | spent).items()},
            "kept": dict(self._kept()),
        }
        (self._folder / f"rank-{self.team.rank()}.json").write_text(json.dumps(result))


class StepLog(Record):
    """A line per step, in a file of this process; times are of the system-wide monotonic clock."""

    warm = True

    def __init__(self, work: Work) -> None:
        self._folder = work.folder
        self._pid = pid_of_worker()
        self._file = (work.folder / f"steps-{self._pid}.log").open("a", buffering=1)
        self._traces: dict[str, int] = {}

    def made(self, number: int) -> None:
        assert self.team is not None
        world, size = self.team.world()
        self._file.write(f"{time.monotonic():.6f} {number} {world} {size}\n")

    def traces(self, counts: Mapping[str, int]) -> None:
        if self._traces != counts:
            self._traces = dict(counts)
            write_whole(traces_path(self._folder, self._pid), self._traces)


def pid_of_worker() -> int:
    """That its launcher knows. Of a worker of several processes the first one speaks."""
    return os.getppid() if os.environ.get("ELASTICDL_PROCESS") == "0" else os.getpid()


class Start(Record):
    """When the program's first line ran and when its first step was done; it then waits to be killed."""

    def __init__(self, work: Work) -> None:
        self._began = work.began
        self._path = work.folder / f"{os.getpid()}.json"

    def made(self, number: int) -> None:
        if not self._path.exists():
            write_whole(self._path, {"began": self._began, "stepped": time.time(), "cpu": time.process_time()})

    def over(self) -> bool:
        time.sleep(RESTING_SECONDS)
        return False


RECORDS: Mapping[str, Callable[[Work], Record]] = {
    "meter": Meter,
    "steps": StepLog,
    "start": Start,
}


def run(loops: Mapping[str, Callable[[Work], None]], began: float = 0.0) -> None:
    """The loop that the command line names. ``began``: the time of the program's first line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("loop", choices=list(loops))
    parser.add_argument("--record", dest="how", choices=list(RECORDS), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for what is recorded")
    parser.add_argument("--samples", type=int, default=65536, help="of an epoch")
    parser.add_argument("--way", default="elastic", help="alone, elastic, or with whom")
    parser.add_argument("--workers", type=int, default=2, help="whose batches are the global one")
    parser.add_argument("--warm_up", type=int, default=30, help="steps before a meter measures")
    parser.add_argument("--seconds", type=float, default=10.0, help="that a meter measures")
    work = parser.parse_args(namespace=Work(began=began))
    work.record = RECORDS[work.how](work)
    loops[work.loop](work)


def traces_path(folder: Path, pid: int) -> Path:
    return folder / f"traces-{pid}.json"


def write_whole(path: Path, content: object) -> None:
    path.with_suffix(".new").write_text(json.dumps(content))
    path.with_suffix(".new").replace(path)
