"""Workers as the fleet sees them: processes that are asked for, run, and are let go."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class WorkerState(StrEnum):
    PENDING = "pending"  # asked for; the launcher has no place for it
    STARTING = "starting"  # its process was asked for or runs, and has not connected
    RUNNING = "running"  # has had a session
    DRAINING = "draining"  # told to leave
    CONDEMNED = "condemned"  # given up; its process is being killed


LIVE = (WorkerState.PENDING, WorkerState.STARTING, WorkerState.RUNNING)


@dataclass(slots=True)
class Worker:
    worker_id: int
    reason: str  # why it is in its state
    state: WorkerState = WorkerState.STARTING
    host: str = ""
    pid: int = 0
    ready: bool = False  # is warm: has asked for a world
    reached_world: bool = False
    finished: bool = False
    ready_by: float | None = None  # until it has asked for a world
    leave_by: float | None = None
    failure: str = ""  # why it has crashed, whatever its exit code says
    unheard: bool = False  # was launched by an earlier master, and has not spoken to this one

    @property
    def live(self) -> bool:
        return self.state in LIVE and not self.finished
