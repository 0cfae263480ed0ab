"""What the master knows of its workers and of their training, and what of that a next master must know."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import chain
from operator import attrgetter
from typing import Any

from pydantic import TypeAdapter, ValidationError

from elasticdl.common.errors import first_finding
from elasticdl.common.reason import describe, parse
from elasticdl.job.messages import Finished, Notice, Progress, StepReport, StepTimes
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core.events import Record
from elasticdl.master.core.values import LIVE, Crashes, Outcome, Phase, WorkerState, World

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


# ---- what seems wrong with a worker, and where it stands, as it or its launcher has reported ----


class SuspicionKind(StrEnum):
    """Why a worker is asked where it stands."""

    STUCK = "stuck"
    LATE = "not ready"
    SILENT = "no heartbeat"
    UNREACHED = "no session"
    ABSENT = "not connected"  # a user's own program, which may do without a session
    OVER = "runs on after its training"
    WAITS = "waits for the others, as they do"


@dataclass(frozen=True, slots=True)
class StackReport:
    """Where a worker stands, as it or its launcher has reported."""

    where: str = ""  # as in train.py:31 in load
    stack: tuple[str, ...] = ()
    moves: bool = False  # its stack was seen to change, so it does something
    collectives: int = 0  # that it has begun in its world
    state: str = ""  # of its process, if that is why it can't move
    itself: bool = False  # it has told this itself

    @classmethod
    def told(cls, fields: Mapping[str, Any]) -> StackReport:
        """By the worker itself."""
        last = [f"last collectives: {', '.join(fields.get('last_collectives', ()))}"]
        stack = (*fields.get("stack", ()), *(last if fields.get("last_collectives") else ()))
        moves, begun = bool(fields.get("moves")), int(fields.get("collectives", 0))
        return cls(str(fields.get("where", "")), stack, moves, begun, itself=True)

    @classmethod
    def found(cls, text: str, state: str) -> StackReport:
        """By the launcher: ``text`` with what `faulthandler` and the worker have written, ``state`` if the process can't run."""
        stacks = parse(text)
        if not stacks:
            return cls(state=state)
        return cls(stacks[0].where, tuple(describe(stacks[0])), state=state)

    def __str__(self) -> str:
        """To be put after what is wrong; empty if nothing is known."""
        return "".join([f", {self.state}" if self.state else "", f", at {self.where}" if self.where else ""])


@dataclass(slots=True)
class Suspicion:
    """Something seems wrong with a worker: from the moment at which it was asked where it stands."""

    kind: SuspicionKind
    asked: float  # when it was asked last
    report: StackReport | None = None  # the last one
    answered: bool = False  # by it, or by its launcher, since it was asked last
    launcher_asked: bool = False  # likewise
    named: StackReport | None = None  # the report that people were shown last

    @property
    def answers(self) -> bool:
        """The worker itself has answered the last question."""
        return self.answered and self.report is not None and self.report.itself

    @property
    def moves(self) -> bool:
        return self.report is not None and self.report.moves

    def __str__(self) -> str:
        return str(self.report or "")


# ---- the worker ----


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
    waits_for_successor: bool = False  # LIVE: leaves as soon as another member has its state
    failure: str = ""  # why it has crashed, whatever its exit code says
    unfit: bool = False  # it could not begin to train, where others can
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


# The records of a job's workers, and who is in which state, so that an event of one worker is not weighed by looking at all.


