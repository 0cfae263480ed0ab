"""A job's home on this machine: its folder. Whether a job runs, which are old, and what is left of one."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import ClassVar

from google.protobuf import json_format

from elasticdl.cli.follow import SeenFeed
from elasticdl.cli.home import JournalFeed, Lines
from elasticdl.cli.local import batch_master
from elasticdl.cli.local.batch_master import MasterState
from elasticdl.cli.local.local_logs import LocalLogs
from elasticdl.cli.local.tail import Tail
from elasticdl.cli.wording import by_writer
from elasticdl.common.credentials import Endpoint
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.job.jobdir import JobDir, list_jobs, write_aside
from elasticdl.job.journal import parse_entry
from elasticdl.places.slurm_commands import Stage
from elasticdl.proto import elasticdl_pb2 as pb

KEPT_JOBS = 20
KEPT_STATES = 5
FEED_BYTES = 4_000_000  # of a journal that are read at once
END_BYTES = 1 << 16  # of a journal, which have its last step
MOST_STEPS = 2**63
LOGS_SECONDS = 0.2  # between two looks at logs that grow
STARTING_SECONDS = 60.0  # a folder without a master for longer than this belongs to a start that was cut off


class Life(Enum):
    """Where a job is in its life, judged from its files and its master's process."""

    STARTING = "starting"  # its folder is there, its master not yet
    RUNNING = "running"
    ENDED = "ended"  # its last status has been written
    LOST = "lost"  # its master is gone without having said how the job ended


_OVER = {Life.ENDED: "it has ended", Life.LOST: "its master died without saving a final status"}


def life_of(job: JobDir) -> Life:
    if job.batch.exists():
        return _life_in_batch(job, MasterState(job))[0]
    if job.status.exists():
        return Life.ENDED
    master = job.read_master()
    if master is not None:
        return Life.RUNNING if master.is_alive() else Life.LOST
    try:
        age = time.time() - job.path.stat().st_mtime
    except FileNotFoundError:
        return Life.LOST
    return Life.STARTING if age < STARTING_SECONDS else Life.LOST


def _life_in_batch(job: JobDir, batch: MasterState) -> tuple[Life, str]:
    """With why no master runs at the moment, of one that starts."""
    is_up, has_ended = job.master.exists(), job.status.exists()
    if has_ended and not is_up:
        return Life.ENDED, ""
    try:
        stage, why = batch.ask()
    except (
        UnreachableError
    ) as error:  # it is as it was when it was last seen; the master itself may answer all the same
        if has_ended:
            return Life.ENDED, ""
        return (Life.RUNNING, "") if is_up else (Life.STARTING, str(error))
    if has_ended:  # its master may still close its places
        return (Life.RUNNING if stage in (Stage.RUNNING, Stage.ENDING) else Life.ENDED), ""
    if stage in (Stage.WAITING, Stage.HALTED):
        return Life.STARTING, f"its master waits in Slurm's queue{'' if why == 'None' else f': {why}'}"
    if stage is Stage.OVER:
        return Life.LOST, ""
    return (Life.RUNNING, "") if is_up else (Life.STARTING, "its master is starting")


def goes_on(job: JobDir) -> bool:
    return life_of(job) in (Life.STARTING, Life.RUNNING)


