"""Local jobs as the commands see them: which one is meant, whether it runs, and which are old."""

from __future__ import annotations

import os
import shutil
import time
from enum import Enum

from google.protobuf import json_format

from elasticdl.cli.nearest import did_you_mean
from elasticdl.common.errors import UserError
from elasticdl.common.jobdir import JobDir, MasterAddress, list_jobs
from elasticdl.proto import elasticdl_pb2 as pb

KEPT_JOBS = 20
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
        return Life.RUNNING if is_alive(master.pid) else Life.LOST
    try:
        age = now - job.path.stat().st_mtime
    except FileNotFoundError:
        return Life.LOST
    return Life.STARTING if age < STARTING_SECONDS else Life.LOST


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's process, but a process
    return True


def last_status(job: JobDir) -> pb.JobStatus | None:
    """The status with which the job ended; None if it has not (or nobody could write it down)."""
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
        raise UserError(f"there is no job {name}{f': {near}' if near.endswith('?') else ''}{_list_of(jobs)}")
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
