"""The job at one moment, for people."""

from __future__ import annotations

from dataclasses import dataclass

from elasticdl.common.spec import WorkerRange
from elasticdl.master.core.lifecycle import WorkerState
from elasticdl.master.core.record import WorkerRecord
from elasticdl.master.core.values import Phase

_SHOWN = {
    WorkerState.PENDING: "pending",
    WorkerState.STARTING: "starting",
    WorkerState.INITIALIZING: "starting",
    WorkerState.EXCLUDED: "starting",
    WorkerState.STANDBY: "standby",
    WorkerState.MEMBER: "member",
    WorkerState.REJOINING: "member",
}


@dataclass(frozen=True, slots=True)
class WorkerView:
    worker_id: int
    state: str  # pending, starting, standby, member, draining
    rank: int  # -1 unless a member
    host: str
    pid: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobView:
    phase: Phase
    reason: str
    traceback: str
    world_version: int
    last_change: str
    limits: WorkerRange
    workers: tuple[WorkerView, ...]


def view_worker(record: WorkerRecord) -> WorkerView:
    state = "draining" if record.lingers else _SHOWN.get(record.state, "draining")
    reason = "finished" if record.state is WorkerState.FINISHED else record.reason
    rank = record.rank if state == "member" else -1
    return WorkerView(record.worker_id, state, rank, record.host, record.pid, reason)
