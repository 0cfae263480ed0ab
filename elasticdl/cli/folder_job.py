"""A job in a folder of this machine. Whether a job runs, which are old, and what is left of one."""

from __future__ import annotations

import contextlib
import heapq
import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import ClassVar

from elasticdl.cli.follow import Tail
from elasticdl.cli.job_handle import AbsentError, JobHandle, Lines
from elasticdl.cli.screens import by_writer, moment, prefix
from elasticdl.common.credentials import Endpoint
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.job.facts import Facts
from elasticdl.job.jobdir import JobDir, MasterAddress, kept_states, list_jobs
from elasticdl.job.journal import parse_entry, unmarked
from elasticdl.places.base import PlaceState
from elasticdl.places.slurm import UnknownJobError, run, state_of, workers_name
from elasticdl.proto import elasticdl_pb2 as pb

LOOK_SECONDS = 3.0  # between two questions after a batch job
WAIT_SECONDS = 10.0  # for an answer to such a question: the job's own master may answer without Slurm
CANCEL_SECONDS = 20.0  # a person waits for it


class BatchJob:
    """A master's batch job on a Slurm cluster, and those of its workers. But for `ask`, all raises UnreachableError if Slurm does not
    answer."""

    def __init__(self, job: JobDir) -> None:
        self._job = job
        self._number = job.batch.read_text()
        self._workers = workers_name(job.name, self._number)
        self._asked = -math.inf
        self._answer: tuple[PlaceState | None, str] = None, ""

    def ask(self) -> tuple[PlaceState | None, str]:
        """Where the master is, and why it waits. None if there is no answer, and why. Slurm serves many: that holds for `LOOK_SECONDS`."""
        if time.monotonic() - self._asked > LOOK_SECONDS:
            self._answer = self._look()
            self._asked = time.monotonic()
        return self._answer

    def _look(self) -> tuple[PlaceState | None, str]:
        if not self._job.batch.exists():  # somebody has removed the job's folder
            return PlaceState.LOST, ""
        words = ("--noheader", "--states=all", f"--jobs={self._number}", "--format=%T|%r")
        try:
            state, _, why = run("squeue", *words, within=WAIT_SECONDS).strip().partition("|")
        except UnknownJobError:  # it ended long ago
            return PlaceState.LOST, ""
        except (UnreachableError, UserError) as error:  # nothing is wrong with the request: whatever it says will pass
            return None, str(error)
        return state_of(state), why

    def has_workers(self) -> bool:
        words = ("--noheader", "--me", "--states=PENDING,RUNNING", f"--name={self._workers}", "--format=%i")
        return bool(run("squeue", *words, within=WAIT_SECONDS).strip())

    def cancel(self) -> None:
        """End the master, if there is one, and the workers."""
        with contextlib.suppress(UnknownJobError):  # it ended long ago
            self._cancel(self._number)
        self.cancel_workers()

    def cancel_workers(self) -> None:
        """Those of a master that is gone: they would hold their places for as long as they look for the next one."""
        self._cancel("--me", f"--name={self._workers}")

    def _cancel(self, *which: str) -> None:
        try:
            run("scancel", "--quiet", *which, within=CANCEL_SECONDS)
        except UnreachableError as error:
            raise UnreachableError(f"{error}; the job may still run: try again once `squeue` answers") from None


KEPT_JOBS = 20
KEPT_STATES = 5
END_BYTES = 1 << 16  # of a journal, which have its last step
LOGS_SECONDS = 0.2  # between two looks at logs that grow
STARTING_SECONDS = 60.0  # a folder with no word of a process for longer than this belongs to a start that was cut off


class Life(Enum):
    """Where a job is in its life, judged from its files and its master's process. The value: why no master runs."""

    STARTING = "its master is starting"
    RUNNING = ""
    ENDED = "it has ended"
    LOST = "its master died without saving a final status"


