"""Two workers that can't reach each other, each in a network namespace: `python -m benchmarks.faults.cut FOLDER FINDING`.

Started by `benchmarks.faults` in namespaces of its own; writes what it has found as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.faults.run import BY_NAME, Finding, failed
from benchmarks.processes import Failed, Processes, wait_until
from benchmarks.storm.job import LastingJob
from benchmarks.storm.surroundings import MASTER, Network
from elasticdl.job.journal import Entry
from elasticdl.job.spec import WorkerRange

FAULT = BY_NAME["cut_off"]
WORKERS = 3
START_SECONDS, NOTICE_SECONDS, HEAL_SECONDS = 120.0, 60.0, 60.0
EPOCHS = 250


def find(folder: Path) -> Finding:
    """Named rightly is nobody: both are at the same line as the third, whom they wait for as well.

    Raises:
        Failed: it was not noticed, or the job did not recover.
    """
    with Processes(folder) as processes:
        network = Network(WORKERS, processes)
        limits = WorkerRange(minimum=WORKERS, maximum=WORKERS)
        job = LastingJob(folder, EPOCHS, limits, network.hosts, MASTER, folder / "checkpoints")
        try:
            job.pace(0.05)
            job.start_master()
            wait_until(lambda: job.step() > 20, START_SECONDS, "some steps")
            mark, workers = job.journal.mark(), job.workers()
            one, other = (workers[number].host for number in (0, 1))
            network.cut(one, other)
            began = time.time()
            broken = job.journal.wait(lambda e: e["event"] == "world_broken", mark, NOTICE_SECONDS, "a broken world")
            network.heal(one, other)
            step = job.step()
            wait_until(lambda: job.step() > step, HEAL_SECONDS, "a step after the cut")
            return _judge(job.journal.read()[mark:], broken, broken["time"] - began)
        finally:
            job.close()


def _judge(entries: list[Entry], broken: Entry, after: float) -> Finding:
    blamed = [entry for entry in entries if entry["event"] in ("worker_stuck", "worker_left")]
    told = f"all: {broken['reason']}" if not blamed else f"{blamed[0]['event']} {blamed[0]['worker']}"
    return Finding(FAULT.name, FAULT.words, round(after, 2), not blamed, told, "world formed anew", ())


def main(folder: str, finding: str) -> int:
    try:
        found = find(Path(folder))
    except Failed as failure:
        found = failed(FAULT, failure)
    Path(finding).write_text(json.dumps(asdict(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
