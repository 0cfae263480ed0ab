"""What the master knows of one worker."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from elasticdl.master.state.events import ExitCause
from elasticdl.master.state.states import LIVE, WorkerState
from elasticdl.master.state.suspicion import Suspicion
from elasticdl.master.state.values import StepTimes

MOST_FACTOR = 99.0  # of what the others need; above it they need next to nothing

_SHOWN = {
    WorkerState.PENDING: "pending",
    WorkerState.STARTING: "starting",
    WorkerState.INITIALIZING: "starting",
    WorkerState.EXCLUDED: "starting",
    WorkerState.STANDBY: "standby",
    WorkerState.MEMBER: "member",
    WorkerState.REJOINING: "member",
}


class NotificationLevel(IntEnum):
    """What a worker was told about its world."""

    NOTHING = 0
    CHANGE = 1
    BROKEN = 2


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker at one moment, for people."""

    worker_id: int
    state: str  # pending, starting, standby, member, draining
    rank: int  # -1 unless a member
    host: str
    pid: int
    reason: str
    remark: str  # what is the matter with it, if anything


@dataclass(frozen=True, slots=True)
class Verdict:
    """How much longer a slow worker needs for a step than the median worker, and what for."""

    phase: str  # data, compute or update
    factor: float  # of all its own work
    seconds: float  # a step, by which the others are held up

    def __str__(self) -> str:
        factor = f"{self.factor:.1f}" if self.factor <= MOST_FACTOR else f"over {MOST_FACTOR:.0f}"
        return f"{factor}x the others ({self.phase})"


@dataclass(slots=True)
class Pulse:
    """Signs of life since the worker's session began."""

    heard: float  # last heartbeat; if it has no session, when it lost it
    moved: float  # when its count of progress last changed
    progress: int = -1
    waiting: bool = False  # blocked inside a collective
    times: StepTimes | None = None  # of its steps in the present world
    steps: int = 0  # seen since something new was asked of it
    trained: float = 0.0  # seconds


@dataclass(slots=True)
class WorkerRecord:
    worker_id: int
    reason: str  # for its state
    state: WorkerState = WorkerState.STARTING
    host: str = ""
    node: str = ""  # of a cluster, on which it is
    pid: int = 0
    place_id: str = ""  # whoever provides places knows where that is
    connected: bool = False
    unheard: bool = False  # was launched by an earlier master, and has had no session with this one
    ready: bool = False  # has asked for a world, so it has imported everything and can send heartbeats
    waits_for_successor: bool = False  # MEMBER or REJOINING: leaves as soon as another member has its state
    outgoing: bool = False  # slow, and lets go of its place when its replacement, which is asked for, is ready
    failure: str = ""  # why it has crashed, whatever its exit code says
    unfit: bool = False  # it could not begin to train, where others can
    replaces: ExitCause | None = None  # how its predecessor was lost, if that had been in no world
    tries: int = 0  # workers in a row that were unfit in its place, this one included
    deadline: float | None = None  # until it has to be ready, or gone
    quiet_since: float | None = None  # it runs without a session: has had none, or its training is over
    suspicion: Suspicion | None = None  # it was asked where it stands
    remark: str = ""  # what is wrong with it, for people
    waits: str = ""  # which of its own lines it has waited at for long before it was ready
    pulse: Pulse | None = None  # None if silence means nothing
    # of its last Ask; the step also of its heartbeats while it is in a world or leaves
    step: int = 0
    epoch: int = 0
    has_state: bool = False
    synced_in: int = 0
    queued_at: float = 0.0  # STANDBY: since when it waits with a session
    # of the last world it was a member of
    world_version: int = 0
    rank: int = -1
    notified: NotificationLevel = NotificationLevel.NOTHING
    slow: Verdict | None = None  # it holds the others up

    @property
    def place(self) -> str:
        """Where a person looks for it."""
        return self.node or self.host

    @property
    def live(self) -> bool:
        """Whether it is one of the workers that the job has; one that waits for its successor is being replaced."""
        return self.state in LIVE and not self.waits_for_successor

    @property
    def holds_place(self) -> bool:
        """Whether it is to be replaced only when it has ended."""
        return self.live or self.state is WorkerState.FAILED

    @property
    def advance(self) -> tuple[int, int]:
        """How far its state is: of two at the same step, the one of the later world may be ahead."""
        return self.step, self.world_version

    def rank_order(self) -> tuple[bool, int, int, int, bool, int, int]:
        """Sorts into the ranks of a new world (rule 5 of the rendezvous)."""
        step, world, epoch = (self.step, self.synced_in, self.epoch) if self.has_state else (0, 0, 0)
        return (not self.has_state, -step, -world, -epoch, self.rank < 0, self.rank, self.worker_id)

    def view(self) -> WorkerView:
        state = "draining" if self.waits_for_successor else _SHOWN.get(self.state, "draining")
        reason = "finished" if self.state is WorkerState.FINISHED else self.reason
        rank = self.rank if state == "member" else -1
        remark = self.remark or (f"slow: {self.slow}" if self.slow and rank >= 0 else self.waits)
        return WorkerView(self.worker_id, state, rank, self.place, self.pid, reason, remark)