def prune_jobs(keep: int = KEPT_JOBS) -> None:
    """Delete the folders of all but the newest jobs that are over, and of older ones what their trainings were stopped with, which may
    be large; running jobs do not count."""
    over = [job for job in list_jobs() if not goes_on(job)]
    for job in over[keep:]:
        shutil.rmtree(job.path, ignore_errors=True)
    for kept in (kept for job in over[KEPT_STATES:keep] for kept in kept_states(job.path)):
        kept.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class FolderJob(JobHandle):
    """Of a job whose master runs on this machine, or has run there."""

    folder: JobDir
    master_returns: ClassVar = False
    look_seconds: ClassVar = 0.1

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def whereabouts(self) -> str:
        return f"files: {self.folder.path}"

    def spec_text(self) -> str:
        return self.folder.spec.read_text()

    def status_text(self) -> str:
        """That with which the job ended; none if it runs, or was killed before it could write it."""
        try:
            return self.folder.status.read_text()
        except FileNotFoundError:
            return ""

    def look(self, master: MasterAddress | None) -> tuple[Life, str]:
        """``master``: as its file was just read. With what else is known of why no master runs."""
        job = self.folder
        if job.status.exists():
            return Life.ENDED, ""
        if master is not None:
            return (Life.RUNNING if master.is_alive() else Life.LOST), ""
        if (starter := MasterAddress.read(job.starter)) is not None:  # its check may take long
            return (Life.STARTING if starter.is_alive() else Life.LOST), ""
        try:
            age = time.time() - job.path.stat().st_mtime
        except FileNotFoundError:
            return Life.LOST, ""
        return (Life.STARTING if age < STARTING_SECONDS else Life.LOST), ""

    def life(self) -> Life:
        return self.look(MasterAddress.read(self.folder.master))[0]

    def over(self) -> str:
        life = self.life()
        return str(life.value) if life in (Life.ENDED, Life.LOST) else ""

    def last_known(self) -> tuple[int, float]:
        """By the first entry of its journal and the newest: a long one is not read as a whole."""
        lines: list[bytes] = []
        with contextlib.suppress(OSError), self.folder.journal.open("rb") as file:
            lines.append(file.readline())
            file.seek(max(file.tell(), file.seek(0, os.SEEK_END) - END_BYTES))
            lines += file
        told = Facts(self.name).read(line.decode(errors="replace") for line in lines)
        return told.step, told.until - told.began

    @contextmanager
    def reach(self) -> Iterator[Endpoint]:
        master = MasterAddress.read(self.folder.master)
        life, why = self.look(master)
        if life is not Life.RUNNING or master is None:
            raise AbsentError(why or str(life.value) or "its master is not there")
        yield master.endpoint

    def entries(self, since: int = 0) -> Iterator[str]:
        return Tail(self.folder.journal).lines()

    def earlier_entries(self) -> Iterator[str]:
        return Tail(self.folder.earlier).lines()

    def logs(self, worker: int | None, *, follow: bool) -> Lines:
        """Logs that appear later are taken up."""
        logs = LocalLogs(self.folder, worker)
        if worker is not None and not follow and not logs.files():
            known = ", ".join(by_writer({path.stem for path in self.folder.logs.glob("*.log")}))
            raise UserError(f"job {self.name} has no worker {worker}; it has logs of {known or 'nobody'}")
        is_last = False
        while not is_last:
            is_last = not follow or bool(self.over())  # asked first: what came meanwhile is read once more
            yield from logs.look()
            if not is_last:
                time.sleep(LOGS_SECONDS)
        yield from logs.rest()

    def where_logs(self) -> str:
        return str(self.folder.logs)


