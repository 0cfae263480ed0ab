"""Experiment 4: several jobs that scale unequally share a cluster.

Which jobs come when, drawn from a seed; and how they may be given the GPUs: as options of each job, and somebody above them if the
policy has one.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

from benchmarks.experiments.lab import Lab, queue_flags
from benchmarks.processes import Failed
from elasticdl.job.journal import Entry
from elasticdl.kube.manifests.names import journal_name, state_name
from elasticdl.kube.manifests.packed_state import unpack_state

# Seconds of work for one worker; which, and when the next job comes, is drawn.
WORKS = (60.0, 120.0, 240.0, 480.0)
WORK_VARIATION = 0.2
SECONDS_BETWEEN = 25.0  # the mean, between two arrivals
STEP_SECONDS = 0.48  # of one worker alone
BATCH = 24


@dataclass(frozen=True, slots=True)
class Kind:
    """How a job scales: parts of a step's time with one worker, in the form of Pollux (Qiao et al., OSDI 2021)."""

    name: str
    serial: float  # computing that does not become less with a smaller share of the batch
    network: float  # the reduction with two workers
    growth: float  # with each further worker

    def seconds(self, workers: int) -> float:
        """Of a step, with one worker 1."""
        reduction = self.network + self.growth * (workers - 2) if workers > 1 else 0.0
        share = -(-BATCH // workers) / BATCH
        return self.serial + (1 - self.serial) * share + reduction


KINDS = (
    Kind("good", serial=0.02, network=0.005, growth=0.002),
    Kind("middling", serial=0.08, network=0.05, growth=0.015),
    Kind("poor", serial=0.25, network=0.15, growth=0.05),
)
# Of eight jobs three scale well, three middling, two poorly.
MIXTURE = (0, 1, 2, 0, 1, 2, 0, 1)


@dataclass(frozen=True, slots=True)
class PlannedJob:
    name: str
    arrival: float  # seconds after the first
    steps: int
    kind: Kind

    @property
    def work(self) -> float:
        """Seconds for one worker."""
        return self.steps * STEP_SECONDS


def draw_jobs(seed: int, scale: float) -> list[PlannedJob]:
    """``scale``: how many times shorter the work is, and the time between two arrivals."""
    draw = random.Random(seed)
    kinds = [KINDS[number] for number in MIXTURE]
    draw.shuffle(kinds)
    jobs, arrival = [], 0.0
    for number, kind in enumerate(kinds):
        work = draw.choice(WORKS) * draw.uniform(1 - WORK_VARIATION, 1 + WORK_VARIATION) / scale
        jobs.append(PlannedJob(f"{kind.name}-{number}", arrival, max(1, round(work / STEP_SECONDS)), kind))
        arrival += draw.expovariate(scale / SECONDS_BETWEEN)
    return jobs


QUEUE = "experiment"
LOOK_SECONDS = 5.0
RESTART_FACTOR = 0.9  # of the speedup of a job that would be restarted


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    title: str
    workers: str  # of each job, on so many GPUs
    more: tuple[str, ...] = ()
    gang: bool = False
    scheduled: bool = False  # somebody says how many workers each job has

    def flags(self, lab: Lab, gpus: int) -> list[str]:
        gang = queue_flags(lab.options) if self.gang else []
        return ["--num_workers", self.workers.format(gpus=gpus), *self.more, *gang]


POLICIES = (
    Policy("fixed4", "each job has 4 workers, or waits", "4", gang=True),
    Policy("fixed2", "each job has 2 workers, or waits", "2", gang=True),
    Policy("greedy", "everybody takes what is free", "1-{gpus}"),
    Policy("adaptdl", "AdaptDL's rule, by a scheduler above the jobs", "1", scheduled=True),
    Policy("share", "jobs share by themselves (--share_queue)", "1-{gpus}", ("--share_queue", QUEUE)),
)


@dataclass(frozen=True, slots=True)
class Candidate:
    name: str
    workers: int  # at present
    most_had: int
    speedups: Mapping[int, float]  # by number of workers, as far as they are known

    def speedup(self, workers: int) -> float:
        return self.speedups.get(workers, float(workers)) if workers else 0.0


def allocate(candidates: Sequence[Candidate], places: int) -> dict[str, int]:
    """Workers of each job; those that come first have theirs if there are more jobs than places.

    AdaptDL's scheduler looks for the allocation with the largest sum of speedups (Qiao et al., OSDI 2021;
    `adaptdl_sched/policy/pollux.py`). There it is searched for by a genetic algorithm; for eight places it can be worked out.
    A job whose speedup is not known yet is taken to scale perfectly, up to twice as many workers as it has had, as
    `adaptdl/goodput.py` and `adaptdl_sched/allocator.py` have it.
    """
    # Best sum of speedups, and the allocation, of the jobs so far, by the places that they take.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for each in candidates:
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for taken, (total, shares) in best.items():
            for workers in range(min(places - taken, max(1, 2 * each.most_had)) + 1):
                restarted = each.workers > 0 and workers != each.workers
                value = total + each.speedup(workers) * (RESTART_FACTOR if restarted else 1.0)
                if value > following.get(taken + workers, (-1.0, ()))[0]:
                    following[taken + workers] = value, (*shares, workers)
        best = following
    _, shares = max(best.values(), default=(0.0, ()))
    return {each.name: workers for each, workers in zip(candidates, shares, strict=True)}


class Scheduler:
    """Looks at all jobs now and then, and scales them by AdaptDL's rule, while its context lasts."""

    def __init__(self, lab: Lab, gpus: int) -> None:
        self._lab = lab
        self._gpus = gpus
        self._running: list[str] = []
        self._workers: dict[str, int] = {}
        self._news, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="adaptdl-rule", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._news.set()
        self._thread.join()

    def run_these(self, jobs: list[str]) -> None:
        self._running = jobs
        self._news.set()

    def _run(self) -> None:
        while not self._over.is_set():
            self._news.wait(LOOK_SECONDS)
            self._news.clear()
            try:
                self._look(self._running)
            except Failed as error:  # a job may have ended meanwhile
                print(f"warning: {error}", file=sys.stderr)

    def _look(self, jobs: Sequence[str]) -> None:
        candidates = [self._candidate(job) for job in jobs]
        for job, workers in allocate(candidates, self._gpus).items():
            if workers and workers != self._workers.get(job, 1):
                self._lab.elasticdl("scale", job, f"1-{workers}" if workers > 1 else "1")
                self._workers[job] = workers

    def _candidate(self, job: str) -> Candidate:
        state, older = (self._config_map(name(job)) for name in (state_name, journal_name))
        entries = [json.loads(line) for line in unpack_state(state, older).journal.splitlines()]
        return candidate(job, entries, self._workers.get(job, 1))

    def _config_map(self, name: str) -> Mapping[str, Any]:
        found = self._lab.core.read_namespaced_config_map(name, self._lab.namespace, _preload_content=False)
        content: Mapping[str, Any] = json.loads(cast(Any, found).data)
        return content


def candidate(job: str, journal: Sequence[Entry], workers: int) -> Candidate:
    """``workers``: that it was given last."""
    had = [len(entry["members"]) for entry in journal if entry["event"] == "world_formed"]
    advice = [entry for entry in journal if entry["event"] == "advice"]
    curve = advice[-1]["curve"] if advice else []
    return Candidate(job, workers, max(had, default=1), {each["workers"]: each["speedup"] for each in curve})
