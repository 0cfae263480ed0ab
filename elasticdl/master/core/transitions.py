"""Takes a worker from one state to the next, as the table in `elasticdl.master.state.lifecycle` says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elasticdl.master.state import events as e
from elasticdl.master.state import instructions as i
from elasticdl.master.state.instructions import Instruction, Phase
from elasticdl.master.state.lifecycle import IN_WORLD, LEAVING, WORKERS, Action, Trigger, WorkerState
from elasticdl.master.state.records_by_state import Records
from elasticdl.master.state.rendezvous import Rendezvous
from elasticdl.master.state.values import Settings
from elasticdl.master.state.worker_record import WorkerRecord

_NO_DEADLINE = (*IN_WORLD, WorkerState.STANDBY, WorkerState.EXCLUDED, WorkerState.FINISHED)


@dataclass(frozen=True, slots=True)
class TransitionContext:
    """What the actions need to know. ``reason`` becomes the record's, ``cause`` is why the world changes, and why a replacement
    is launched. ``lost``: how, unless the master told the worker to leave."""

    now: float
    reason: str = ""
    cause: str = ""
    lost: e.ExitCause | None = None
    clean: bool = False  # the process ended by itself with exit code 0
    event: e.WorkerConnected | e.JoinRequested | e.WorkerFailed | None = None


@dataclass(slots=True)
class Ending:
    """How the job ends: its workers are told to leave, killed after a grace period, and given up after another."""

    outcome: i.Outcome | None  # decided once; if it was by an earlier master, this one begins with it
    deadline: float = math.inf  # infinite until the workers are told
    killed: bool = False

    @property
    def dismissed(self) -> bool:
        return self.deadline < math.inf

    def decide(self, outcome: i.Outcome) -> None:
        self.outcome = self.outcome or outcome


class Transitions:
    def __init__(self, records: Records, rendezvous: Rendezvous, ending: Ending, settings: Settings) -> None:
        self._records = records
        self._rendezvous = rendezvous
        self._ending = ending
        self._settings = settings
        self._actions: Mapping[Action, Callable[[WorkerRecord, TransitionContext], Instruction | None]] = {
            Action.NOTE_PENDING: lambda r, c: _note("worker_pending", r, reason=c.reason),
            Action.NOTE_STARTED: lambda r, c: _note("worker_started", r, **_whereabouts(r)),
            Action.NOTE_READY: lambda r, c: _note("worker_ready", r),
            Action.NOTE_DRAINING: lambda r, c: _note("worker_draining", r, reason=c.reason),
            Action.TAKE_POSITION: self._take_position,
            Action.QUEUE: lambda r, c: setattr(r, "queued_at", c.now),
            Action.CHANGE_WORLD: self._change_world,
            Action.STAY: self._stay,
            Action.LEAVE_WORLD: self._leave_world,
            Action.BREAK_WORLD: self._break_world,
            Action.TEAR_WORLD: self._tear_world,
            Action.EXPLAIN: self._explain,
            Action.REPEAT_WORLD: self._repeat_world,
            Action.ORDER: self._order,
            Action.BREAK_ITS_WORLD: self._break_its_world,
            Action.END_PROCESS: self._end_process,
            Action.KILL: lambda r, c: i.KillWorker(r.worker_id, c.reason),
            Action.BLAME: self._blame,
        }

    def fire(self, record: WorkerRecord, trigger: Trigger, context: TransitionContext) -> list[Instruction]:
        """Nothing happens if the table does not know the trigger in the record's state."""
        before = record.state
        row = WORKERS.get((before, trigger))
        if row is None:
            return []
        state, actions = row
        self._records.move(record, state)
        if record.state is not before or trigger in (Trigger.NO_PLACE, Trigger.LINGER):
            record.reason = context.reason
        waited = record.waits_for_successor
        record.waits_for_successor = waited and record.state in IN_WORLD
        if record.state is not before:
            self._enter(record, context, overstays=waited)
        out = [self._actions[action](record, context) for action in actions if not (waited and action is _NOTED)]
        return [instruction for instruction in out if instruction is not None]

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

    # ---- worlds ----

    def _take_position(self, record: WorkerRecord, context: TransitionContext) -> None:
        if isinstance(asked := context.event, e.JoinRequested):
            record.step, record.epoch, record.has_state = asked.step, asked.epoch, asked.has_state
            record.synced_in = asked.synced_in

    def _change_world(self, record: WorkerRecord, context: TransitionContext) -> None:
        self._rendezvous.begin(context.now).causes[record.worker_id] = context.cause

    def _stay(self, record: WorkerRecord, context: TransitionContext) -> None:
        if not record.waits_for_successor:
            record.waits_for_successor = True
            record.deadline = context.now + self._settings.stop_grace

    def _leave_world(self, record: WorkerRecord, context: TransitionContext) -> None:
        broken = isinstance(context.event, e.JoinRequested) and context.event.broken
        if self._rendezvous.change is None or (broken and not self._rendezvous.broken):
            self._rendezvous.begin(context.now, context.cause, broken=broken)

    def _break_world(self, record: WorkerRecord, context: TransitionContext) -> None:
        if not (context.clean and self._ending.outcome):
            self._rendezvous.begin(context.now, broken=True).causes[record.worker_id] = context.cause

    def _tear_world(self, record: WorkerRecord, context: TransitionContext) -> None:
        if not context.clean and self._rendezvous.leaves_others(record):
            self._break_world(record, context)
        else:
            self._explain(record, context)

    def _explain(self, record: WorkerRecord, context: TransitionContext) -> None:
        change = self._rendezvous.change
        if change and record.worker_id in change.causes and not context.clean:
            change.causes[record.worker_id] = context.cause

    def _repeat_world(self, record: WorkerRecord, context: TransitionContext) -> Instruction | None:
        world, connected = self._rendezvous.world, context.event
        if world is None or (isinstance(connected, e.WorkerConnected) and connected.world_version == world.version):
            return None
        return i.PublishWorld(world, (record.worker_id,))

    def _break_its_world(self, record: WorkerRecord, context: TransitionContext) -> Instruction | None:
        if not isinstance(connected := context.event, e.WorkerConnected):
            return None
        reason = "the others went on while it was cut off"
        return i.BreakWorld((record.worker_id,), connected.world_version, reason)

    def _order(self, record: WorkerRecord, context: TransitionContext) -> Instruction:
        if outcome := self._ending.outcome:
            return i.StopWorkers((record.worker_id,), outcome.reason, outcome.checkpoint)
        return i.DrainWorker(record.worker_id, record.reason)

    def _end_process(self, record: WorkerRecord, context: TransitionContext) -> Instruction:
        kind = i.TerminateWorker if self._settings.own_program else i.KillWorker
        return kind(record.worker_id, context.reason)

    def _blame(self, record: WorkerRecord, context: TransitionContext) -> None:
        failed = context.event
        if isinstance(failed, e.WorkerFailed) and failed.users:
            self._ending.decide(i.Outcome(Phase.FAILED, failed.message, failed.traceback))


def _whereabouts(record: WorkerRecord) -> dict[str, object]:
    of_place = {"place": record.place_id} if record.place_id else {}
    return {"host": record.place, "pid": record.pid, **of_place}


def _note(event: str, record: WorkerRecord, **fields: object) -> Instruction:
    return i.Record(event, {"worker": record.worker_id, **fields})


_NOTED = Action.NOTE_DRAINING  # once: when a worker begins to wait for its successor, not when it then leaves
