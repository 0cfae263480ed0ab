"""How eight jobs may be given the GPUs of one cluster: as options of each job, and somebody above them if the policy has one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, cast

from benchmarks.experiments.lab import Lab, queue_flags
from benchmarks.experiments.sharing.adaptdl_rule import Candidate, allocate
from benchmarks.processes import Failed
from elasticdl.job.journal import Entry
from elasticdl.kube.manifests.names import journal_name, state_name
from elasticdl.kube.manifests.packed_state import unpack_state

QUEUE = "experiment"
LOOK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    title: str
    flags: Callable[[Lab, int], list[str]]  # of a job on so many GPUs
    scheduled: bool = False  # somebody says how many workers each job has


def fixed(size: int) -> Policy:
    def flags(lab: Lab, gpus: int) -> list[str]:
        return ["--num_workers", str(size), *queue_flags(lab.options)]

    return Policy(f"fixed{size}", f"each job has {size} workers, or waits", flags)


def elastic(lab: Lab, gpus: int) -> list[str]:
    return ["--num_workers", f"1-{gpus}"]


def sharing(lab: Lab, gpus: int) -> list[str]:
    return [*elastic(lab, gpus), "--share_queue", QUEUE]


def one_at_first(lab: Lab, gpus: int) -> list[str]:
    return ["--num_workers", "1"]


POLICIES = (
    fixed(4),
    fixed(2),
    Policy("greedy", "everybody takes what is free", elastic),
    Policy("adaptdl", "AdaptDL's rule, by a scheduler above the jobs", one_at_first, scheduled=True),
    Policy("share", "jobs share by themselves (--share_queue)", sharing),
)


@dataclass(slots=True)
class Scheduler:
    """Looks at all jobs now and then, and scales them by AdaptDL's rule, while its context lasts."""

    lab: Lab
    gpus: int
    failure: str = ""
    _running: dict[str, None] = field(default_factory=dict)
    _workers: dict[str, int] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _over: bool = False
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="adaptdl-rule", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        if self._thread:
            self._thread.join()

    def began(self, job: str) -> None:
        with self._changed:
            self._running[job] = None
            self._changed.notify_all()

    def ended(self, job: str) -> None:
        with self._changed:
            self._running.pop(job, None)
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(LOOK_SECONDS)
                if self._over:
                    return
                jobs = list(self._running)
            try:
                self._look(jobs)
            except Failed as error:  # a job may have ended meanwhile
                self.failure = str(error)

    def _look(self, jobs: Sequence[str]) -> None:
        candidates = [self._candidate(job) for job in jobs]
        for job, workers in allocate(candidates, self.gpus).items():
            if workers and workers != self._workers.get(job, 1):
                self.lab.elasticdl("scale", job, f"1-{workers}" if workers > 1 else "1")
                self._workers[job] = workers

    def _candidate(self, job: str) -> Candidate:
        state, older = (self._config_map(name(job)) for name in (state_name, journal_name))
        entries = [json.loads(line) for line in unpack_state(state, older).journal.splitlines()]
        return candidate(job, entries, self._workers.get(job, 1))

    def _config_map(self, name: str) -> Mapping[str, Any]:
        found = self.lab.core.read_namespaced_config_map(name, self.lab.namespace, _preload_content=False)
        content: Mapping[str, Any] = json.loads(cast(Any, found).data)
        return content


def candidate(job: str, journal: Sequence[Entry], workers: int) -> Candidate:
    """``workers``: that it was given last."""
    had = [len(entry["members"]) for entry in journal if entry["event"] == "world_formed"]
    advice = [entry for entry in journal if entry["event"] == "advice"]
    curve = advice[-1]["curve"] if advice else []
    return Candidate(job, workers, max(had, default=1), {each["workers"]: each["speedup"] for each in curve})
