"""The job in the storm: its master is a process that may be killed and started again, and its workers live on meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.job import COMMAND, Journal, success_of
from benchmarks.processes import Failed, Growing, Processes, wait_until
from benchmarks.storm.lasting_master import HOSTS, Host, agents_of
from benchmarks.storm.surroundings import MASTER
from benchmarks.storm.training import BATCH, STEPS_PER_EPOCH
from benchmarks.storm.zoo import watched_softmax
from benchmarks.storm.zoo.watched_softmax import PIDS
from elasticdl.common.certificates import issue
from elasticdl.job.jobdir import JobDir, write_aside
from elasticdl.job.journal import Entry
from elasticdl.job.spec import JobSpec, WorkerRange

NAME = "storm"
PORT = 4000  # of a network namespace in which nobody else is
HEARTBEAT_TIMEOUT = 4.0
PROGRESS_TIMEOUT = 6.0
MOST_WORKERS = 5
CHECKPOINT_STEPS = 10
END_SECONDS = 120.0
NO_WORLD: Entry = {"world": 0, "members": [], "step": 0}


@dataclass(frozen=True, slots=True)
class Placed:
    """A worker that was started; ``pid`` leads its process group."""

    pid: int
    host: Host


class LastingJob:
    """Trains `watched_softmax`; all that it writes is in the folder of the processes, but for its checkpoints."""

    def __init__(
        self,
        processes: Processes,
        epochs: int,
        workers: WorkerRange,
        each: int,
        hosts: Sequence[Host],
        disk: Path,
    ) -> None:
        """``each``: processes of a worker."""
        folder, self._processes = processes.folder, processes
        self.dir = JobDir(folder / "jobs" / NAME)
        self.dir.logs.mkdir(parents=True)
        self._hosts = {host.address: host for host in hosts}
        self.losses, self.record = folder / "losses", folder / "record"
        self.losses.mkdir()
        self._pids = folder / PIDS
        self._pids.mkdir()
        self.checkpoints = disk / "checkpoints"
        self.steps = epochs * STEPS_PER_EPOCH
        self.journal = Journal(self.dir.journal, self.raise_if_over)
        self._slow = folder / "slow"
        self._address = f"{MASTER.address}:{PORT}"
        self._master: subprocess.Popen[bytes] | None = None
        self._losses: dict[int, Growing] = {}
        self._last_steps: dict[int, int] = {}  # by worker
        options = {
            "job_name": NAME,
            "num_workers": str(workers),
            "sample_record": str(self.record),
            "heartbeat_timeout": HEARTBEAT_TIMEOUT,
            "progress_timeout": PROGRESS_TIMEOUT,
        }
        module = {
            "model_zoo": str(Path(watched_softmax.__file__).parent),
            "model_def": "watched_softmax",
            "num_epochs": epochs,
            "global_batch_size": BATCH,
            "checkpoint_dir": str(self.checkpoints),
            "checkpoint_steps": CHECKPOINT_STEPS,
        }
        script = {
            "command": (sys.executable, "-m", "benchmarks.storm.in_shards", str(BATCH), str(epochs)),
            "processes_per_worker": each,
        }
        spec = JobSpec.model_validate(options | (module if each == 1 else script))
        self.dir.spec.write_text(spec.to_json())
        (self.dir.path / HOSTS).write_text(json.dumps(hosts))
        for role, files in issue(NAME, datetime.now(UTC)).items():
            files.write(self.dir.tls / role)

    # ---- the master ----

    def start_master(self) -> None:
        module = "benchmarks.storm.lasting_master"
        self._master = self._processes.start_module("master", module, str(self.dir.path), self._address)

    def kill_master(self) -> None:
        assert self._master is not None
        self._master.kill()
        self._master.wait()
        self._master = None

    def raise_if_over(self) -> None:
        if self._master is not None and (code := self._master.poll()) is not None:
            raise Failed(f"the master ended with {code}; its log: {self._processes.tail('master')}")

    def scale(self, workers: WorkerRange) -> subprocess.Popen[bytes]:
        """Begin `elasticdl scale`."""
        return self._processes.start("scale", [*COMMAND, "scale", NAME, str(workers)])

    # ---- the workers ----

    def world(self) -> Entry:
        """The newest world that was formed."""
        return (self.journal.of("world_formed") or [NO_WORLD])[-1]

    def workers(self) -> dict[int, Placed]:
        """All that were started and have not left, as far as a master has noted."""
        left = {entry["worker"] for entry in self.journal.of("worker_left")}
        started = {entry["worker"]: entry for entry in self.journal.of("worker_started")}
        found = {worker: started[worker] for worker in started.keys() - left}
        return {worker: Placed(entry["pid"], self._hosts[entry["host"]]) for worker, entry in sorted(found.items())}

    def processes_of(self, worker: int) -> list[int]:
        """Its own, and those that it has started and that have come to the script. Each leads a process group."""
        placed = self.workers().get(worker)
        if placed is None:
            return []
        return [placed.pid, *(int(file.read_text()) for file in sorted(self._pids.glob(f"{worker}.*")))]

    def holders(self) -> list[int]:
        """The members of the newest world that have made a step in it, and so hold the state."""
        world = self.world()
        return [worker for worker in world["members"] if self._last_step(worker) > world["step"]]

    def step(self) -> int:
        """The newest that a member has made."""
        return max(map(self._last_step, self.world()["members"]), default=0)

    def pace(self, seconds: float) -> None:
        """Each step takes so much longer than it would."""
        write_aside(self._slow, f"{seconds:.4f}")

    def _last_step(self, worker: int) -> int:
        losses = self._losses.setdefault(worker, Growing(self.losses / str(worker)))
        for line in losses.new_lines()[-1:]:
            self._last_steps[worker] = int(line.split()[0])
        return self._last_steps.get(worker, 0)

    # ---- the end ----

    def finish(self) -> None:
        """Have it train on as fast as it can, to its end."""
        self._slow.unlink()
        master, step = self._master, self.step()
        assert master is not None
        seconds, what = END_SECONDS + 0.1 * (self.steps - step), f"the end of the job, from step {step} of {self.steps}"
        wait_until(lambda: master.poll() is not None, seconds, what)
        if (steps := success_of(NAME, self.journal.read())["steps"]) != self.steps:
            raise Failed(f"the job was over after {steps} steps of {self.steps}")

    def close(self) -> None:
        """Kill whatever still runs."""
        if self._master is not None:
            self.kill_master()
        for file in agents_of(self.dir).glob("*.pid"):  # workers end with their agents
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(file.read_text()), signal.SIGKILL)
