"""elasticdl itself through the port of its peers: `elasticdl run` on this machine.

A worker that leaves or is killed has its machine go with it, as at the peers. So once the master has noticed the signal,
the job's maximum is lowered by one; otherwise it would replace the worker at once, and one leaving would be measured
together with one joining. What it has begun of a replacement by then it ends, and nothing is told to the survivors. The
master, like torchrun's store and torchft's lighthouse, is on no machine that goes.
"""

from __future__ import annotations

import os
import signal
import sys

from benchmarks.harness import versions
from benchmarks.job import ElasticJob, JobSettings
from benchmarks.processes import Processes
from elasticdl.job.journal import Entry

SAMPLES = 65536
NOTICE_SECONDS = 30.0
NOTICED = ("worker_draining", "worker_left")


class ElasticDl:
    """See `benchmarks.peers.port.Peer`."""

    def __init__(self) -> None:
        self._job: ElasticJob | None = None
        self._size = 0

    def missing(self) -> str | None:
        return None if versions(("horovod",)) else "horovod"

    def versions(self) -> dict[str, str]:
        return versions(("elasticdl", "horovod", "torch"))

    def start(self, model: str, workers: int, processes: Processes) -> None:
        self._size = workers
        program = [sys.executable, "-m", "benchmarks.loops.elastic_steps", "--model", model]
        program += ["--samples", str(SAMPLES), "--folder", str(processes.folder)]
        self._job = ElasticJob("peers", JobSettings(f"1-{workers}", program, {}), processes)
        self._job.start()

    def add(self) -> None:
        self._scale_by(1)

    def remove(self, number: signal.Signals, pids: set[int]) -> int:
        """The newest worker goes, as at the peers."""
        assert self._job is not None
        journal = self._job.journal
        started = {
            int(entry["worker"]): int(entry["pid"]) for entry in journal.read() if entry["event"] == "worker_started"
        }
        worker = max(worker for worker, pid in started.items() if pid in pids)
        mark = journal.mark()
        os.kill(started[worker], number)

        def noticed(entry: Entry) -> bool:
            return entry["event"] in NOTICED and bool(entry["worker"] == worker)

        journal.wait(noticed, mark, NOTICE_SECONDS, f"the master's notice of worker {worker}'s {number.name}")
        self._scale_by(-1)
        return started[worker]

    def _scale_by(self, workers: int) -> None:
        assert self._job is not None
        self._size += workers
        self._job.scale(1, self._size)
