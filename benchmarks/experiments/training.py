"""Trainings in an experiment: the options of `elasticdl train`, following one, and what became of it."""

from __future__ import annotations

import math
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.experiments.artefacts import Artefacts
from benchmarks.experiments.lab import Lab, job_is_over
from benchmarks.experiments.measures import Change
from benchmarks.experiments.options import Options
from benchmarks.experiments.pods import GpuSeries, Pods
from benchmarks.experiments.zoo.pace import VARIABLE
from benchmarks.experiments.zoo.step_log import LoggedStep, logged_steps
from benchmarks.job import COMMAND, Journal, flags_of, success_of
from benchmarks.processes import Failed, Growing, Processes, wait_until
from elasticdl.job.journal import Entry

MODEL = "benchmarks.experiments.zoo.resnet20"
# One thread each: on a machine with fewer cores than workers more would only be in each other's way.
THREADS = "OMP_NUM_THREADS=1"
# Workers that are more than there are cores may be silent for longer than the default without being frozen.
HEARTBEAT_SECONDS = 15.0
END_SECONDS = 60.0
TICK = 0.05


@dataclass(frozen=True, slots=True)
class Training:
    """Of ResNet20. ``workers`` as in 4 or 1-4. The global batch is the same however many there are."""

    workers: str
    steps: int
    epochs: int
    global_batch: int
    micro_batch: int

    def flags(self, options: Options, data: str) -> list[str]:
        given = {
            "model_zoo": options.repository,
            "model_def": MODEL,
            "training_data": data,
            "num_workers": self.workers,
            "max_step": self.steps,
            "num_epochs": self.epochs,
            "global_batch_size": self.global_batch,
            "max_worker_batch_size": self.micro_batch,
            "seed": options.seed,
            "worker_resource_request": "cpu=1,memory=2Gi,gpu=1",
        }
        if options.simulated:
            given["envs"] = f"{VARIABLE}={options.seconds_per_sample:g},{THREADS}"
        return flags_of(given)


class Followed:
    """A job that was submitted, followed by the commands that a user follows it with; they end with ``processes``."""

    def __init__(self, lab: Lab, name: str, processes: Processes, given_up: threading.Event | None = None) -> None:
        """``given_up``: set when nobody wants to know more of it."""
        self._lab = lab
        self._processes = processes
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._given_up = given_up or threading.Event()
        self._logs = Growing(processes.log_of("logs"))
        self._steps: list[LoggedStep] = []
        self.name = name
        self.journal = Journal(processes.log_of("events"), self.raise_if_over)
        self._follow("events", "--json")

    def follow_logs(self) -> None:
        """So that there are steps."""
        self._follow("logs")

    def steps(self) -> list[LoggedStep]:
        """Of the lines that are whole, so far."""
        self._steps = sorted([*self._steps, *logged_steps(self._logs.new_lines())], key=lambda step: step.time)
        return self._steps

    def raise_if_over(self) -> None:
        if self._given_up.is_set():
            raise Failed(f"job {self.name} is given up")
        for name, process in self._started.items():
            if process.poll() is not None:
                raise Failed(f"job {self.name} is over; its {name}:\n{self._processes.tail(name)}")

    def wait(self, condition: Callable[[], object], what: str, seconds: float = math.inf) -> None:
        """For ever if need be: a job in which nobody makes progress ends by itself."""
        wait_until(condition, seconds, f"{self.name}: {what}", self.raise_if_over)

    def stop(self) -> None:
        """The job, by the command; returns when the followers have seen its end."""
        self._lab.elasticdl("stop", self.name)
        ended = self._started.values()
        wait_until(lambda: all(process.poll() is not None for process in ended), END_SECONDS, f"the end of {self.name}")

    def _follow(self, what: str, *flags: str) -> None:
        command = [*COMMAND, what, self.name, "--follow", *flags, *self._lab.place_flags]
        self._started[what] = self._processes.start(what, command, self._lab.env)


@dataclass(frozen=True, slots=True)
class Submission:
    """``after``: seconds since the first job."""

    name: str
    after: float
    flags: Sequence[str]


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that is over. ``submitted`` counts from ``epoch``, which is in seconds since 1970."""

    name: str
    submitted: float
    epoch: float
    journal: list[Entry]


def run_jobs(
    what: str,
    jobs: Sequence[Submission],
    lab: Lab,
    artefacts: Artefacts,
    patience: float,
    tell: Callable[[list[str]], object] = lambda running: None,
) -> tuple[list[Ended], list[Change]]:
    """Submit all jobs in their time, and wait for their ends; returns these, and which of them had which GPUs.

    ``tell`` is told of the jobs that run, whenever one begins or ends.
    """
    submitted: dict[str, float] = {}
    to_come, running = deque(jobs), list[str]()
    with GpuSeries(lab.core, lab.namespace, artefacts.folder / f"gpus-{what}.csv") as series:

        def is_due() -> bool:
            return bool(to_come) and series.now() >= to_come[0].after

        def happens(pods: Pods) -> list[str] | bool:
            return [name for name in running if job_is_over(pods, name)] or is_due()

        try:
            while to_come or running:
                if is_due():
                    job = to_come.popleft()
                    submitted[job.name] = series.now()
                    lab.submit(job.name, job.flags)
                    print(f"{job.name} submitted at {submitted[job.name]:.1f} s", flush=True)
                    running.append(job.name)
                    tell(list(running))
                    continue
                seconds = to_come[0].after - series.now() + TICK if to_come else patience
                found = series.wait(happens, seconds, f"the end of {', '.join(running)}")
                for name in found if isinstance(found, list) else ():
                    print(f"{name} is over at {series.now():.1f} s", flush=True)
                    running.remove(name)
                    tell(list(running))
            ended = [Ended(name, at, series.epoch, lab.journal(name)) for name, at in submitted.items()]
        except Failed:
            lab.keep_traces(list(submitted), artefacts)
            raise
        for each in ended:
            artefacts.journal(f"events-{each.name}", each.journal)
        return ended, [change for change in series.changes if change.owner in submitted]


@dataclass(frozen=True, slots=True)
class JobRun:
    """A job in seconds since the experiment began; ``steps`` in the order of their making."""

    name: str
    submitted: float  # when the command was typed
    began: float  # when the first workers were together
    ended: float
    steps: tuple[LoggedStep, ...]

    @property
    def first_step(self) -> float:
        """When it was done."""
        return self.steps[0].time


def job_run(job: Ended, steps: Iterable[LoggedStep]) -> JobRun:
    end = success_of(job.name, job.journal)["time"] - job.epoch
    began = next(entry["time"] for entry in job.journal if entry["event"] == "world_formed") - job.epoch
    own = sorted((replace(step, time=step.time - job.epoch) for step in steps), key=lambda step: step.time)
    if not own:
        raise Failed(f"job {job.name} has no steps in its logs")
    return JobRun(job.name, job.submitted, began, end, tuple(own))


STEP_COLUMNS = ("time", "owner", "step", "workers", "loss")


def step_rows(owner: str, steps: Sequence[LoggedStep]) -> list[tuple[object, ...]]:
    """In the order of their making."""
    return [(f"{s.time:.3f}", owner, s.step, s.workers, f"{s.loss:.6f}") for s in steps]
