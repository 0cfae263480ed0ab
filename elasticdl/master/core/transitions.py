"""What happens to a worker: a table, to be read from top to bottom, and what its rows do.

A worker has one state. What happens to it is a trigger: something that it said, that a launcher saw, or that the master
decided. `ROWS` says, for a state and a trigger, which state follows and what else is done, in order. A pair that is
not in the table changes nothing, since any event may come late or twice.

What happens when a worker is told to leave after its last step? If its word that it has finished came first, it is
FINISHED, for which there is no DRAIN: nothing changes. If the order to leave came first, it is DRAINING, and FINISH
takes it to FINISHED all the same. Only if the others could not complete the training is it made to leave (REOPEN).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from elasticdl.job.messages import Ask, Broken, Drain, Failed, Hello, Message, StopWork
from elasticdl.master.core.events import ExitCause, Instruction, KillWorker, Record, Tell, TerminateWorker
from elasticdl.master.core.rendezvous import Rendezvous
from elasticdl.master.core.values import (
    ABSENT,
    IN_WORLD,
    LEAVING,
    LIVE,
    STARTING,
    Outcome,
    Phase,
    Settings,
    WorkerState,
)
from elasticdl.master.core.worker_record import Records, WorkerRecord

_NO_DEADLINE = (*IN_WORLD, WorkerState.STANDBY, WorkerState.EXCLUDED, WorkerState.FINISHED)


class Trigger(Enum):
    # what the launcher saw
    NO_PLACE = "has no place"
    PLACED = "is started"
    EXIT = "exits"
    # what it said, or what became of its session
    CONNECT = "connects"
    CONNECT_IN_WORLD = "connects and is in a world"  # in one that the master may know nothing of
    JOIN = "asks for a world"
    LINGER = "alone has the state, and will leave"
    DRAIN = "leaves"
    FINISH = "has finished"
    FAIL = "fails"
    # what the master decided
    ADOPT = "was in the world that an earlier master formed"
    ENTER = "is in the new world"
    PASS_OVER = "is not in the new world"
    EXCLUDE = "was cut off as its world broke"
    LET_GO = "is one too many"
    DISMISS = "is told that the job ends"
    GIVE_UP = "is silent, stuck or late"
    REOPEN = "finished too early"


@dataclass(frozen=True, slots=True)
class TransitionContext:
    """What the rows' functions need to know. ``reason`` becomes that of the record; ``cause``: why the world changes, and why a
    replacement is launched; ``lost``: how the worker was lost, unless the master told it to leave."""

    now: float
    reason: str = ""
    cause: str = ""
    lost: ExitCause | None = None
    clean: bool = False  # the process ended by itself with exit code 0
    said: Message | None = None


@dataclass(slots=True)
class Ending:
    """How the job ends: its workers are told to leave, killed after a grace period, and given up after another."""

    outcome: Outcome | None  # decided once; if it was by an earlier master, this one begins with it
    deadline: float = math.inf  # infinite until the workers are told
    killed: bool = False

    @property
    def dismissed(self) -> bool:
        return self.deadline < math.inf

    def decide(self, outcome: Outcome) -> None:
        self.outcome = self.outcome or outcome


class Transitions:
    def __init__(self, records: Records, rendezvous: Rendezvous, ending: Ending, settings: Settings) -> None:
        self._records = records
        self._rendezvous = rendezvous
        self._ending = ending
        self._settings = settings

    def fire(self, record: WorkerRecord, trigger: Trigger, context: TransitionContext) -> list[Instruction]:
        """Nothing happens if the table does not know the trigger in the record's state."""
        before = record.state
        if (before, trigger) not in WORKERS:
            return []
        state, actions = WORKERS[before, trigger]
        self._records.move(record, state)
        waited = record.waits_for_successor
        record.waits_for_successor = waits = waited and state in LIVE
        if (state is not before and not waits) or trigger in (Trigger.NO_PLACE, Trigger.LINGER):
            record.reason = context.reason
        if state is not before:
            self._enter(record, context, overstays=waited)
        # That a worker leaves is written when it begins to wait for its successor, and not again when it goes.
        done = [
            action(self, record, context) for action in actions if not (waited and action is Transitions.note_draining)
        ]
        return [instruction for instruction in done if instruction is not None]

    def _enter(self, record: WorkerRecord, context: TransitionContext, *, overstays: bool) -> None:
        """``overstays``: its time to leave has begun before."""
        record.suspicion, record.remark, record.waits = None, "", ""
        if record.state in LEAVING and not overstays:
            record.deadline = context.now + self._settings.stop_grace
        elif record.state is WorkerState.INITIALIZING and record.deadline is None:
            record.deadline = context.now + self._settings.start_timeout
        elif record.state in _NO_DEADLINE and not record.waits_for_successor:
            record.deadline = None
        if record.state is not WorkerState.STARTING:
            ended = record.state is WorkerState.FINISHED and self._settings.own_program
            record.quiet_since = context.now if ended else None
        if record.state in (WorkerState.FINISHED, WorkerState.FAILED, WorkerState.KILLING):
            record.pulse = None

    # ---- what the rows do ----

    def note_pending(self, record: WorkerRecord, context: TransitionContext) -> Instruction:
        """Write into the journal that there is no place for it, and why."""
        return Record("worker_pending", {"worker": record.worker_id, "reason": context.reason})

    def note_started(self, record: WorkerRecord, context: TransitionContext) -> Instruction:
        return started(record)

    def note_ready(self, record: WorkerRecord, context: TransitionContext) -> Instruction:
        return Record("worker_ready", {"worker": record.worker_id})

    def note_draining(self, record: WorkerRecord, context: TransitionContext) -> Instruction:
        return Record("worker_draining", {"worker": record.worker_id, "reason": context.reason})

    def take_position(self, record: WorkerRecord, context: TransitionContext) -> None:
        """Remember which step it stands at, and whether it has the state."""
        if isinstance(asked := context.said, Ask):
            record.step, record.epoch, record.has_state = asked.step, asked.epoch, asked.has_state
            record.synced_in = asked.synced_in

    def queue(self, record: WorkerRecord, context: TransitionContext) -> None:
        """Let it wait for the next world, from now."""
        record.queued_at = context.now

    def change_world(self, record: WorkerRecord, context: TransitionContext) -> None:
        """Form a new world; members finish their step first."""
        self._rendezvous.begin(context.now).causes[record.worker_id] = context.cause

    def stay(self, record: WorkerRecord, context: TransitionContext) -> None:
        """Let it train until its replacement has the state, or its time is over."""
        if not record.waits_for_successor:
            record.waits_for_successor = True
            record.deadline = context.now + self._settings.stop_grace

    def leave_world(self, record: WorkerRecord, context: TransitionContext) -> None:
        """Form a new world, unless that is under way; at once if the worker says that its world broke."""
        broken = isinstance(context.said, Ask) and context.said.broken
        if self._rendezvous.change is None or (broken and not self._rendezvous.broken):
            self._rendezvous.begin(context.now, context.cause, broken=broken)

    def break_world(self, record: WorkerRecord, context: TransitionContext) -> None:
        """Form a new world; members leave theirs at once (not if this one ended well as the job ends)."""
        if not (context.clean and self._ending.outcome):
            self._rendezvous.begin(context.now, broken=True).causes[record.worker_id] = context.cause

    def tear_world(self, record: WorkerRecord, context: TransitionContext) -> None:
        """As `break_world` if others are still in its world, unless it ended well."""
        if not context.clean and self._rendezvous.leaves_others(record):
            self.break_world(record, context)
        else:
            self.explain(record, context)

    def explain(self, record: WorkerRecord, context: TransitionContext) -> None:
        """If it is why a new world is formed, or was just formed, say now what became of it."""
        change, last = self._rendezvous.change, self._rendezvous.last_change
        if change and record.worker_id in change.causes and not context.clean:
            change.causes[record.worker_id] = context.cause
        elif last and record.queued_at <= last.since and record.worker_id in last.causes and not context.clean:
            last.causes[record.worker_id] = context.cause  # it has not come back since then

    def repeat_world(self, record: WorkerRecord, context: TransitionContext) -> Instruction | None:
        """Publish the present world to it again, unless it knows it."""
        world, hello = self._rendezvous.world, context.said
        if world is None or (isinstance(hello, Hello) and hello.world_version == world.version):
            return None
        return Tell((record.worker_id,), world)

    def break_its_world(self, record: WorkerRecord, context: TransitionContext) -> Instruction | None:
        """Tell it that the world it is in goes on without it."""
        if not isinstance(hello := context.said, Hello):
            return None
        cut_off, unknown = "the others went on while it was cut off", "the master does not know all of its members"
        reason = cut_off if self._rendezvous.world else unknown
        return Tell((record.worker_id,), Broken(hello.world_version, reason))

    def order(self, record: WorkerRecord, context: TransitionContext) -> Instruction:
        """Tell it, maybe again, to leave, or that the job ends."""
        if outcome := self._ending.outcome:
            return Tell((record.worker_id,), StopWork(outcome.reason, outcome.checkpoint))
        return Tell((record.worker_id,), Drain(record.reason))

    def end_process(self, record: WorkerRecord, context: TransitionContext) -> Instruction:
        """Kill it; a user's own program, which may do without a session, gets SIGTERM."""
        kind = TerminateWorker if self._settings.own_program else KillWorker
        return kind(record.worker_id, context.reason)

    def kill(self, record: WorkerRecord, context: TransitionContext) -> Instruction:
        return KillWorker(record.worker_id, context.reason)

    def blame(self, record: WorkerRecord, context: TransitionContext) -> None:
        """If the user's code failed, decide that the job has failed."""
        failed = context.said
        if isinstance(failed, Failed) and failed.users:
            self._ending.decide(Outcome(Phase.FAILED, failed.message, failed.traceback))


