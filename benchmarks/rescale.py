"""How long the survivors pause when workers come and go, and what the pause consists of.

    python -m benchmarks.rescale [--repetitions 10] [--workers 2,3,4,5] [--models 1m,2.6m,25m]
                                 [--events grow,sigterm,sigkill,sigstop] [--frameworks torch,keras]
                                 [--collectives horovod,torch] [--processes_per_worker 1,2,4]

Workers of several processes share their model by FSDP2, for the framework `loop`. With N workers, grow is N-1 to N and every other event N to N-1. `benchmarks.experiment1_peers` has other frameworks go through
the like.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain

from benchmarks.harness import Parser, Results, add_out, busy_cores, names, numbers, show_table, summarise
from benchmarks.job import ElasticJob, flags_of
from benchmarks.loops.records import traces_path
from benchmarks.models import LAYERS
from benchmarks.processes import Failed, Processes, scratch, wait_until
from benchmarks.steps import Gap, StepLogs, gap_between, split_at
from elasticdl.job.journal import PAUSE_PARTS, Entry

COLLECTIVES = ("horovod", "torch")
SIGNALS = {"sigterm": signal.SIGTERM, "sigkill": signal.SIGKILL, "sigstop": signal.SIGSTOP}
EVENTS = ("grow", *SIGNALS)
GROWING = ("grow", "rejoin")
PROGRAMS = {
    "torch": ("benchmarks.loops.library", "library"),
    "keras": ("benchmarks.loops.with_keras", "library"),
    "loop": ("benchmarks.loops.plain", "loop"),
    "lightning": ("benchmarks.loops.trainers", "lightning"),
    "transformers": ("benchmarks.loops.trainers", "transformers"),
}
SETTLED_STEPS = 5
START_SECONDS = 180.0  # to import, warm up and join, several at once
EVENT_SECONDS = 60.0
HEARTBEAT_TIMEOUT = 1.5


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """What is measured: an event, the larger number of workers, a model, with which framework, and what sums gradients."""

    event: str
    workers: int
    model: str
    framework: str
    collective: str
    processes: int = 1  # of each worker

    def __str__(self) -> str:
        fewer = self.workers - 1
        way = f"{fewer}->{self.workers}" if self.event in GROWING else f"{self.workers}->{fewer}"
        each = (f"{self.processes} processes",) if self.processes > 1 else ()
        return " ".join((self.framework, self.collective, self.model, *each, self.event, way))


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
        program = [sys.executable, "-m", *PROGRAMS[framework], "--record", "steps"]
        program += flags_of({"model": model, "folder": processes.folder})
        self.job = ElasticJob("rescale", f"1-{workers}", program, options, processes)
        self._workers = workers
        self._folder = processes.folder
        self._logs = StepLogs(processes.folder)

    def start(self) -> None:
        self.job.start()
        self._wait_for_world(0, self._workers, START_SECONDS)

    def repeat(self, event: str, number: int, settle: float, rng: random.Random) -> list[Change]:
        """Provoke the event once, and let the job grow back: two changes."""
        world = self._settle(self._workers, settle, rng)
        mark, now = self.job.journal.mark(), time.monotonic()
        if event == "grow":
            self.job.scale(1, self._workers - 1)
        else:
            os.kill(self.job.pid_of(world["members"][number % self._workers]), SIGNALS[event])
        fewer = self._wait_for_world(mark, self._workers - 1, EVENT_SECONDS)
        lost = self._collect("scale-down" if event == "grow" else event, world, fewer, mark, now)
        if event == "grow":
            fewer = self._settle(self._workers - 1, settle, rng)
            mark = self.job.journal.mark()
            self.job.scale(1, self._workers)
        return [lost, self._regrow("grow" if event == "grow" else "rejoin", fewer, mark)]

    def _regrow(self, event: str, fewer: Entry, mark: int) -> Change:
        """Wait until a newcomer has been let in; counted from when the members were told of it."""
        more = self._wait_for_world(mark, self._workers, START_SECONDS)
        told = [each for each in self.job.journal.of("change_announced") if each["world"] == more["world"] - 1]
        since = (told[-1] if told else more)["time"] - time.time() + time.monotonic()
        return self._collect(event, fewer, more, self.job.journal.entries.index(more), since)

    def _wait_for_world(self, mark: int, size: int, seconds: float) -> Entry:
        def formed(entry: Entry) -> bool:
            return entry["event"] == "world_formed" and len(entry["members"]) == size

        return self.job.journal.wait(formed, mark, seconds, f"a world of {size}")

    def _settle(self, size: int, seconds: float, rng: random.Random) -> Entry:
        """Wait until the newest world has this size and has trained for a while; then for a random part of a step."""

        def steady() -> bool:
            world = self.job.world()
            if len(world["members"]) != size or time.time() - world["time"] < seconds:
                return False
            logs, number = self._logs.read(), str(world["world"])
            own = [logs.get(self.job.pid_of(worker), []) for worker in world["members"]]
            return all(sum(step.world == number for step in steps) >= SETTLED_STEPS for steps in own)

        wait_until(steady, START_SECONDS, f"steady training with {size} workers", self.job.raise_if_over)
        world = self.job.world()
        steps = self._logs.steps[self.job.pid_of(world["members"][0])]
        time.sleep(rng.random() * (steps[-1].time - steps[-2].time))
        return world

    def _collect(self, event: str, old: Entry, new: Entry, mark: int, since: float) -> Change:
        """What the survivors report of the change from ``old`` to ``new``, and what their step logs say of it."""
        survivors = [worker for worker in old["members"] if worker in new["members"]]
        pauses = [self._pause_of(worker, new["world"], mark) for worker in survivors]
        pids = [self.job.pid_of(worker) for worker in survivors]
        world = old["world"]
        wait_until(lambda: self._logs.newest_world(pids) > world, EVENT_SECONDS, "a step after the change")
        own = [self._logs.steps[pid] for pid in pids]
        halves = [split_at(steps, since, [int(step.world) > old["world"] for step in steps]) for steps in own]
        files = [path for pid in pids if (path := traces_path(self._folder, pid)).exists()]
        traced: list[dict[str, int]] = [json.loads(path.read_text()) for path in files]
        return Change(
            event=event,
            before=len(old["members"]),
            after=len(new["members"]),
            gap=gap_between(halves, since),
            parts=tuple({part: pause[part] for part in (*PAUSE_PARTS, "total")} for pause in pauses),
            torn=max(pause["steps_torn"] for pause in pauses),
            worlds=max(pause["world"] for pause in pauses) - old["world"],
            traces={name: max(counts[name] for counts in traced) for name in (traced[0] if traced else ())},
            worlds_seen=max(len({step.world for step in steps}) for steps in own),
        )

    def _pause_of(self, worker: int, world: int, mark: int) -> Entry:
        def wanted(entry: Entry) -> object:
            return entry["event"] == "pause" and entry["worker"] == worker and entry["world"] >= world

        return self.job.journal.wait(wanted, mark, EVENT_SECONDS, f"the pause of worker {worker}")


def main() -> int:
    args = parse()
    results = Results("rescale", args.out)
    keys = itertools.product(
        args.events, args.workers, args.models, args.frameworks, args.collectives, args.processes_per_worker
    )
    measure_all(itertools.starmap(Key, keys), results, args.repetitions, args.settle, args.heartbeat_timeout)
    print(f"results: {results.path}")
    return 0


def parse() -> argparse.Namespace:
    parser = Parser("rescale", __doc__)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--workers", type=numbers, default=[2, 3, 4, 5])
    parser.add_argument("--models", type=names, default=list(LAYERS), help=",".join(LAYERS))
    parser.add_argument("--events", type=names, default=list(EVENTS), help=",".join(EVENTS))
    parser.add_argument("--frameworks", type=names, default=["torch", "keras"], help=",".join(PROGRAMS))
    parser.add_argument("--collectives", type=names, default=list(COLLECTIVES), help=",".join(COLLECTIVES))
    parser.add_argument("--processes_per_worker", type=numbers, default=[1], help="for the framework loop; 1")
    parser.add_argument("--settle", type=float, default=1.0, help="seconds of steady training before an event")
    parser.add_argument(
        "--heartbeat_timeout", type=float, default=HEARTBEAT_TIMEOUT, help="of the job in which a worker is stopped"
    )
    add_out(parser)
    args = parser.parse_args()
    known = {"events": EVENTS, "models": LAYERS, "frameworks": PROGRAMS, "collectives": COLLECTIVES}
    parser.require_known(args, **known)
    if min(args.workers) < 2:
        parser.error("--workers: at least 2, since one is taken away")
    if max(args.processes_per_worker) > 1 and (args.frameworks, args.collectives) != (["loop"], ["torch"]):
        parser.error("--processes_per_worker: give --frameworks loop --collectives torch")
    return args


def measure_all(
    keys: Iterable[Key], results: Results, repetitions: int, settle: float, heartbeat_timeout: float, **options: str
) -> None:
    """``options`` are the jobs', ``heartbeat_timeout`` is of those in which a worker is stopped."""
    changes: dict[Key, list[Change]] = defaultdict(list)
    failures: Counter[Key] = Counter()
    for key in keys:
        own = {"collective": key.collective, **options}
        if key.processes > 1:
            own["processes_per_worker"] = str(key.processes)
        if key.event == "sigstop":
            own["heartbeat_timeout"] = str(heartbeat_timeout)
        for change in measure(key, results, repetitions, settle, own):
            if change:
                changes[replace(key, event=change.event)].append(change)
            else:
                failures[key] += 1
    report(changes, failures, results)


