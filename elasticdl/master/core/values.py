"""What events, instructions and the core's own state are made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elasticdl.common.shared_values import Member as Member
from elasticdl.common.shared_values import StepReport as StepReport


class Phase(StrEnum):
    """Where the job stands; `elasticdl.master.core.lifecycle.JOB` says what follows what."""

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