def prune_jobs(keep: int = KEPT_JOBS) -> None:
    """Delete the folders of all but the newest jobs that are over, and of older ones what their trainings were stopped with, which may
    be large; running jobs do not count."""
    over = [job for job in list_jobs() if not goes_on(job)]
    for job in over[keep:]:
        shutil.rmtree(job.path, ignore_errors=True)
    for kept in (kept for job in over[KEPT_STATES:keep] for kept in job.kept_states()):
        kept.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class FolderHome:
    """See `elasticdl.cli.home.Home`."""

    folder: JobDir
    namespace: ClassVar = ""
    flags: ClassVar = ""
    master_returns: ClassVar = False
    look_seconds: ClassVar = 0.1

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def whereabouts(self) -> str:
        return f"files: {self.folder.path}"

    def spec(self) -> str:
        return self.folder.spec.read_text()

    def kept_status(self) -> pb.JobStatus | None:
        """That with which the job ended; None if it runs, or was killed before it could write it."""
        try:
            return json_format.Parse(self.folder.status.read_text(), pb.JobStatus(), ignore_unknown_fields=True)
        except FileNotFoundError:
            return None

    def stop_without_master(self, *, now: bool) -> str:
        return ""

    def life(self) -> Life:
        return life_of(self.folder)

    def over(self) -> str:
        return _OVER.get(self.life(), "")

    def absence(self) -> str:
        life = self.life()
        return "its master is starting" if life is Life.STARTING else _OVER.get(life, "")

    def last_known(self) -> tuple[int, float]:
        """As its journal tells it; of a long one only the end is read."""
        try:
            with self.folder.journal.open("rb") as file:
                first = parse_entry(file.readline().decode(errors="replace"))
                file.seek(max(0, file.seek(0, os.SEEK_END) - END_BYTES))
                entries = [entry for line in file if (entry := parse_entry(line.decode(errors="replace"))) is not None]
        except OSError:
            return 0, 0.0
        steps = [step for entry in entries if type(step := entry.get("step")) is int and 0 <= step < MOST_STEPS]
        age = entries[-1]["time"] - first["time"] if first and entries else 0.0
        return (steps[-1] if steps else 0), max(0.0, age)

    @contextmanager
    def reach(self) -> Iterator[Endpoint]:
        address = self.folder.read_master()
        if address is None:
            raise UnreachableError("its master is not there")
        yield address.endpoint

    def journal(self) -> Lines:
        tail = Tail(self.folder.journal)
        while lines := tail.lines(FEED_BYTES):  # in parts, as a long job's takes much room
            yield from lines

    def feed(self) -> JournalFeed:
        return FileFeed(self.folder.journal)

    def logs(self, worker: int | None, *, follow: bool) -> Lines:
        """Logs that appear later are taken up."""
        logs = LocalLogs(self.folder, worker)
        if worker is not None and not follow and not logs.exist():
            known = ", ".join(by_writer({path.stem for path in self.folder.logs.glob("*.log")}))
            raise UserError(f"job {self.name} has no worker {worker}; it has logs of {known}")
        is_last = False
        while not is_last:
            is_last = not follow or bool(self.over())  # asked first: what came meanwhile is read once more
            yield from logs.look()
            if not is_last:
                time.sleep(LOGS_SECONDS)
        yield from logs.rest()


@dataclass(frozen=True, slots=True)
class BatchHome(FolderHome):
    """Of a job whose master is a batch job: its folder is shared by all nodes."""

    batch: MasterState
    master_returns: ClassVar = True
    look_seconds: ClassVar = 3.0

    def feed(self) -> JournalFeed:
        """The next master goes on with the journal from where the last one has saved it."""
        feed = FileFeed(self.folder.journal)
        return SeenFeed(feed, lambda: feed.read()[1])

    def stop_without_master(self, *, now: bool) -> str:
        life, number = self.life(), self.folder.batch.read_text()
        if life is Life.LOST and batch_master.has_workers(self.name, number):
            batch_master.cancel_workers(self.name, number)
            return "is lost, as its master died: its workers are ended, and the same command begins anew"
        step, age = self.last_known()
        if life is not Life.STARTING or (step and not now):  # without a master, what is trained would not be kept
            return ""
        batch_master.cancel(self.name, number)
        status = pb.JobStatus(job_name=self.name, phase="stopped", reason="elasticdl stop", step=step, elapsed=age)
        status.time_left = -1
        write_aside(self.folder.status, json_format.MessageToJson(status, preserving_proto_field_name=True))
        return f"stopped at step {step}" if step else "stopped before it had begun"

    def life(self) -> Life:
        return _life_in_batch(self.folder, self.batch)[0]

    def absence(self) -> str:
        life, why = _life_in_batch(self.folder, self.batch)
        return _OVER.get(life, why)


def home_of(job: JobDir) -> FolderHome:
    return BatchHome(job, MasterState(job)) if job.batch.exists() else FolderHome(job)


class FileFeed:
    """A journal as it grows. See `elasticdl.cli.home.JournalFeed`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._tail = Tail(path)
        self.is_complete = False

    def read(self) -> tuple[bool, list[str]]:
        try:
            about = self._path.stat()
            inode = about.st_ino  # which another file may be given once this one is gone
            anew = inode != self._inode or about.st_size < self._tail.position  # another job has taken its name
            tail = Tail(self._path) if anew else self._tail
            lines = tail.lines(FEED_BYTES)
        except OSError:
            return False, []
        self._inode, self._tail = inode, tail
        return anew, lines

    def finish(self) -> None:
        self.is_complete = True

    def close(self) -> None:
        """Nothing is open."""