def measure(
    key: Key, results: Results, repetitions: int, settle: float, options: dict[str, str]
) -> Iterator[Change | None]:
    """All repetitions of one event in one job; None for one that failed: then a new job goes on."""
    rng, left = random.Random(0), iter(range(repetitions))
    for first in left:
        keep = results.path.parent / f"failed-{'-'.join(map(str, asdict(key).values()))}-{time.time():.0f}"
        try:
            with scratch(keep) as processes:
                run = ElasticRun(key.framework, key.model, key.workers, processes, options)
                run.start()
                for number in itertools.chain([first], left):
                    before = busy_cores(0.2)
                    for change in run.repeat(key.event, number, settle, rng):
                        fields = {"repetition": number, "provoked": key.event, "busy_cores_before": before}
                        results.add("change", **{**asdict(key), **asdict(change)}, **fields)
                        tell(replace(key, event=change.event), number, change)
                        yield change
                run.job.stop()
        except Failed as failure:
            results.add("failure", **asdict(key), reason=str(failure))
            print(f"{key}: FAILED: {failure}", flush=True)
            yield None


def tell(key: Key, number: int, change: Change) -> None:
    pauses = ", ".join(map(_ms, change.gap.pauses))
    print(f"{key} #{number + 1}: pauses {pauses} ms, step {_ms(change.gap.ordinary)} ms", flush=True)


