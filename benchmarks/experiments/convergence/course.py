"""One job from its submission to its end, its workers changed at the steps that the plan names."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.experiments.convergence.plan import (
    VARIABLE,
    Change,
    Job,
    Recipe,
    Step,
    Task,
    go_file,
    held_file,
    read_steps,
)
from benchmarks.experiments.lab import Lab
from benchmarks.experiments.options import ClusterKind
from benchmarks.experiments.training import THREADS, Followed
from benchmarks.job import flags_of, success_of
from benchmarks.processes import Failed, scratch
from elasticdl.job.journal import Entry

MODEL = "benchmarks.experiments.convergence.resnet20"
MOUNT = Path("/experiment")


@dataclass(frozen=True, slots=True)
class Result:
    job: Job
    steps: tuple[Step, ...]
    journal: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Course:
    """``shared``: a folder that the pods see, too, in a given cluster under the same path; ``given_up``: set when nobody wants the
    results any more.
    """

    lab: Lab
    recipe: Recipe
    shared: Path
    given_up: threading.Event

    def run(self, job: Job) -> Result:
        """Train to the end."""
        own = tempfile.TemporaryDirectory(prefix=f"{job.name}-", dir=self.shared, ignore_cleanup_errors=True)
        with own as name, scratch() as processes:
            folder = Path(name)
            folder.chmod(0o777)  # pods of another user write there, too
            Task(job, self.recipe).write(folder)
            self.lab.submit(job.name, self._flags(job, folder))
            followed = Followed(self.lab, job.name, processes, self.given_up)
            workers = [job.first_workers, *(change.workers for change in job.changes)]
            for before, change in zip(workers, job.changes, strict=False):
                self._change(followed, folder, change, change.workers - before)
            _wait_for(followed, "job_finished")
            journal = tuple(followed.journal.entries)
            success_of(job.name, journal)
            require_plan(job, journal)
            return Result(job, tuple(read_steps(folder)), journal)

    def _flags(self, job: Job, folder: Path) -> list[str]:
        data, volume = self.lab.options.training_data, {}
        if self.lab.options.cluster is ClusterKind.TIER1:  # whose nodes are this machine; pods have a /tmp of their own
            volume, folder = {"volume": f"host_path={self.shared},mount_path={MOUNT}"}, MOUNT / folder.name
        given = {
            "model_zoo": self.lab.options.repository,
            "model_def": MODEL,
            "num_workers": job.first_workers,
            "num_epochs": job.epochs,
            "seed": job.seed,
            "envs": f"{VARIABLE}={folder},{THREADS}",
            "worker_resource_request": "cpu=0.1,memory=2Gi,gpu=1",
            **({"training_data": data, "validation_data": data} if data else {}),
            **volume,
            **job.batch_flags(self.recipe),
        }
        return flags_of(given)

    def _change(self, followed: Followed, folder: Path, change: Change, newcomers: int) -> None:
        held = change.step - 1
        followed.wait(held_file(folder, held).exists, f"step {held}")
        mark = followed.journal.mark()
        self.lab.elasticdl("scale", followed.name, str(change.workers))
        # Else those who are late would get a world of their own.
        _wait_for(followed, "worker_ready", newcomers, mark)
        _wait_for(followed, "change_announced", 1, mark)
        go_file(folder, held).touch()
        _wait_for(followed, "world_formed", 1, mark)


def _wait_for(followed: Followed, event: str, count: int = 1, start: int = 0) -> None:
    """Until the journal has so many from its entry ``start`` on."""
    journal = followed.journal
    followed.wait(lambda: sum(each["event"] == event for each in journal.read()[start:]) >= count, event)


def require_plan(job: Job, journal: Sequence[Entry]) -> None:
    planned = [(0, job.first_workers), *((change.step, change.workers) for change in job.changes)]
    formed = [(each["step"], len(each["members"])) for each in journal if each["event"] == "world_formed"]
    if formed != planned:
        raise Failed(f"job {job.name}: its worlds (first step, workers) were {formed}; planned were {planned}")
