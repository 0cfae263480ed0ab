"""One job from its submission to its end, its workers changed at the steps that the plan names."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.experiments.convergence.plan import Change, Job, Recipe
from benchmarks.experiments.convergence.settings import VARIABLE, Step, go_file, held_file, read_steps
from benchmarks.experiments.lab import Lab
from benchmarks.experiments.training import THREADS, Followed
from benchmarks.job import flags_of
from benchmarks.processes import Failed, Processes, scratch
from elasticdl.job.journal import Entry

MODEL = "benchmarks.experiments.convergence.resnet20"
MOUNT = Path("/experiment")
POLL = 0.05


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
        prefix, here = f"{job.name}-", self._shared.here
        with (
            tempfile.TemporaryDirectory(prefix=prefix, dir=here, ignore_cleanup_errors=True) as folder,
            scratch() as processes,
        ):
            return self._run(job, Path(folder), processes)

    def _run(self, job: Job, folder: Path, processes: Processes) -> Result:
        folder.chmod(0o777)  # pods of another user write there, too
        job.settings(self._recipe).write(folder)
        self._lab.submit(job.name, self._flags(job, folder.name))
        followed = Followed(self._lab, job.name, processes)
        workers = [job.first_workers, *(change.workers for change in job.changes)]
        for before, change in zip(workers, job.changes, strict=False):
            self._change(followed, folder, change, change.workers - before)
        self._wait_for(followed, "job_finished")
        (end,) = followed.journal.of("job_finished")
        if end["phase"] != "succeeded":
            raise Failed(f"job {job.name} {end['phase']}: {end['reason']}")
        journal = tuple(followed.journal.entries)
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

    def _change(self, followed: Followed, folder: Path, change: Change, newcomers: int) -> None:
        held = change.step - 1
        self._wait(followed, held_file(folder, held).exists, f"step {held}")
        mark = followed.journal.mark()
        self._lab.elasticdl("scale", followed.name, str(change.workers))
        self._wait_for(
            followed, "worker_ready", newcomers, mark
        )  # else those who are late would get a world of their own
        self._wait_for(followed, "change_announced", 1, mark)
        go_file(folder, held).touch()
        self._wait_for(followed, "world_formed", 1, mark)

    def _wait_for(self, followed: Followed, event: str, count: int = 1, start: int = 0) -> None:
        """Until the journal has so many from its entry ``start`` on."""
        journal = followed.journal
        self._wait(followed, lambda: sum(each["event"] == event for each in journal.read()[start:]) >= count, event)

    def _wait(self, followed: Followed, done: Callable[[], bool], what: str) -> None:
        """For as long as it takes: a job in which nobody makes progress ends by itself.

        Raises:
            Failed: the job is over, or given up.
        """
        while not done():
            try:
                followed.raise_if_over()
            except Failed:
                if done():  # by what was said last
                    return
                raise
            if self._given_up.wait(POLL):
                raise Failed(f"job {followed.name}: given up before this: {what}")


def require_plan(job: Job, journal: Sequence[Entry]) -> None:
    """Raises:
    Failed: a world did not begin at its step, or with another number of workers.
    """
    planned = [(0, job.first_workers), *((change.step, change.workers) for change in job.changes)]
    formed = [(each["step"], len(each["members"])) for each in journal if each["event"] == "world_formed"]
    if formed != planned:
        raise Failed(f"job {job.name}: its worlds (first step, workers) were {formed}; planned were {planned}")