def report(changes: Mapping[Key, Sequence[Change]], failures: Mapping[Key, int], results: Results) -> None:
    rows, splits = [], []
    for key in sorted({*changes, *failures}, key=lambda key: (key.framework, key)):
        samples, failed = changes.get(key, ()), failures.get(key, 0)
        if not samples:
            rows.append([str(key), "0", *("-" * 9), str(failed)])
            continue
        pause = summarise(chain.from_iterable(change.gap.pauses for change in samples))
        reported = summarise(part["total"] for change in samples for part in change.parts)
        parts = {name: summarise(part[name] for change in samples for part in change.parts) for name in PAUSE_PARTS}
        step = summarise(change.gap.ordinary for change in samples)
        counts = {name: sum(getattr(change.gap, name) for change in samples) for name in ("redone", "lost")}
        counts["torn"] = sum(change.torn for change in samples)
        traces = {name: max(change.traces[name] for change in samples) for name in samples[0].traces}
        fields = {"repetitions": len(samples), "failed": failed, "pause": pause, "reported": reported, "step": step}
        fields |= {"traces": traces, "worlds_seen": max(change.worlds_seen for change in samples)}
        results.add("summary", **asdict(key), **fields, parts=parts, **counts)
        shown = [
            *map(_ms, (pause.median, pause.p95, pause.minimum, pause.maximum)),
            _ms(step.median),
            *map(str, counts.values()),
            str(max(traces.values(), default="-")),
        ]
        rows.append([str(key), str(len(samples)), *shown, str(failed)])
        splits.append([str(key), *(_ms(parts[name].median) for name in PAUSE_PARTS), _ms(reported.median)])
    columns = ["event", "n", "median", "p95", "min", "max", "step", "redone", "lost", "torn", "traces", "failed"]
    show_table("Pause of the survivors, ms (step logs, less an ordinary step)", columns, rows)
    show_table("Where it goes, ms (medians, as reported)", ["event", *PAUSE_PARTS, "total"], splits)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"


if __name__ == "__main__":
    sys.exit(main())
