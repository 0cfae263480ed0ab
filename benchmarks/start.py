"""How long a worker of a local job takes from being asked for to its first line and its first step, forked and plainly.

    python -m benchmarks.start --repetitions 10 --frameworks torch,keras

One job of one worker for each way of starting; in turns the worker is killed, and its replacement is measured.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.harness import Parser, Results, add_out, names, show_summaries, summarise_fields
from benchmarks.job import ElasticJob, flags_of
from benchmarks.processes import Processes, scratch, wait_until
from benchmarks.rescale import PROGRAMS
from elasticdl.job.journal import Entry

METHODS = ("fork", "spawn")
START_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds from when the worker was asked for; ``cpu``: processor time of its own until its first step."""

    first_line: float
    first_step: float
    cpu: float


def starts(framework: str, method: str, processes: Processes) -> Iterator[Start]:
    """Of a job's only worker, which is killed once it has made its first step, and of those that take its place."""
    program = [sys.executable, "-m", *PROGRAMS[framework], "--record", "start"]
    program += flags_of({"model": "1m", "samples": 1024, "folder": processes.folder})
    # Two slots: on a machine with one GPU the jobs share it, and one does not wait for the other's end.
    options = {"start_method": method, "slots": "2"}
    job = ElasticJob(f"{framework}-{method}", "1", program, options, processes)
    job.start()
    for worker in itertools.count():

        def wait(event: str, worker: int = worker) -> Entry:
            def wanted(entry: Entry) -> object:
                return entry["event"] == event and entry["worker"] == worker

            return job.journal.wait(wanted, 0, START_SECONDS, f"{event} of worker {worker}")

        asked, pid = wait("worker_launched")["time"], int(wait("worker_started")["pid"])
        path = processes.folder / f"{pid}.json"
        wait_until(path.exists, START_SECONDS, "the first step", job.raise_if_over)
        told = json.loads(path.read_text())
        yield Start(told["began"] - asked, told["stepped"] - asked, told["cpu"])
        os.kill(pid, signal.SIGKILL)


def measure_workers(framework: str, repetitions: int) -> dict[str, list[Start]]:
    with scratch() as processes:
        jobs = {method: starts(framework, method, processes) for method in METHODS}
        for each in jobs.values():
            next(each)  # takes nobody's place
        rounds = [{method: next(each) for method, each in jobs.items()} for _ in range(repetitions)]
        return {method: [each[method] for each in rounds] for method in METHODS}


def main() -> None:
    parser = Parser("start", __doc__)
    parser.add_argument("--repetitions", type=int, default=10, help="starts of each kind")
    parser.add_argument("--frameworks", type=names, default=["torch", "keras"], help="comma-separated")
    add_out(parser)
    args = parser.parse_args()
    parser.require_known(args, frameworks=PROGRAMS)
    results = Results("start", args.out)
    found = {}
    for framework in args.frameworks:
        for method, starts in measure_workers(framework, args.repetitions).items():
            summaries = found[f"{framework}, {method}"] = summarise_fields(starts)
            results.add("worker", framework=framework, method=method, seconds=summaries)
    show_summaries("a worker, seconds from being asked for (CPU: its own until the first step)", found)
    print(f"results: {results.path}")


if __name__ == "__main__":
    main()