class Records(dict[int, WorkerRecord]):
    """By worker id. `move` and `connect` change the state and the session of a record that is in here, and nobody else does."""

    def __init__(self) -> None:
        super().__init__()
        # By state, and by whether the worker has a session.
        self._kept: dict[tuple[WorkerState, bool], dict[int, WorkerRecord]] = {
            (state, connected): {} for state in WorkerState for connected in (True, False)
        }

    def __setitem__(self, worker_id: int, record: WorkerRecord) -> None:
        if worker_id in self:
            del self[worker_id]
        super().__setitem__(worker_id, record)
        self._keep(record)

    def __delitem__(self, worker_id: int) -> None:
        self._drop(self[worker_id])
        super().__delitem__(worker_id)

    def clear(self) -> None:
        super().clear()
        for records in self._kept.values():
            records.clear()

    def move(self, record: WorkerRecord, state: WorkerState) -> None:
        """This record, which is in here, gets another state."""
        self._drop(record)
        record.state = state
        self._keep(record)

    def connect(self, record: WorkerRecord, *, connected: bool) -> None:
        """The worker of this record, which is in here, has a session from now on, or has none."""
        self._drop(record)
        record.connected = connected
        self._keep(record)

    def of(self, *states: WorkerState, connected: bool | None = None) -> list[WorkerRecord]:
        """By id."""
        return sorted(self.each_of(*states, connected=connected), key=attrgetter("worker_id"))

    def each_of(self, *states: WorkerState, connected: bool | None = None) -> Iterator[WorkerRecord]:
        """In no order that means anything. ``connected``: with a session, or without one; None: all."""
        return chain.from_iterable(kept.values() for kept in self._chosen(states, connected))

    def count(self, *states: WorkerState, connected: bool | None = None) -> int:
        return sum(map(len, self._chosen(states, connected)))

    def _chosen(self, states: tuple[WorkerState, ...], connected: bool | None) -> list[dict[int, WorkerRecord]]:
        sessions = (True, False) if connected is None else (connected,)
        return [self._kept[state, session] for state in states for session in sessions]

    def _keep(self, record: WorkerRecord) -> None:
        self._kept[record.state, record.connected][record.worker_id] = record

    def _drop(self, record: WorkerRecord) -> None:
        del self._kept[record.state, record.connected][record.worker_id]

    def lingering(self) -> list[WorkerRecord]:
        waiting = (record for record in self.each_of(*LIVE) if record.waits_for_successor)
        return sorted(waiting, key=attrgetter("worker_id"))

    @property
    def live(self) -> int:
        """Workers that are there, or on their way, and not leaving."""
        return self.count(*LIVE) - len(self.lingering())


# What a master must know to take the place of another.
#
# It is saved outside of the master (`elasticdl.master.shell.loop`) before anything is done that a successor must know
# of. Where the training stands is not in it: workers know that, and tell. Fields with ``compare=False`` may be a
# little old without harm, so a snapshot that differs only in these equals the one before.


# Raised only if an older master would misunderstand what is written. A field may be added, with a default: a master that does not
# know it ignores it, and a master that misses it takes the default. A test keeps what the first version of this format wrote.
FORMAT = 2


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """Of a worker whose process is not known to be gone. The name ``processes`` is reserved: how many a worker has, by default 1."""

    worker_id: int
    state: WorkerState
    reason: str
    world_version: int = 0
    ready: bool = False
    failure: str = ""
    place: str = ""  # the id of that in which it is, as far as it is known


@dataclass(slots=True)
class TrainingSnapshot:
    """The numbers that are shown, and which steps are in them."""

    epochs_done: int = 0
    begun: bool = False  # a step was made, whether or not anybody still holds what came of it
    epoch: int = field(default=0, compare=False)
    epoch_steps: int = field(default=0, compare=False)  # of this epoch, as far as they were seen
    total_epochs: int = field(default=0, compare=False)
    step: int = field(default=0, compare=False)
    total_steps: int = field(default=0, compare=False)
    samples: int = field(default=0, compare=False)
    loss: float = field(default=math.nan, compare=False)
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)
    collective: str = field(default="", compare=False)  # what sums gradients
    diverged: bool = field(default=False, compare=False)
    counted: int = field(default=0, compare=False)  # the last step whose loss is in the sum
    epoch_loss: tuple[float, int] = field(default=(0.0, 0), compare=False)  # sum over samples, and their number
    newest: tuple[int, int] = field(default=(0, 0), compare=False)  # world and step of the last report taken
    # The step after which the workers' states were compared last, and of how many they were one.
    compared_step: int = field(default=0, compare=False)
    compared_workers: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """The state of the core."""

    limits: WorkerRange
    next_id: int = 0
    finished: tuple[int, ...] = ()  # whether their processes are gone or not
    together: bool = False  # the members of the world said that all of them have finished
    world: World | None = None  # the last; perhaps nobody has heard of it
    phase: Phase = Phase.PENDING
    outcome: Outcome | None = None
    training: TrainingSnapshot = field(default_factory=TrainingSnapshot)
    workers: tuple[WorkerSnapshot, ...] = field(default=(), compare=False)
    crashes: Crashes = field(default=Crashes(), compare=False)
    target: int = 0  # workers that the policy wants; 0 if there is none


