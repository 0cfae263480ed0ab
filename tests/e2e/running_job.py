"""A job under test: real processes, real gRPC, real Horovod; disturbed through its pids, read through its journal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from elasticdl.cli.folder_job import FolderJob
from elasticdl.common.process_group import tethered
from elasticdl.job.jobdir import JobDir
from elasticdl.job.journal import Entry, read_journal
from elasticdl.job.spec import WorkerRange

REPOSITORY = Path(__file__).resolve().parents[2]
ZOO = Path(__file__).parent / "zoo"
# For jobs with Keras: their processes start in two thirds of the time.
QUICK_KERAS = {"PYTHONPATH": os.pathsep.join([str(ZOO.parent / "startup"), os.environ.get("PYTHONPATH", "")])}
ELASTICDL = [sys.executable, "-m", "elasticdl.cli"]
# Nothing should take this long, even on a busy machine; a test that waits for less would only be flaky.
DEADLINE = 120.0


def run_cli(
    home: Path, *arguments: str, timeout: float = DEADLINE, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return run([*ELASTICDL, *arguments], {"ELASTICDL_HOME": str(home), **(env or {})}, timeout)


def run(command: list[str], env: Mapping[str, str], timeout: float = DEADLINE) -> subprocess.CompletedProcess[str]:
    how = {"capture_output": True, "text": True, "cwd": REPOSITORY, "timeout": timeout}
    return subprocess.run(command, env={**os.environ, **env}, check=False, **how)


class RunningJob:
    """Waits for what the journal says and acts on workers by their ids."""

    def __init__(self, process: subprocess.Popen[str], job: JobDir, output: Path) -> None:
        self.process = process
        self.job = job
        self._output = output

    @property
    def output(self) -> str:
        return self._output.read_text()

    def entries(self, event: str | None = None) -> list[Entry]:
        if not self.job.journal.exists():
            return []
        return [entry for entry in read_journal(self.job.journal) if event in (None, entry["event"])]

    def wait_for(self, what: str, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            ended = self.process.poll()
            assert ended is None or condition(), f"the job ended with {ended} before {what}:\n{self.describe()}"
            assert time.monotonic() < deadline, f"no {what} in {DEADLINE:.0f} s:\n{self.describe()}"
            time.sleep(0.02)

    def wait_for_world(self, *, size: int, after: int = 0) -> Entry:
        """The first world of this size with a version above ``after``."""

        def formed() -> list[Entry]:
            return [w for w in self.entries("world_formed") if w["world"] > after and len(w["members"]) == size]

        self.wait_for(f"world of {size} workers after world {after}", formed)
        return formed()[0]

    def wait_for_world_without(self, worker: int) -> Entry:
        """The first world after the last one of this worker's; the worker's replacement may already be in it."""

        def formed() -> list[Entry]:
            worlds = self.entries("world_formed")
            last = max((w["world"] for w in worlds if worker in w["members"]), default=0)
            return [w for w in worlds if w["world"] > last]

        self.wait_for(f"world without worker {worker}", formed)
        return formed()[0]

    def wait_for_step(self, step: int) -> None:
        self.wait_for(f"step {step}", lambda: self.steps_recorded() >= step)

    def steps_recorded(self) -> int:
        """The newest step that any worker has committed, from the records that workers write."""
        return max((last["commit"] for path in self.record_files() if (last := last_commit(path))), default=0)

    def wait_for_rows(self, folder: Path, number: int = 3) -> None:
        """Until a script has written so many more lines to its curve."""
        made = len(read_curve(folder))
        self.wait_for(f"{number} steps", lambda: len(read_curve(folder)) >= made + number)

    def record_files(self) -> list[Path]:
        return sorted((self.job.path.parent.parent / "record").glob("*.jsonl"))

    def pid(self, worker: int) -> int:
        return next(int(e["pid"]) for e in self.entries("worker_started") if e["worker"] == worker)

    def signal(self, worker: int, number: signal.Signals, *, of_one_process: bool = False) -> None:
        """``of_one_process``: of several, the one that was started last."""
        pid = self.pid(worker)
        os.kill(max(each.pid for each in psutil.Process(pid).children()) if of_one_process else pid, number)

    def said(self) -> list[str]:
        """What all workers have printed, one after the other."""
        return [line for log in sorted(self.job.logs.glob("worker-*.log")) for line in log.read_text().splitlines()]

    def scale(self, minimum: int, maximum: int = 0) -> None:
        """As `elasticdl scale`, without the second that a command takes to start."""
        with FolderJob(self.job).master() as master:
            master.scale(WorkerRange(minimum=minimum, maximum=maximum or minimum))

    def stop(self) -> None:
        """As `elasticdl stop`, which waits for nothing here."""
        with FolderJob(self.job).master() as master:
            master.stop("the test has seen enough")

    def finish(self, timeout: float = DEADLINE) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end in {timeout:.0f} s:\n{self.describe()}") from None

    def describe(self) -> str:
        logs = [f"--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.job.logs.glob("*.log"))]
        events = "\n".join(str(entry) for entry in self.entries()[-25:])
        return "\n".join([self.output[-2000:], events, *logs])

    def processes(self) -> list[psutil.Process]:
        """Every process that was started for this job."""
        mark = str(self.job.path)
        found = []
        for process in psutil.process_iter():
            try:
                if mark in " ".join(process.cmdline()) or mark in process.environ().get("ELASTICDL_JOB_SPEC", ""):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


def last_commit(path: Path) -> Entry | None:
    """What this worker's record says last of a step that was applied."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 10_000))  # more than its last two lines
        lines = file.read().decode().splitlines(keepends=True)
    commits = [line for line in lines if line.startswith('{"commit"') and line.endswith("\n")]
    return json.loads(commits[-1]) if commits else None


def read_curve(folder: Path) -> list[tuple[float, ...]]:
    """The rows of numbers that were written in full."""
    path = folder / "curve"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [tuple(map(float, line.split())) for line in lines if line.endswith("\n")]


@contextmanager
def start(home: Path, *arguments: str, name: str = "job", **env: str) -> Iterator[RunningJob]:
    """Start `elasticdl ARGUMENTS --job_name NAME`; whatever happens, nothing of it is left afterwards."""
    home.mkdir(parents=True, exist_ok=True)
    output = home / f"{name}.out"
    head, *tail = arguments
    options = ["--job_name", name, "--sample_record", str(home / "record")] if head == "train" else ["--job_name", name]
    command = [*ELASTICDL, head, *options, *tail]
    with output.open("w") as sink:
        how = {"stdout": sink, "stderr": subprocess.STDOUT, "text": True, "cwd": REPOSITORY}
        # A test that is killed leaves no job behind.
        process = subprocess.Popen(tethered(command), env={**os.environ, "ELASTICDL_HOME": str(home), **env}, **how)
        job = RunningJob(process, JobDir(home / "jobs" / name), output)
        try:
            yield job
        finally:
            process.kill() if process.poll() is None else None
            process.wait(DEADLINE)
            deadline = time.monotonic() + DEADLINE
            while (left := job.processes()) and time.monotonic() < deadline:
                time.sleep(0.1)
            for each in left:
                each.kill()
            assert not left, f"processes were left over: {left}"
