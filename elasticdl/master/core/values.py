"""What events, instructions and the core's own state are made of, and the settings that it decides by."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum

from elasticdl.job.messages import Member
from elasticdl.job.spec import AUTO, JobSpec, WorkerRange


class Phase(StrEnum):
    """Where the job stands."""

    PENDING = "pending"  # no world has been formed yet
    RUNNING = "running"  # a world stands or is formed, or the user's own programs run, which may need none
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
    progress_timeout: float | None = None  # `rule.ProgressLimits` has a default
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


# A worker has one state; `elasticdl.master.core.transitions` has the table of what changes it.


class WorkerState(StrEnum):
    PENDING = "pending"  # asked for; the launcher has no place for it
    STARTING = "starting"  # asked for, or its process has started; has had no session
    INITIALIZING = "initializing"  # has had a session, and has not asked for a world: imports, reads data
    STANDBY = "standby"  # has asked for a world, and is in none
    MEMBER = "member"  # is in the present world
    REJOINING = "rejoining"  # was in the present world, and has asked for the next
    EXCLUDED = "excluded"  # a world goes on without it, which it may not know; has yet to ask for the next
    DRAINING = "draining"  # was told to leave
    FINISHED = "finished"  # its training is complete; its process still runs
    COMPLETED = "completed"  # has finished, and its process is gone
    FAILED = "failed"  # said that it can't go on; its process should end
    KILLING = "killing"  # given up; its process is being killed; of what it says only that it has finished counts
    GONE = "gone"  # its process is gone, and with it the record


STARTING = (WorkerState.PENDING, WorkerState.STARTING)
ABSENT = (
    WorkerState.INITIALIZING,
    WorkerState.STANDBY,
    WorkerState.REJOINING,
    WorkerState.EXCLUDED,
)  # in a session and in no world
# A worker in one of these states counts as one of those that the job has.
LIVE = (
    *STARTING,
    WorkerState.INITIALIZING,
    WorkerState.STANDBY,
    WorkerState.MEMBER,
    WorkerState.REJOINING,
    WorkerState.EXCLUDED,
)
IN_WORLD = (WorkerState.MEMBER, WorkerState.REJOINING)  # or left it for the next
LEAVING = (WorkerState.DRAINING, WorkerState.FAILED)
DONE = (WorkerState.FINISHED, WorkerState.COMPLETED)


# How many workers have crashed, and when the job can't go on for it.


CRASHES_AT_START = 3
CRASHES_IN_TRAINING = 10
# So many new steps without a crash clear the count.
STEPS_TO_FORGET_CRASHES = 100


@dataclass(frozen=True, slots=True)
class Crashes:
    at_start: int = 0  # in a row, by workers that had reached no world
    in_training: int = 0
    steps_since: int = 0

    @property
    def in_a_row(self) -> int:
        return max(self.at_start, self.in_training)

    def and_one(self, *, in_training: bool) -> Crashes:
        if in_training:
            return replace(self, in_training=self.in_training + 1, steps_since=0)
        return replace(self, at_start=self.at_start + 1, steps_since=0)

    def after_steps(self, steps: int) -> Crashes:
        """``steps``: those that nobody had made before. A script that ends by an exit behind its loop makes the same ones each time."""
        since = self.steps_since + steps
        in_training = 0 if since >= STEPS_TO_FORGET_CRASHES else self.in_training
        return replace(self, steps_since=since, in_training=in_training)

    def after_world(self) -> Crashes:
        """A worker has got through its start, so others can."""
        return replace(self, at_start=0)

    def too_many(self, *, world_runs: bool) -> str:
        """Why it makes no sense to go on, if so."""
        if self.at_start >= CRASHES_AT_START and not world_runs:
            return f"{self.at_start} workers in a row failed at the start"
        if self.in_training >= CRASHES_IN_TRAINING:
            return f"{self.in_training} workers crashed in training"
        return ""
