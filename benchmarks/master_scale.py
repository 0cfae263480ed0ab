"""How the master bears many workers: the real master process, and simulated workers that speak its protocol.

    python -m benchmarks.master_scale [--workers 10,100,1000] [--repetitions 3]

Measures the time until every worker has the first world, the time until every survivor has the next one after a tenth
is lost at once, and the master's CPU time and memory for it.
"""

from __future__ import annotations

import argparse
import functools
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from benchmarks.harness import Parser, Results, add_out, busy_cores, numbers, show_summaries, summarise_fields
from benchmarks.processes import Failed, Processes, wait_until
from benchmarks.simulated import LOST_ONE_IN, SOCKET
from elasticdl.common.errors import ElasticDLError
from elasticdl.job.jobdir import JobDir
from elasticdl.job.spec import JobSpec

TIMEOUT = 120.0
Measured = TypeVar("Measured")


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds, and CPU seconds of the master; memory in MiB. ``steady_cpu``: cores, while only heartbeats come."""

    form: float
    form_cpu: float
    steady_cpu: float
    reform: float
    reform_cpu: float
    memory: float
    memory_grown: float  # since before the workers came


@dataclass(frozen=True, slots=True)
class Received:
    """A world as one worker got it."""

    time: float
    version: int
    size: int


def add_sizes(parser: argparse.ArgumentParser, repetitions: int) -> None:
    parser.add_argument("--workers", type=numbers, default=[10, 100, 1000], help="comma-separated (10,100,1000)")
    parser.add_argument("--repetitions", type=int, default=repetitions, help=f"of each ({repetitions})")


def repeat(
    args: argparse.Namespace, results: Results, measure: Callable[[int], Measured], told: Callable[[Measured], str]
) -> dict[int, list[Measured]]:
    """Each number of workers as often as wanted; what fails is recorded, and the rest goes on."""
    runs: dict[int, list[Measured]] = {workers: [] for workers in args.workers}
    for workers in args.workers:
        for number in range(args.repetitions):
            before = busy_cores(0.5)
            try:
                sample: Any = measure(workers)
            except (Failed, ElasticDLError) as failure:
                results.add("failure", workers=workers, repetition=number, reason=str(failure))
                print(f"{workers} workers: FAILED: {failure}", file=sys.stderr, flush=True)
                continue
            runs[workers].append(sample)
            results.add("run", workers=workers, repetition=number, busy_cores_before=before, **asdict(sample))
            print(f"{workers} workers: {told(sample)}", flush=True)
    return runs


def main() -> int:
    parser = Parser("master_scale", __doc__)
    add_sizes(parser, repetitions=3)
    parser.add_argument("--hosts", type=int, default=2, help="processes that the simulated workers share")
    parser.add_argument("--steady", type=float, default=5.0, help="seconds of nothing but heartbeats")
    parser.add_argument("--heartbeat_timeout", type=float, default=2.0)
    add_out(parser)
    args = parser.parse_args()
    if min(args.workers) < LOST_ONE_IN:
        parser.error(f"--workers: at least {LOST_ONE_IN}, since a tenth is lost")
    results = Results("master_scale", args.out)
    measured = functools.partial(measure, args=args)
    runs = repeat(args, results, measured, lambda each: f"formed in {each.form:.2f} s, again in {each.reform:.2f} s")
    report(runs, results)
    print(f"results: {results.path}")
    return 0


def measure(workers: int, args: argparse.Namespace) -> Sample:
    """Raises:
    Failed: a world did not come about.
    """
    with tempfile.TemporaryDirectory(prefix="elasticdl-bench-") as scratch, Processes(Path(scratch)) as processes:
        job = JobDir(Path(scratch) / "job")
        job.logs.mkdir(parents=True)
        survivors = workers - sum(len(range(host, workers, args.hosts)[::LOST_ONE_IN]) for host in range(args.hosts))
        given = {"num_workers": f"{survivors}-{workers}", "heartbeat_timeout": args.heartbeat_timeout}
        spec = JobSpec.model_validate({**given, "log_level": "WARNING", "command": ["simulated"]})
        job.spec.write_text(spec.to_json())
        module = "benchmarks.simulated"
        process = processes.start_module("master", module, "master", str(job.path), str(args.hosts))
        wait_until((job.path / SOCKET).exists, TIMEOUT, "the master's socket")
        master = psutil.Process(process.pid)
        logs = [Path(scratch) / f"host-{number}.worlds" for number in range(args.hosts)]
        memory, cpu = memory_of(master), cpu_of(master)
        hosts = [
            processes.start_module(f"host-{number}", module, "host", str(job.path / SOCKET), str(log))
            for number, log in enumerate(logs)
        ]
        first = wait_for_world(logs, workers, processes)
        formed, formed_cpu = time.monotonic(), cpu_of(master)
        time.sleep(args.steady)
        before_loss, steady_cpu = time.monotonic(), cpu_of(master)
        for host in hosts:
            host.send_signal(signal.SIGUSR1)
        second = wait_for_world(logs, survivors, processes, after=first[-1].version)
        return Sample(
            form=first[-1].time - min(entry.time for entry in read(logs)),
            form_cpu=formed_cpu - cpu,
            steady_cpu=(steady_cpu - formed_cpu) / (before_loss - formed),
            reform=second[-1].time - before_loss,
            reform_cpu=cpu_of(master) - steady_cpu,
            memory=memory_of(master),
            memory_grown=memory_of(master) - memory,
        )


def wait_for_world(logs: list[Path], size: int, processes: Processes, after: int = 0) -> list[Received]:
    """Wait until a world of this size has come to each of its workers; when each got it, in order of time.

    On a busy machine a smaller world may come first. ``after``: the version of an earlier world, which does not count.
    """
    found: list[Received] = []

    def complete() -> bool:
        nonlocal found
        processes.raise_if_any_failed()
        later = [entry for entry in read(logs) if entry.size == size and entry.version > after]
        last = max((entry.version for entry in later), default=0)
        found = [entry for entry in later if entry.version == last]
        return len(found) == size

    wait_until(complete, TIMEOUT, f"a world of {size} workers")
    return found


def read(logs: list[Path]) -> list[Received]:
    lines = [line for log in logs if log.exists() for line in log.read_text().splitlines(keepends=True)]
    rows = [line.split() for line in lines if line.endswith("\n")]
    return sorted((Received(float(row[0]), int(row[1]), int(row[2])) for row in rows), key=lambda entry: entry.time)


def cpu_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def memory_of(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / 2**20


def report(runs: Mapping[int, Sequence[Sample]], results: Results) -> None:
    summaries = {str(workers): summarise_fields(samples) for workers, samples in runs.items() if samples}
    for workers, each in summaries.items():
        results.add("summary", workers=int(workers), **each)
    show_summaries("The master by the number of workers; a tenth of them is lost at once", summaries, digits=3)


if __name__ == "__main__":
    sys.exit(main())
