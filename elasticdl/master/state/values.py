"""What events, instructions and the core's own state are made of, and the settings that it decides by."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from elasticdl.job.shared_values import Member as Member
from elasticdl.job.shared_values import Pace as Pace
from elasticdl.job.shared_values import StepReport as StepReport
from elasticdl.job.shared_values import StepTimes as StepTimes
from elasticdl.job.spec import AUTO, JobSpec, WorkerRange


class Phase(StrEnum):
    """Where the job stands; `elasticdl.master.state.states.JOB` says what follows what."""

    PENDING = "pending"  # no world has been formed yet
    RUNNING = "running"
    WAITING = "waiting"  # too few workers; those that are left keep their state
    STOPPING = "stopping"  # decided how it ends; workers are leaving
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"  # on request

    @property
    def final(self) -> bool:
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.STOPPED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the job will have ended once its workers are gone."""

    phase: Phase
    reason: str
    traceback: str = ""
    checkpoint: bool = False  # whether those who leave write one


@dataclass(frozen=True, slots=True)
class World:
    """An ordered list of workers; a member's place is its rank. Versions only grow."""

    version: int
    members: tuple[Member, ...]
    reason: str

    @property
    def worker_ids(self) -> tuple[int, ...]:
        return tuple(member.worker_id for member in self.members)


@dataclass(frozen=True, slots=True)
class Settings:
    """The part of the job's specification that the core needs. Times in seconds."""

    workers: WorkerRange
    join_window: float = 0.3
    start_timeout: float = 600.0
    heartbeat_timeout: float = 10.0
    progress_timeout: float | None = None  # learnt
    stop_grace: float = 30.0
    # For workers to come back to a master that was started again: its address may take long to be known everywhere.
    recovery_timeout: float = 60.0
    scale_policy: str = "all"
    min_efficiency: float = 0.0
    # The workers run the user's own program, which may never connect.
    own_program: bool = False
    replace_slow: bool = False
    gang: bool = False  # all or none: there is no place for a worker more
    job_name: str = ""
    first_worker: int = 0  # number of the first; lower ones were in jobs of the same training before this one
    image: str = ""
    checkpoint_dir: str = ""

    @property
    def state_can_be_left(self) -> bool:
        """There is a place where all workers see what the last one leaves: pods share no folder."""
        return bool(self.checkpoint_dir) or not self.image

    @classmethod
    def from_spec(cls, spec: JobSpec, first_worker: int = 0) -> Settings:
        names = {field.name for field in fields(cls)} - {"workers", "own_program", "first_worker"}
        given = {name: getattr(spec, name) for name in names}
        if spec.progress_timeout == AUTO:
            given["progress_timeout"] = None
        return cls(spec.num_workers, own_program=bool(spec.command), first_worker=first_worker, **given)
