"""One job from its submission to its end, its workers changed at the steps that the plan names."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.experiments.convergence.plan import Change, Job, Recipe
from benchmarks.experiments.convergence.settings import VARIABLE, Step, go_file, held_file, read_steps, recorded
from benchmarks.experiments.lab import Lab
from benchmarks.experiments.training import THREADS, Followed
from benchmarks.job import flags_of
from benchmarks.processes import Failed, Processes
from elasticdl.job.journal import Entry

MODEL = "benchmarks.experiments.convergence.resnet20"
MOUNT = Path("/experiment")
POLL = 0.05
QUIET_SECONDS = 400.0  # without a step; longer than any hold


@dataclass(frozen=True, slots=True)
class Result:
    job: Job
    steps: tuple[Step, ...]
    journal: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Shared:
    """A folder of the driver's and the pods': its path here, and in the pods, which get it as ``volume`` if that is set."""

    here: Path
    there: Path
    volume: str = ""

    @classmethod
    def on_host(cls, folder: Path) -> Shared:
        """Where the nodes are this machine."""
        return cls(folder, MOUNT, f"host_path={folder},mount_path={MOUNT}")


class Course:
    """``given_up``: set when nobody wants the results any more."""

    def __init__(self, lab: Lab, recipe: Recipe, shared: Shared, given_up: threading.Event) -> None:
        self._lab = lab
        self._recipe = recipe
        self._shared = shared
        self._given_up = given_up

    def run(self, job: Job) -> Result:
        """Train to the end.

        Raises:
            Failed: the job did, or a world did not begin where it was planned to.
        """
        with (
            tempfile.TemporaryDirectory(
                prefix=f"{job.name}-", dir=self._shared.here, ignore_cleanup_errors=True
            ) as folder,
            tempfile.TemporaryDirectory(prefix="elasticdl-course-") as scratch,
            Processes(Path(scratch)) as processes,
        ):
            return self._run(job, Path(folder), processes)

    def _run(self, job: Job, folder: Path, processes: Processes) -> Result:
        folder.chmod(0o777)  # pods of another user write there, too
        job.settings(self._recipe).write(folder)
        self._lab.submit(job.name, self._flags(job, folder.name))
        running = _Running(job, folder, Followed(self._lab, job.name, processes), self._given_up)
        workers = [job.first_workers, *(change.workers for change in job.changes)]
        for before, change in zip(workers, job.changes, strict=False):
            self._change(running, change, change.workers - before)
        running.wait("job_finished")
        (end,) = running.followed.journal.of("job_finished")
        if end["phase"] != "succeeded":
            raise Failed(f"job {job.name} {end['phase']}: {end['reason']}")
        journal = tuple(running.followed.journal.entries)
        require_plan(job, journal)
        return Result(job, tuple(read_steps(folder)), journal)

    def _flags(self, job: Job, folder: str) -> list[str]:
        data = self._lab.options.training_data
        given = {
            "model_zoo": self._lab.options.repository,
            "model_def": MODEL,
            "num_workers": job.first_workers,
            "num_epochs": job.epochs,
            "seed": job.seed,
            "envs": f"{VARIABLE}={self._shared.there / folder},{THREADS}",
            "worker_resource_request": "cpu=0.1,memory=2Gi,gpu=1",
            **({"training_data": data, "validation_data": data} if data else {}),
            **({"volume": self._shared.volume} if self._shared.volume else {}),
            **job.batch_flags(self._recipe),
        }
        return flags_of(given)

    def _change(self, running: _Running, change: Change, newcomers: int) -> None:
        held = change.step - 1
        running.wait_until(held_file(running.folder, held).exists, f"step {held}")
        mark = running.followed.journal.mark()
        self._lab.elasticdl("scale", running.job.name, str(change.workers))
        running.wait("worker_ready", newcomers, mark)  # else those who are late would get a world of their own
        running.wait("change_announced", 1, mark)
        go_file(running.folder, held).touch()
        running.wait("world_formed", 1, mark)


class _Running:
    """A job that trains, as its folder and its journal show it."""

    def __init__(self, job: Job, folder: Path, followed: Followed, given_up: threading.Event) -> None:
        self.job = job
        self.folder = folder
        self.followed = followed
        self._given_up = given_up

    def wait(self, event: str, count: int = 1, start: int = 0) -> None:
        """Until the journal has so many from its entry ``start`` on."""
        journal = self.followed.journal
        self.wait_until(lambda: sum(each["event"] == event for each in journal.read()[start:]) >= count, event)

    def wait_until(self, done: Callable[[], bool], what: str) -> None:
        """Raises:
        Failed: no step was made for long; or the job is over, or given up.
        """
        seen, deadline = -1, 0.0
        while not done():
            if (now := recorded(self.folder)) > seen:
                seen, deadline = now, time.monotonic() + QUIET_SECONDS
            try:
                self.followed.raise_if_over()
            except Failed:
                if done():  # by what was said last
                    return
                raise
            if time.monotonic() > deadline:
                raise Failed(f"job {self.job.name}: {what}: neither this nor a step within {QUIET_SECONDS:g} s")
            if self._given_up.wait(POLL):
                raise Failed(f"job {self.job.name}: given up before this: {what}")


def require_plan(job: Job, journal: Sequence[Entry]) -> None:
    """Raises:
    Failed: a world did not begin at its step, or with another number of workers.
    """
    planned = [(0, job.first_workers), *((change.step, change.workers) for change in job.changes)]
    formed = [(each["step"], len(each["members"])) for each in journal if each["event"] == "world_formed"]
    if formed != planned:
        raise Failed(f"job {job.name}: its worlds (first step, workers) were {formed}; planned were {planned}")
