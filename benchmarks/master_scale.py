"""How the master bears many workers: the real master process, and simulated workers that speak its protocol.

    python -m benchmarks.master_scale [--workers 10,100,1000] [--repetitions 3]

Measures the time until every worker has the first world, the time until every survivor has the next one after a tenth
is lost at once, and the master's CPU time and memory for it.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.harness import Parser, Results, add_out, busy_cores, numbers, show_summaries, summarise_fields
from benchmarks.job import Journal
from benchmarks.processes import Failed, Processes, scratch, wait_until
from benchmarks.simulated import BEGIN, LOSE, LOST_ONE_IN, lost
from elasticdl.common.errors import ElasticDLError
from elasticdl.job.jobdir import JobDir
from elasticdl.job.spec import JobSpec

TIMEOUT = 120.0


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


class Received(NamedTuple):
    """A world as one worker got it."""

    time: float
    version: int
    size: int


def main() -> int:
    parser = Parser("master_scale", __doc__)
    parser.add_argument("--workers", type=numbers, default=[10, 100, 1000], help="comma-separated (10,100,1000)")
    parser.add_argument("--repetitions", type=int, default=3, help="of each (3)")
    parser.add_argument("--hosts", type=int, default=2, help="processes that the simulated workers share")
    parser.add_argument("--steady", type=float, default=5.0, help="seconds of nothing but heartbeats")
    parser.add_argument("--heartbeat_timeout", type=float, default=2.0)
    add_out(parser)
    args = parser.parse_args()
    if min(args.workers) < LOST_ONE_IN:
        parser.error(f"--workers: at least {LOST_ONE_IN}, since a tenth is lost")
    results, summaries = Results("master_scale", args.out), {}
    for workers in args.workers:
        if samples := repeat(workers, args, results):
            summaries[str(workers)] = summarise_fields(samples)
            results.add("summary", workers=workers, **summaries[str(workers)])
    show_summaries("The master by the number of workers; a tenth of them is lost at once", summaries, digits=3)
    print(f"results: {results.path}")
    return 0


def repeat(workers: int, args: argparse.Namespace, results: Results) -> list[Sample]:
    """As often as wanted; what fails is recorded, and the rest goes on."""
    samples = []
    for number in range(args.repetitions):
        before = busy_cores(0.5)
        try:
            samples.append(measure(workers, args))
        except (Failed, ElasticDLError) as failure:
            results.add("failure", workers=workers, repetition=number, reason=str(failure))
            print(f"{workers} workers: FAILED: {failure}", file=sys.stderr, flush=True)
            continue
        results.add("run", workers=workers, repetition=number, busy_cores_before=before, **asdict(samples[-1]))
        print(f"{workers} workers: formed in {samples[-1].form:.2f} s, again in {samples[-1].reform:.2f} s", flush=True)
    return samples


def measure(workers: int, args: argparse.Namespace) -> Sample:
    with scratch() as processes:
        job = JobDir(processes.folder / "job")
        job.logs.mkdir(parents=True)
        survivors = workers - len(lost(workers))
        given = {"num_workers": f"{survivors}-{workers}", "heartbeat_timeout": args.heartbeat_timeout}
        spec = JobSpec.model_validate({**given, "log_level": "WARNING", "command": ["simulated"]})
        job.spec.write_text(spec.to_json())
        module, journal = "benchmarks.simulated", Journal(job.journal, processes.raise_if_any_failed)
        master = processes.start_module("master", module, "master", str(job.path))
        wait_until(job.master.exists, TIMEOUT, "the master")
        logs = [processes.folder / f"host-{number}.worlds" for number in range(args.hosts)]
        hosts = [
            processes.start_module(log.stem, module, "host", str(job.path), str(log), str(number), str(args.hosts))
            for number, log in enumerate(logs)
        ]
        wait_until(lambda: all(log.exists() for log in logs), TIMEOUT, "the simulated workers")
        process = psutil.Process(master.pid)
        memory, cpu = memory_of(process), cpu_of(process)
        master.send_signal(BEGIN)
        wait_until(lambda: len(journal.of("worker_launched")) >= workers, TIMEOUT, "that all are launched")
        for host in hosts:
            host.send_signal(BEGIN)
        first = wait_for_world(logs, workers, processes)
        formed, formed_cpu = time.monotonic(), cpu_of(process)
        time.sleep(args.steady)
        before_loss, steady_cpu = time.monotonic(), cpu_of(process)
        for each in (*hosts, master):
            each.send_signal(LOSE)
        second = wait_for_world(logs, survivors, processes, after=first[-1].version)
        return Sample(
            form=first[-1].time - read(logs)[0].time,
            form_cpu=formed_cpu - cpu,
            steady_cpu=(steady_cpu - formed_cpu) / (before_loss - formed),
            reform=second[-1].time - before_loss,
            reform_cpu=cpu_of(process) - steady_cpu,
            memory=memory_of(process),
            memory_grown=memory_of(process) - memory,
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
    """In order of time."""
    lines = [line for log in logs for line in log.read_text().splitlines(keepends=True)]
    rows = [line.split() for line in lines if line.endswith("\n")]
    return sorted(Received(float(time), int(version), int(size)) for time, version, size in rows)


def cpu_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def memory_of(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / 2**20


if __name__ == "__main__":
    sys.exit(main())