@dataclass(frozen=True, slots=True)
class UnwrittenSteps:
    """Steps that this state counts, and the journal does not tell yet. ``joined``: its next entry, as far as it has come."""

    joined: Mapping[str, Any] | None = None
    ordinary: float = 0.0  # seconds of a step, as the last entry has them


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one master leaves to the next. With the journal of the same moment it is the whole truth: nothing in it happens
    again under the next master, and what came later is told again by those who know it."""

    job: JobSnapshot
    started: float  # when the first master of the job did; seconds since the epoch
    generation: int = 1  # how many masters the job has had, this one included
    taken: Mapping[int, int] = field(default_factory=dict)  # by worker: the number of its last message that was taken
    steps: UnwrittenSteps = UnwrittenSteps()
    journal_bytes: int | None = None  # length of the journal at this moment; None: all that there is

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **_ADAPTER.dump_python(self, mode="json")})

    @classmethod
    def from_json(cls, text: str) -> Snapshot:
        """
        Raises:
            ValueError: this is no snapshot, or one of another version of this package; one line.
        """
        content = json.loads(text)
        found = content.pop("format", None) if isinstance(content, dict) else None
        if found != FORMAT:
            raise ValueError(f"a snapshot has format {FORMAT}, not {found}: another version of elasticdl wrote it")
        try:
            return _ADAPTER.validate_python(content)
        except ValidationError as error:
            raise ValueError(f"snapshot: {first_finding(error)}") from None


_ADAPTER = TypeAdapter(Snapshot)


# What the training has achieved so far, from what rank 0 reports, for status lines and the summary.


# Samples per second are counted over this long, or over the last two reports if they are further apart.
WINDOW_SECONDS = 5.0
# More that are finished at once are made up; the last are told.
MOST_EPOCHS = 1000


@dataclass(slots=True)
class Training(TrainingSnapshot):
    """``step`` and ``samples`` are the model's since its first step."""

    _recent: deque[tuple[float, int, int]] = field(default_factory=deque)  # time, steps, samples

    @classmethod
    def restore(cls, past: TrainingSnapshot) -> Training:
        """Where an earlier master was."""
        return cls(**_numbers(past))

    def snapshot(self) -> TrainingSnapshot:
        return TrainingSnapshot(**_numbers(self))

    # ---- what is told ----

    def report(self, told: Progress, now: float) -> tuple[tuple[StepReport, ...], list[Record]]:
        """Those steps that are new, and what they add to the journal.

        A new rank 0 reports its last steps again, in case its predecessor did not come to it. Steps that are trained
        again, since the state was lost, are those of a later world and count as new.
        """
        steps = tuple(step for step in told.steps if (step.world_version, step.step) > self.newest)
        out: list[Record] = []
        self.total_steps, self.total_epochs = told.total_steps, told.total_epochs
        for step in steps:
            out += self._take_step(step)
        if steps:
            self.begun = True
            self.newest = (steps[-1].world_version, steps[-1].step)
            if self._stood_still(now):
                self._recent.clear()
            self._recent.append((now, len(steps), sum(step.samples for step in steps)))
            while len(self._recent) > 2 and now - self._recent[0][0] > WINDOW_SECONDS:
                self._recent.popleft()
        return steps, out

    def notice(self, notice: Notice) -> None:
        told = notice.fields
        if notice.event == "evaluation":
            self._take_metrics(told.get("metrics"))
        elif notice.event == "collective":
            self.collective = str(told.get("engine", ""))
        elif notice.event == "resumed":
            self.step, self.epoch = int(told.get("step", self.step)), int(told.get("epoch", self.epoch))
            self.epoch_steps = 0
            self.samples, self.epochs_done = int(told.get("samples", self.samples)), self.epoch

    def finish(self, told: Finished) -> list[Record]:
        self._take_metrics(told.metrics)
        self.step = max(self.step, told.step)
        return self._finish_epochs(told.epochs)

    def lose_state(self) -> int:
        """Nobody holds the state any more; the step that was lost. Who goes on tells where it begins."""
        lost, self.step, self.samples = self.step, 0, 0
        self.epoch = self.epoch_steps = 0
        return lost

    # ---- what is asked ----

    @property
    def completion(self) -> str:
        """What there is to say of a training that is complete."""
        if self.counted and self.samples and not math.isfinite(self.loss):
            return f"training is complete, but has diverged: its last loss is {self.loss}"
        return "training is complete"

    def achieved(self) -> dict[str, Any]:
        """For the last entry of the journal."""
        numbers = {"steps": self.step, "epochs": self.epochs_done, "samples": self.samples, "metrics": self.metrics}
        return {**numbers, "collective": self.collective, **self._compared()}

    def _compared(self) -> dict[str, int]:
        return (
            {"compared": self.compared_step, "compared_workers": self.compared_workers} if self.compared_workers else {}
        )

    def samples_per_second(self, now: float) -> float:
        return self._per_second(now, column=2)

    def time_left(self, now: float) -> float:
        """Seconds; negative if not known."""
        rate = self._per_second(now, column=1)
        return (self.total_steps - self.step) / rate if rate > 0 and self.total_steps else -1.0

    def _take_step(self, step: StepReport) -> list[Record]:
        out = self._finish_epochs(step.epoch)
        self.epoch_steps = self.epoch_steps + 1 if step.epoch == self.epoch else 1
        self.step, self.epoch, self.loss, self.samples = step.step, step.epoch, step.loss, step.total_samples
        if step.compared:
            self.compared_step, self.compared_workers = step.step - 1, step.compared
        if not self.diverged and not math.isfinite(step.loss):
            self.diverged = True
            state = "training has diverged, and will not come back by itself"
            out.append(Record("warning", {"message": f"the loss of step {step.step} is {step.loss}: {state}"}))
        if step.step > self.counted:  # a step that is made again counts once
            self.counted = step.step
            total, samples = self.epoch_loss
            self.epoch_loss = (total + step.loss * step.samples, samples + step.samples)
        return out + self._finish_epochs(step.epoch + 1) if step.ends_epoch else out

    def _finish_epochs(self, done: int) -> list[Record]:
        """Every epoch before ``done`` is finished, if that was not known before."""
        finished = range(max(self.epochs_done, done - MOST_EPOCHS), done)
        if not finished:
            return []
        self.epochs_done = done
        (total, samples), self.epoch_loss = self.epoch_loss, (0.0, 0)
        if not samples:  # another job, from whose checkpoint this one goes on, has finished them
            return []
        told = {"step": self.step, "loss": total / samples, **self._compared()}
        return [Record("epoch_finished", {"epoch": n, **told}) for n in finished]

    def _take_metrics(self, metrics: Any) -> None:
        if metrics:
            self.metrics = dict(metrics)

    def _per_second(self, now: float, column: int) -> float:
        """The first report only marks where counting begins, up to the last one."""
        if len(self._recent) < 2 or self._stood_still(now):
            return 0.0
        first, *later = self._recent
        return sum(entry[column] for entry in later) / max(later[-1][0] - first[0], 1e-9)

    def _stood_still(self, now: float) -> bool:
        """No step was told for so long that none is on its way."""
        if len(self._recent) < 2:
            return False
        first, last = self._recent[0][0], self._recent[-1][0]
        return now - last > max(WINDOW_SECONDS, 2 * (last - first) / (len(self._recent) - 1))


def _numbers(of: TrainingSnapshot) -> dict[str, Any]:
    return {each.name: getattr(of, each.name) for each in fields(TrainingSnapshot)}
