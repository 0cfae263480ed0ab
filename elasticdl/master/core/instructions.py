"""What the core wants done: everything that it ever asks of the edge.

An instruction is carried out at once and never answered; what comes of it returns as events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """Where the job stands; pending -> running <-> waiting -> stopping -> one of the last three."""

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
class Member:
    worker_id: int
    host: str
    step: int
    has_state: bool
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class World:
    """An ordered list of workers; a member's place is its rank. Versions only grow."""

    version: int
    members: tuple[Member, ...]
    reason: str

    @property
    def worker_ids(self) -> tuple[int, ...]:
        return tuple(member.worker_id for member in self.members)


# ---- to workers, over their sessions; lost if a worker has none ----


@dataclass(frozen=True, slots=True)
class AnnounceChange:
    """Finish your step, leave together, ask for the next world."""

    worker_ids: tuple[int, ...]
    world_version: int
    reason: str


@dataclass(frozen=True, slots=True)
class BreakWorld:
    """A member is gone: leave at once."""

    worker_ids: tuple[int, ...]
    world_version: int
    reason: str


@dataclass(frozen=True, slots=True)
class PublishWorld:
    """Tell the world to ``worker_ids``: its members, or one of them again after it reconnected."""

    world: World
    worker_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DrainWorker:
    worker_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class StopWorkers:
    worker_ids: tuple[int, ...]
    reason: str
    checkpoint: bool


@dataclass(frozen=True, slots=True)
class DumpStacks:
    worker_id: int


# ---- to the edge's own record of the world ----


@dataclass(frozen=True, slots=True)
class AdoptWorld:
    """This world goes on under a new master; its members know it."""

    world: World


# ---- to the launcher ----


@dataclass(frozen=True, slots=True)
class LaunchWorker:
    worker_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class TerminateWorker:
    """Ask the process to end (SIGTERM); for workers that have no session to be told over."""

    worker_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class KillWorker:
    """End the process and its children now; a worker without a place is taken off the list."""

    worker_id: int
    reason: str


# ---- to the job's books ----


@dataclass(frozen=True, slots=True)
class Record:
    """An entry for the journal; `elasticdl.common.journal.EVENTS` names them."""

    event: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the job will have ended once its workers are gone."""

    phase: Phase
    reason: str
    traceback: str = ""
    checkpoint: bool = False  # whether those who leave write one


@dataclass(frozen=True, slots=True)
class EndJob:
    """All workers are gone and nothing more will happen."""

    phase: Phase
    reason: str
    traceback: str = ""


Instruction = (
    AnnounceChange
    | BreakWorld
    | PublishWorld
    | AdoptWorld
    | DrainWorker
    | StopWorkers
    | DumpStacks
    | LaunchWorker
    | TerminateWorker
    | KillWorker
    | Record
    | EndJob
)
