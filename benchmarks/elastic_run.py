"""Disturbing an elasticdl job, and reading from its journal and step logs what that cost the survivors."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass

from benchmarks.job import ElasticJob, JobSettings
from benchmarks.loops.tracelog import read_traces
from benchmarks.processes import Processes, wait_until
from benchmarks.steps import Gap, StepLogs, gap_between, split_at
from elasticdl.job.event_catalogue import PAUSE_PARTS
from elasticdl.job.journal import Entry

SAMPLES = 65536
SIGNALS = {"sigterm": signal.SIGTERM, "sigkill": signal.SIGKILL, "sigstop": signal.SIGSTOP}
EVENTS = ("grow", *SIGNALS)
PROGRAMS = {
    "torch": ("benchmarks.loops.elastic_steps",),
    "keras": ("benchmarks.loops.keras_elastic_steps",),
    **{name: ("benchmarks.loops.trainers_steps", "--trainer", name) for name in ("loop", "lightning", "transformers")},
}
SETTLED_STEPS = 5
START_SECONDS = 180.0  # to import, warm up and join, several at once
EVENT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Change:
    """One change of workers. ``parts``: of each survivor's pause, as it reported them to the master.

    ``traces``: of each function by any survivor since it started, which has then trained in ``worlds_seen`` worlds.
    """

    event: str
    before: int
    after: int
    gap: Gap
    parts: tuple[dict[str, float], ...]
    torn: int
    worlds: int  # formed on the way; 1 unless something else happened meanwhile
    traces: dict[str, int]
    worlds_seen: int


class ElasticRun:
    """One job with ``workers`` workers, from which one is taken, and to which one is added."""

    def __init__(self, framework: str, model: str, workers: int, processes: Processes, options: dict[str, str]) -> None:
        """``options``: further ones of the job, by name."""
        program = [sys.executable, "-m", *PROGRAMS[framework], "--model", model]
        program += ["--samples", str(SAMPLES), "--folder", str(processes.folder)]
        self._job = ElasticJob("rescale", JobSettings(f"1-{workers}", program, options), processes)
        self._workers = workers
        self._folder = processes.folder
        self._logs = StepLogs(processes.folder)

    def start(self) -> None:
        self._job.start()
        self._wait_for_world(0, self._workers, START_SECONDS)

    def stop(self) -> None:
        self._job.stop()

    def repeat(self, event: str, number: int, settle: float, rng: random.Random) -> list[Change]:
        """Provoke the event once, and let the job grow back: two changes.

        Raises:
            Failed: the job did not come through in time.
        """
        world = self._settle(self._workers, settle, rng)
        if event == "grow":
            mark, now = self._job.journal.mark(), time.monotonic()
            self._job.scale(1, self._workers - 1)
            fewer = self._wait_for_world(mark, self._workers - 1, EVENT_SECONDS)
            lost = self._collect("scale-down", world, fewer, mark, now)
            fewer = self._settle(self._workers - 1, settle, rng)
            mark = self._job.journal.mark()
            self._job.scale(1, self._workers)
            return [lost, self._regrow("grow", fewer, mark)]
        victim = world["members"][number % self._workers]
        mark, now = self._job.journal.mark(), time.monotonic()
        os.kill(self._job.pid_of(victim), SIGNALS[event])
        fewer = self._wait_for_world(mark, self._workers - 1, EVENT_SECONDS)
        lost = self._collect(event, world, fewer, mark, now)
        return [lost, self._regrow("rejoin", fewer, mark)]

    def _regrow(self, event: str, fewer: Entry, mark: int) -> Change:
        """Wait until a newcomer has been let in; counted from when the members were told of it."""
        more = self._wait_for_world(mark, self._workers, START_SECONDS)
        entries = self._job.journal.read()
        told = [e for e in entries if e["event"] == "change_announced" and e["world"] == more["world"] - 1]
        since = (told[-1] if told else more)["time"] - time.time() + time.monotonic()
        return self._collect(event, fewer, more, entries.index(more), since)

    def _wait_for_world(self, mark: int, size: int, seconds: float) -> Entry:
        def formed(entry: Entry) -> bool:
            return bool(entry["event"] == "world_formed" and len(entry["members"]) == size)

        return self._job.journal.wait(formed, mark, seconds, f"a world of {size}")

    def _settle(self, size: int, seconds: float, rng: random.Random) -> Entry:
        """Wait until the newest world has this size and has trained for a while; then for a random part of a step."""

        def steady() -> bool:
            self._job.raise_if_over()
            world = self._job.world()
            if len(world["members"]) != size or time.time() - world["time"] < seconds:
                return False
            self._logs.read()
            pids = [self._job.pid_of(worker) for worker in world["members"]]
            return all(self._logs.count(pid, str(world["world"])) >= SETTLED_STEPS for pid in pids)

        wait_until(steady, START_SECONDS, f"steady training with {size} workers")
        world = self._job.world()
        steps = self._logs.steps[self._job.pid_of(world["members"][0])]
        time.sleep(rng.random() * (steps[-1].time - steps[-2].time))
        return world

    def _collect(self, event: str, old: Entry, new: Entry, mark: int, since: float) -> Change:
        """What the survivors report of the change from ``old`` to ``new``, and what their step logs say of it."""
        survivors = [worker for worker in old["members"] if worker in new["members"]]
        pauses = [self._pause_of(worker, new["world"], mark) for worker in survivors]
        newest = max(pause["world"] for pause in pauses)
        pids = [self._job.pid_of(worker) for worker in survivors]
        wait_until(lambda: self._has_stepped(pids, old["world"]), EVENT_SECONDS, "a step after the change")
        halves = []
        for pid in pids:
            steps = self._logs.steps[pid]
            halves.append(split_at(steps, since, [int(step.world) > old["world"] for step in steps]))
        traced = [read_traces(self._folder, pid) for pid in pids]
        return Change(
            event=event,
            before=len(old["members"]),
            after=len(new["members"]),
            gap=gap_between(halves, since),
            parts=tuple({part: pause[part] for part in (*PAUSE_PARTS, "total")} for pause in pauses),
            torn=max(pause["steps_torn"] for pause in pauses),
            worlds=newest - old["world"],
            traces={name: max(counts[name] for counts in traced) for name in traced[0]},
            worlds_seen=max(len({step.world for step in self._logs.steps[pid]}) for pid in pids),
        )

    def _pause_of(self, worker: int, world: int, mark: int) -> Entry:
        def wanted(entry: Entry) -> bool:
            return bool(entry["event"] == "pause" and entry["worker"] == worker and entry["world"] >= world)

        return self._job.journal.wait(wanted, mark, EVENT_SECONDS, f"the pause of worker {worker}")

    def _has_stepped(self, pids: Collection[int], old_world: int) -> bool:
        steps = self._logs.read()
        return all(int(steps[pid][-1].world) > old_world for pid in pids)
