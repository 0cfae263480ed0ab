"""Jobs of this machine: which one is meant, whether it runs, which are old, and one as the commands see any job."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from google.protobuf import json_format

from elasticdl.cli.job_handle import JournalFeed, Lines, choose, described, wait_for_end
from elasticdl.cli.local.local_logs import LocalLogs
from elasticdl.cli.local.tail import Tail
from elasticdl.cli.master_client import MasterClient, connect
from elasticdl.cli.wording import by_writer
from elasticdl.common.errors import UserError
from elasticdl.job.jobdir import JobDir, list_jobs
from elasticdl.job.journal import parse_entry
from elasticdl.job.spec import JobSpec
from elasticdl.proto import elasticdl_pb2 as pb

KEPT_JOBS = 20
KEPT_STATES = 5
POLL = 0.05
FEED_BYTES = 4_000_000  # of a journal that are read at once
END_BYTES = 1 << 16  # of a journal, which have its last step
MOST_STEPS = 2**63
LOOK_SECONDS = 0.2  # between two looks at a file that grows
STARTING_SECONDS = 60.0  # a folder without a master for longer than this belongs to a start that was cut off


class Life(Enum):
    """Where a job is in its life, judged from its files and its master's process."""

    STARTING = "starting"  # its folder is there, its master not yet
    RUNNING = "running"
    ENDED = "ended"  # its last status has been written
    LOST = "lost"  # its master is gone without having said how the job ended


def life_of(job: JobDir) -> Life:
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


def last_status(job: JobDir) -> pb.JobStatus | None:
    """The status with which the job ended; None if it runs, or was killed before it could write it."""
    try:
        return json_format.Parse(job.status.read_text(), pb.JobStatus(), ignore_unknown_fields=True)
    except FileNotFoundError:
        return None


def last_known(journal: Path) -> tuple[int, float]:
    """The step that a job was at, and its age in seconds, when its journal ended; of a long journal only the end is read."""
    try:
        with journal.open("rb") as file:
            first = parse_entry(file.readline().decode(errors="replace"))
            file.seek(max(0, file.seek(0, os.SEEK_END) - END_BYTES))
            entries = [entry for line in file if (entry := parse_entry(line.decode(errors="replace"))) is not None]
    except OSError:
        return 0, 0.0
    steps = [step for entry in entries if type(step := entry.get("step")) is int and 0 <= step < MOST_STEPS]
    age = entries[-1]["time"] - first["time"] if first and entries else 0.0
    return (steps[-1] if steps else 0), max(0.0, age)


def find_job(name: str | None) -> JobDir:
    """The job of that name; without a name the only one that runs.

    Raises:
        UserError: there is none, or which one is meant is not clear.
    """
    jobs = {job.name: job for job in list_jobs()}
    newest = f" (newest jobs: {', '.join(list(jobs)[:8])})" if jobs else " (there are none on this machine)"
    return jobs[choose(name, jobs, [each for each, job in jobs.items() if _goes_on(job)], hint=newest)]


def _goes_on(job: JobDir) -> bool:
    return life_of(job) in (Life.STARTING, Life.RUNNING)


def prune_jobs(keep: int = KEPT_JOBS) -> None:
    """Delete the folders of all but the newest jobs that are over, and of older ones what their trainings were stopped with, which may
    be large; running jobs do not count."""
    over = [job for job in list_jobs() if not _goes_on(job)]
    for job in over[keep:]:
        shutil.rmtree(job.path, ignore_errors=True)
    for kept in (kept for job in over[KEPT_STATES:keep] for kept in job.kept_states()):
        kept.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class LocalJob:
    """See `elasticdl.cli.job_handle.JobHandle`."""

    folder: JobDir

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def namespace(self) -> str:
        return ""

    @property
    def whereabouts(self) -> str:
        return f"files: {self.folder.path}"

    def spec(self) -> JobSpec:
        return JobSpec.from_json(self.folder.spec.read_text())

    def status(self) -> pb.JobStatus:
        ended = last_status(self.folder)
        if ended is not None:
            return ended
        life = life_of(self.folder)
        if life is Life.RUNNING:
            with self.master() as client:
                return client.status()
        if life is Life.STARTING:
            return described(self.name, life.value, "its master is starting")
        status = described(self.name, life.value, "its master is gone without a word")
        status.step, status.elapsed = last_known(self.folder.journal)
        return status

    @contextmanager
    def master(self) -> Iterator[MasterClient]:
        address, life = self.folder.read_master(), life_of(self.folder)
        if address is None or life is not Life.RUNNING:
            ended = last_status(self.folder)
            lost = "its master has not started" if life is Life.STARTING else "it is lost"
            raise UserError(f"job {self.name} is not running: {f'it has {ended.phase}' if ended else lost}")
        with connect(address.endpoint) as client:
            yield client

    def feed(self) -> JournalFeed:
        return FileFeed(self.folder.journal)

    def journal(self, *, follow: bool) -> Lines:
        tail = Tail(self.folder.journal)

        def look() -> Iterator[str]:
            while lines := tail.lines(FEED_BYTES):  # in parts, as a long job's takes much room
                yield from lines

        yield from followed(look, lambda: follow and _goes_on(self.folder))

    def logs(self, worker: int | None, *, follow: bool) -> Lines:
        """Logs that appear later are taken up."""
        logs = LocalLogs(self.folder, worker)
        if worker is not None and not follow and not logs.exist():
            known = ", ".join(by_writer({path.stem for path in self.folder.logs.glob("*.log")}))
            raise UserError(f"job {self.name} has no worker {worker}; it has logs of {known}")
        yield from followed(logs.look, lambda: follow and _goes_on(self.folder))
        yield from logs.rest()

    def wait_until_over(self, timeout: float) -> pb.JobStatus | None:
        address = self.folder.read_master()
        wait_for_end(
            self.name, lambda: not (address and address.is_alive()) or self.folder.status.exists(), timeout, POLL
        )
        return last_status(self.folder)


class FileFeed:
    """A journal as it grows. See `elasticdl.cli.job_handle.JournalFeed`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._tail = Tail(path)

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

    def close(self) -> None:
        """Nothing is open."""


def followed(look: Callable[[], Iterable[str]], may_grow: Callable[[], bool]) -> Iterator[str]:
    """All that ``look`` finds, until nothing more can come."""
    more = True
    while more:
        more = may_grow()  # asked first: what came meanwhile is read once more
        yield from look()
        if more:
            time.sleep(LOOK_SECONDS)
