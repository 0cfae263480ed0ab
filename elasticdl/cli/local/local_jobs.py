"""Jobs of this machine: which one is meant, whether it runs, which are old, and one as the commands see any job."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from google.protobuf import json_format

from elasticdl.cli.job_handle import not_ended
from elasticdl.cli.line_streams import FileLines, LineStream, by_writer, merged, prefix
from elasticdl.cli.master_client import MasterClient, connect
from elasticdl.cli.parsing import did_you_mean
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.common.jobdir import JobDir, MasterAddress, list_jobs
from elasticdl.common.spec import JobSpec
from elasticdl.proto import elasticdl_pb2 as pb

KEPT_JOBS = 20
POLL = 0.05
STARTING_SECONDS = 60.0  # a folder without a master for longer than this belongs to a start that was cut off


class Life(Enum):
    """Where a job is in its life, judged from its files and its master's process."""

    STARTING = "starting"  # its folder is there, its master not yet
    RUNNING = "running"
    ENDED = "ended"  # its last status has been written
    LOST = "lost"  # its master is gone without having said how the job ended


def life_of(job: JobDir, now: float) -> Life:
    """``now`` in seconds since the epoch."""
    if job.status.exists():
        return Life.ENDED
    master = job.read_master()
    if master is not None:
        return Life.RUNNING if master.is_alive() else Life.LOST
    try:
        age = now - job.path.stat().st_mtime
    except FileNotFoundError:
        return Life.LOST
    return Life.STARTING if age < STARTING_SECONDS else Life.LOST


def last_status(job: JobDir) -> pb.JobStatus | None:
    """The status with which the job ended; None if it runs, or was killed before it could write it."""
    try:
        return json_format.Parse(job.status.read_text(), pb.JobStatus(), ignore_unknown_fields=True)
    except FileNotFoundError:
        return None


def find_job(name: str | None) -> JobDir:
    """The job of that name; without a name the only one that runs.

    Raises:
        UserError: there is none, or which one is meant is not clear.
    """
    jobs = list_jobs()
    if name is not None:
        for job in jobs:
            if job.name == name:
                return job
        near = did_you_mean(name, [job.name for job in jobs])
        raise UserError(f"there is no job {name}{f': {near}' if near else ''}{_list_of(jobs)}")
    running = [job for job in jobs if life_of(job, time.time()) in (Life.STARTING, Life.RUNNING)]
    if len(running) == 1:
        return running[0]
    if running:
        raise UserError(f"{len(running)} jobs are running, so name one: {', '.join(job.name for job in running)}")
    raise UserError(f"no job is running; name one to look at an old one{_list_of(jobs)}")


def _list_of(jobs: list[JobDir]) -> str:
    return f" (newest jobs: {', '.join(job.name for job in jobs[:8])})" if jobs else " (there are none on this machine)"


def running_master(job: JobDir) -> MasterAddress:
    """Where the master of a running job is.

    Raises:
        UserError: the job does not run (any more).
    """
    master = job.read_master()
    life = life_of(job, time.time())
    if master is None or life is not Life.RUNNING:
        ended = last_status(job)
        how = (
            f"it has {ended.phase}"
            if ended
            else "its master has not started"
            if life is Life.STARTING
            else "it is lost"
        )
        raise UserError(f"job {job.name} is not running: {how}")
    return master


def prune_jobs(keep: int = KEPT_JOBS) -> None:
    """Delete the folders of all but the newest jobs that are over; running jobs do not count."""
    now = time.time()
    over = [job for job in list_jobs() if life_of(job, now) in (Life.ENDED, Life.LOST)]
    for job in over[keep:]:
        shutil.rmtree(job.path, ignore_errors=True)


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
        life = life_of(self.folder, time.time())
        address = self.folder.read_master()
        if life is Life.RUNNING and address is not None:
            with connect(address) as client:
                return client.status()
        reason = "its master is gone without a word" if life is Life.LOST else "its master is starting"
        return pb.JobStatus(job_name=self.name, phase=life.value, reason=reason, time_left=-1)

    @contextmanager
    def master(self) -> Iterator[MasterClient]:
        with connect(running_master(self.folder)) as client:
            yield client

    @contextmanager
    def journal(self, *, follow: bool) -> Iterator[LineStream]:
        yield FileLines(self.folder.journal, lambda: follow and self._goes_on())

    @contextmanager
    def logs(self, worker: int | None, *, follow: bool) -> Iterator[LineStream]:
        if worker is not None and not follow and not self.folder.worker_log(worker).exists():
            names = ", ".join(_writers(self.folder))
            raise UserError(f"job {self.name} has no worker {worker}; it has logs of {names}")
        yield _Logs(self.folder, worker, lambda: follow and self._goes_on())

    def wait_until_over(self, timeout: float) -> pb.JobStatus | None:
        deadline, address = time.monotonic() + timeout, self.folder.read_master()
        while address and address.is_alive() and not self.folder.status.exists():
            if time.monotonic() > deadline:
                raise UnreachableError(not_ended(self.name, timeout))
            time.sleep(POLL)
        return last_status(self.folder)

    def _goes_on(self) -> bool:
        return life_of(self.folder, time.time()) in (Life.STARTING, Life.RUNNING)


class _Logs:
    """All logs of a job, or one worker's; logs that appear later are taken up. See `LineStream`."""

    def __init__(self, job: JobDir, worker: int | None, grows: Callable[[], bool]) -> None:
        self._job = job
        self._only = None if worker is None else job.worker_log(worker).stem
        self._grows = grows
        self._tails: dict[str, FileLines] = {}

    def lines(self) -> list[str]:
        names = [self._only] if self._only else _writers(self._job)
        for name in names:
            self._tails.setdefault(name, FileLines(self._job.logs / f"{name}.log"))
        return merged({prefix(name, self._only): self._tails[name].lines() for name in names})

    def may_grow(self) -> bool:
        return self._grows()

    def rest(self) -> list[str]:
        return [prefix(name, self._only) + line for name, tail in self._tails.items() for line in tail.rest()]


def _writers(job: JobDir) -> list[str]:
    """Who has written a log."""
    return by_writer(path.stem for path in job.logs.glob("*.log"))