@dataclass(frozen=True, slots=True)
class SlurmJob(FolderJob):
    """Of a job whose master is a batch job: its folder is shared by all nodes."""

    batch: BatchJob
    master_returns: ClassVar = True
    look_seconds: ClassVar = 3.0

    def stop_without_master(self, *, now: bool) -> str:
        life = self.life()
        if life is Life.LOST and self.batch.has_workers():
            self.batch.cancel_workers()
            return "is lost, as its master died: its workers are ended, and the same command begins anew"
        step, age = self.last_known()
        if life is not Life.STARTING or (step and not now):  # without a master, what is trained would not be kept
            return ""
        self.batch.cancel()
        status = pb.JobStatus(job_name=self.name, phase="stopped", reason="elasticdl stop", step=step, elapsed=age)
        status.time_left = -1
        self.folder.write_status(status)
        return f"stopped at step {step}" if step else "stopped before it had begun"

    def look(self, master: MasterAddress | None) -> tuple[Life, str]:
        up = Life.RUNNING if master else Life.STARTING
        has_ended = self.folder.status.exists()
        if has_ended and up is Life.STARTING:
            return Life.ENDED, ""
        stage, why = self.batch.ask()
        if has_ended:  # its master may still close its places
            return (Life.RUNNING if stage in (PlaceState.READY, PlaceState.ENDING) else Life.ENDED), ""
        if stage is None:  # it is as it was when it was last seen; the master itself may answer all the same
            return up, "" if up is Life.RUNNING else why
        if stage is PlaceState.WAITING:
            return Life.STARTING, f"its master waits in Slurm's queue{'' if why == 'None' else f': {why}'}"
        return Life.LOST if stage is PlaceState.LOST else up, ""


def handle_of(job: JobDir) -> FolderJob:
    return SlurmJob(job, BatchJob(job)) if job.batch.exists() else FolderJob(job)


def goes_on(job: JobDir) -> bool:
    """One that can't be looked at, as another user's, counts: nothing of it is deleted, and it hides no other."""
    try:
        return not handle_of(job).over()
    except OSError:
        return True


# The logs of a job of this machine as one: its master's and its workers' lines, in the order of time.
#
# Few of the lines that workers print begin with a time. Of the others it is known after which mark they were written
# (`elasticdl.job.journal`), or that their worker had been started.


SUFFIXES = (".out", ".log")  # of two lines of the same time the one on stdout first
STARTED = "worker_started"
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]?\d*")


class LocalLogs:
    """``worker``: only this one's lines, as it wrote them."""

    def __init__(self, job: JobDir, worker: int | None) -> None:
        self._folder = job.logs
        self._only = None if worker is None else job.worker_log(worker).stem
        self._journal = Tail(job.journal)
        self._started: dict[str, str] = {}  # when, by the name of the worker's log
        self._files: dict[Path, _LogFile] = {}

    def look(self) -> Iterator[str]:
        """Whole lines that have come since the last look."""
        for entry in (parse_entry(line) for line in self._journal.lines() if STARTED in line):
            if entry and entry["event"] == STARTED:
                self._started[f"worker-{entry['worker']}"] = moment(entry["time"])
        dated = ([*file.dated_lines(self._started.get(file.writer, ""))] for file in self.files())
        yield from (line for _, line in heapq.merge(*dated, key=lambda item: item[0]))

    def rest(self) -> Iterator[str]:
        """Last lines that are not finished."""
        return (file.start + rest for file in self._files.values() if (rest := file.rest()))

    def files(self) -> list[_LogFile]:
        """That there are."""
        try:
            there = {self._folder / name for name in os.listdir(self._folder)}
        except FileNotFoundError:  # somebody has removed the folder, perhaps with the job
            return []
        writers = [self._only] if self._only else by_writer({path.stem for path in there if path.suffix == ".log"})
        paths = [self._folder / f"{writer}{suffix}" for writer in writers for suffix in SUFFIXES]
        for path in paths:
            if path in there and path not in self._files:
                self._files[path] = _LogFile(path, "" if self._only else prefix(path.stem))
        return [self._files[path] for path in paths if path in there]


class _LogFile(Tail):
    """``start``: of each line that is shown."""

    def __init__(self, path: Path, start: str) -> None:
        super().__init__(path)
        self.writer, self.start = path.stem, start
        self._last = ""  # when the last line was written
        self._entered = ""  # when its worker entered the newest world

    def dated_lines(self, started: str) -> Iterator[tuple[str, str]]:
        """With the time that a line begins with, if it was written then: since its worker has entered its world, or was ``started``.
        Else with the first moment that it may be."""
        now = moment(time.time())
        for text, mark in map(unmarked, self.lines()):
            if text is not None:
                found, earliest = _TIMESTAMP.match(text), self._entered or started
                told = found[0].replace("T", " ").replace(",", ".") if found else ""
                self._last = max(self._last, told if earliest <= told <= now else earliest)
                yield self._last, self.start + text
            self._entered = mark.when if mark else self._entered
