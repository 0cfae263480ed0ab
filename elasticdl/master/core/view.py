"""The job at one moment, for people."""

from __future__ import annotations

from dataclasses import dataclass

from elasticdl.common.spec import WorkerRange
from elasticdl.master.core.instructions import Phase
from elasticdl.master.core.peers import Peer, Standing
from elasticdl.master.core.workers import Worker, WorkerState


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


def view_worker(worker: Worker, peer: Peer | None) -> WorkerView:
    """``peer``: what the rendezvous knows of it, if it has had a session."""
    state, rank, reason = str(worker.state), -1, worker.reason
    if worker.state is WorkerState.CONDEMNED or worker.finished:
        state, reason = "draining", "finished" if worker.finished else worker.reason
    elif worker.state is WorkerState.RUNNING:
        standing = peer.standing if peer else Standing.COMING
        if standing in (Standing.MEMBER, Standing.LEFT) and peer:
            state, rank = "member", peer.rank
        else:
            state = str(standing.value)
    return WorkerView(worker.worker_id, state, rank, worker.host, worker.pid, reason)
