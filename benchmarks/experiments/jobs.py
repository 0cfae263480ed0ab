"""What became of a job in an experiment, in seconds since the experiment began."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.experiments.zoo.step_log import LoggedStep
from benchmarks.processes import Failed
from elasticdl.job.journal import Entry


@dataclass(frozen=True, slots=True)
class JobRun:
    """``steps`` in the order of their making."""

    name: str
    submitted: float  # when the command was typed
    began: float  # when the first workers were together
    ended: float
    steps: tuple[LoggedStep, ...]

    @property
    def first_step(self) -> float:
        """When it was done."""
        return self.steps[0].time


def job_run(name: str, submitted: float, epoch: float, journal: Sequence[Entry], steps: Sequence[LoggedStep]) -> JobRun:
    """``epoch``: when the experiment began, in seconds since 1970.

    Raises:
        Failed: the job did not succeed, or did not log its steps.
    """
    ends = [entry for entry in journal if entry["event"] == "job_finished"]
    if not ends or ends[-1]["phase"] != "succeeded":
        raise Failed(f"job {name} has not succeeded: {ends[-1]['reason'] if ends else 'it has not finished'}")
    if not steps:
        raise Failed(f"job {name} has no steps in its logs")
    began = next(entry["time"] for entry in journal if entry["event"] == "world_formed")
    own = sorted((LoggedStep(s.step, s.time - epoch, s.workers, s.loss) for s in steps), key=lambda step: step.time)
    return JobRun(name, submitted, began - epoch, ends[-1]["time"] - epoch, tuple(own))


def write_steps(path: Path, jobs: Mapping[str, Sequence[LoggedStep]]) -> None:
    """Each job's, in the order of their making."""
    with path.open("w", newline="") as lines:
        table = csv.writer(lines)
        table.writerow(("time", "owner", "step", "workers", "loss"))
        for name, steps in jobs.items():
            table.writerows((f"{s.time:.3f}", name, s.step, s.workers, f"{s.loss:.6f}") for s in steps)
