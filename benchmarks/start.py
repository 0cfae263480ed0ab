"""How long a worker of a local job takes from being asked for to its first line and its first step, forked and plainly.

    python -m benchmarks.start --repetitions 10 --frameworks torch,keras

One job of one worker for each way of starting; in turns the worker is killed, and its replacement is measured. Then whole
jobs of ten epochs on digits: from typing `elasticdl train` to the first world, and to the end.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Parser, Results, add_out, names, show_summaries, summarise_fields
from benchmarks.job import COMMAND, ElasticJob, flags_of
from benchmarks.processes import ROOT, Failed, Processes, scratch, wait_until
from benchmarks.rescale import PROGRAMS
from elasticdl.common.tether import tethered
from elasticdl.job.jobdir import JobDir
from elasticdl.job.journal import Entry, read_journal

METHODS = ("fork", "spawn")
START_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds from when the worker was asked for; ``cpu``: processor time of its own until its first step."""

    first_line: float
    first_step: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Job:
    """Seconds from typing to the first world, in which steps follow at once, and to the end; processor time of it all."""

    first_world: float
    end: float
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


def measure_digits(method: str) -> Job:
    with tempfile.TemporaryDirectory(prefix="elasticdl-bench-") as home:
        options = {"model_zoo": ROOT / "model_zoo", "model_def": "digits.cnn_torch", "num_epochs": 10}
        options |= {"job_name": "digits", "start_method": method}
        env = {**os.environ, "ELASTICDL_HOME": home}
        began, cpu = time.time(), _cpu_of_children()
        command = tethered([*COMMAND, "train", *flags_of(options)])
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        ended = time.time()
        if done.returncode:
            raise Failed(done.stdout + done.stderr)
        entries = read_journal(JobDir(Path(home) / "jobs" / "digits").journal)
        ready = next(entry["time"] for entry in entries if entry["event"] == "collective")
        return Job(ready - began, ended - began, _cpu_of_children() - cpu)


def _cpu_of_children() -> float:
    """Of all that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = Parser("start", __doc__)
    parser.add_argument("--repetitions", type=int, default=10, help="starts of each kind")
    parser.add_argument("--frameworks", type=names, default=["torch", "keras"], help="comma-separated")
    parser.add_argument("--jobs", type=int, default=5, help="whole jobs of each kind")
    add_out(parser)
    args = parser.parse_args()
    parser.require_known(args, frameworks=PROGRAMS)
    results = Results("start", args.out)
    found = {}
    for framework in args.frameworks if args.repetitions else ():
        for method, starts in measure_workers(framework, args.repetitions).items():
            summaries = found[f"{framework}, {method}"] = summarise_fields(starts)
            results.add("worker", framework=framework, method=method, seconds=summaries)
    show_summaries("a worker, seconds from being asked for (CPU: its own until the first step)", found)
    jobs = [{method: measure_digits(method) for method in METHODS} for _ in range(args.jobs)]
    found = {method: summarise_fields([each[method] for each in jobs]) for method in METHODS if jobs}
    for method, summaries in found.items():
        results.add("job", method=method, seconds=summaries)
    show_summaries("10 epochs on digits, seconds from typing", found)
    print(f"results: {results.path}")


if __name__ == "__main__":
    main()