def started(record: WorkerRecord) -> Record:
    """What the journal says of a worker that has its place."""
    of_place = {"place": record.place_id} if record.place_id else {}
    return Record("worker_started", {"worker": record.worker_id, "host": record.place, "pid": record.pid, **of_place})


Action = Callable[[Transitions, WorkerRecord, TransitionContext], Instruction | None]
Transition = tuple[tuple[WorkerState, ...], Trigger, WorkerState | None, tuple[Action, ...]]

State, On, Do = WorkerState, Trigger, Transitions  # in the table, whose lines are to be read at a glance

# From one of these states, with this trigger, to that state (None: it stays as it is), with these actions.
ROWS: tuple[Transition, ...] = (
    # It starts.
    (STARTING, On.NO_PLACE, State.PENDING, (Do.note_pending,)),
    (STARTING, On.PLACED, State.STARTING, (Do.note_started,)),
    (STARTING, On.CONNECT, State.INITIALIZING, ()),
    # It asks for a world, and comes into one.
    ((State.INITIALIZING, State.EXCLUDED), On.JOIN, State.STANDBY, (Do.take_position, Do.queue, Do.note_ready)),
    ((State.MEMBER,), On.JOIN, State.REJOINING, (Do.take_position, Do.leave_world)),
    ((State.STANDBY, State.REJOINING), On.JOIN, None, (Do.take_position,)),
    ((State.STANDBY, State.REJOINING), On.ENTER, State.MEMBER, ()),
    ((State.REJOINING,), On.PASS_OVER, State.STANDBY, (Do.queue,)),
    ((*STARTING, State.INITIALIZING), On.ADOPT, State.MEMBER, ()),
    ((State.DRAINING,), On.ADOPT, None, (Do.change_world,)),
    ((State.FAILED, State.KILLING), On.ADOPT, None, (Do.break_world,)),
    # Its session broke, and it is back.
    ((State.STANDBY,), On.CONNECT, None, (Do.queue,)),
    ((State.STANDBY,), On.CONNECT_IN_WORLD, None, (Do.queue,)),
    ((State.MEMBER,), On.CONNECT, None, (Do.repeat_world,)),
    ((State.MEMBER,), On.CONNECT_IN_WORLD, None, (Do.repeat_world,)),
    ((State.MEMBER,), On.EXCLUDE, State.EXCLUDED, (Do.break_world,)),
    ((*STARTING, State.INITIALIZING, State.EXCLUDED), On.CONNECT_IN_WORLD, State.EXCLUDED, (Do.break_its_world,)),
    ((State.DRAINING,), On.CONNECT, None, (Do.order,)),
    ((State.DRAINING,), On.CONNECT_IN_WORLD, None, (Do.order,)),
    # It leaves, by itself (SIGTERM) or because it is told to.
    # Its world may be one that this master does not know: then it is EXCLUDED, and asks for the next.
    ((*ABSENT, State.MEMBER), On.LINGER, None, (Do.note_draining, Do.stay)),
    ((*STARTING, *ABSENT), On.DRAIN, State.DRAINING, (Do.note_draining,)),
    ((State.MEMBER,), On.DRAIN, State.DRAINING, (Do.note_draining, Do.change_world)),
    (STARTING, On.LET_GO, State.DRAINING, (Do.note_draining, Do.kill)),
    (ABSENT, On.LET_GO, State.DRAINING, (Do.note_draining, Do.order)),
    ((State.MEMBER,), On.LET_GO, State.DRAINING, (Do.note_draining, Do.change_world, Do.order)),
    # The job ends.
    ((State.PENDING,), On.DISMISS, State.DRAINING, (Do.kill,)),
    ((State.STARTING,), On.DISMISS, State.DRAINING, (Do.end_process,)),
    ((*ABSENT, State.MEMBER, State.DRAINING), On.DISMISS, State.DRAINING, (Do.order,)),
    # Its training is complete, whatever it was told meanwhile.
    ((*LIVE, State.DRAINING, State.KILLING), On.FINISH, State.FINISHED, ()),
    ((State.FINISHED,), On.EXIT, State.COMPLETED, ()),
    # Rank 0 was lost before it finished, or others go on: its place is given to another.
    ((State.FINISHED,), On.REOPEN, State.DRAINING, ()),
    ((State.COMPLETED,), On.REOPEN, State.GONE, ()),
    # It can't go on.
    ((*STARTING, *ABSENT), On.FAIL, State.FAILED, (Do.explain, Do.blame)),
    ((State.MEMBER,), On.FAIL, State.FAILED, (Do.break_world, Do.blame)),
    ((State.DRAINING,), On.FAIL, State.FAILED, (Do.tear_world, Do.blame)),
    ((State.FINISHED,), On.FAIL, None, (Do.blame,)),
    # It is given up.
    ((*STARTING, *ABSENT, State.FAILED), On.GIVE_UP, State.KILLING, (Do.explain, Do.kill)),
    ((State.MEMBER,), On.GIVE_UP, State.KILLING, (Do.break_world, Do.kill)),
    ((State.DRAINING,), On.GIVE_UP, State.KILLING, (Do.tear_world, Do.kill)),
    # Its process is gone.
    ((*STARTING, *ABSENT), On.EXIT, State.GONE, (Do.explain,)),
    ((State.MEMBER,), On.EXIT, State.GONE, (Do.break_world,)),
    ((State.DRAINING,), On.EXIT, State.GONE, (Do.tear_world,)),
    ((State.FAILED, State.KILLING), On.EXIT, State.GONE, ()),
)
WORKERS: Mapping[tuple[WorkerState, Trigger], tuple[WorkerState, tuple[Action, ...]]] = {
    (state, trigger): (following or state, actions) for states, trigger, following, actions in ROWS for state in states
}
