"""The worker's part of the protocol: the table of its states, and the actions that the table names.

An event comes in by `WorkerCore.step`, under a lock. It becomes a trigger; the table gives the next state and the action.
What may happen at any time, such as a message of the master, is in `_note`: it changes what the worker knows.

What happens in each step is no event, and takes no lock. Which thread writes what:

- The training thread: `position`, `reporting.times`, `reporting.clock`, `reporting.totals` and what `reporting` notes of a
  step, by the methods of `StepCore`. While it trains, nobody else changes `state` or `world`. That it makes progress may
  also be told by a thread of its own (`Reporting.advance`): at worst one such word is lost.
- Whoever holds the lock: all the rest. Only while the training thread waits for a world does another thread enter one.
- Readers without the lock see one field at a time: `progress`, a vote, a standing are objects that are replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from elasticdl.common.errors import JobFailedError, UnreachableError
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.protocol import ALONE, Command, Trigger, World
from elasticdl.elastic.core.training_step import IN_TRAINING, IN_WORLD, StepCore, WorkerState
from elasticdl.job import messages as m

# What becomes of a worker, seen from inside: what moves it from one state to the next, and what it does then.
#
# Read the table from top to bottom to learn what happens when. `WorkerCore` has the actions.

S = WorkerState

# States, what happens, the next state, and what is done: a method of `WorkerCore`.
_ROWS: Sequence[tuple[tuple[WorkerState, ...], Trigger, WorkerState, str]] = (
    # It asks for a world, and gets one or is told to leave.
    ((S.PREPARING, S.SYNCING, S.TRAINING, S.COMPLETE), Trigger.READY, S.WAITING, "ask"),
    ((S.LEAVING,), Trigger.CLOSED, S.WAITING, "ask"),
    ((S.WAITING,), Trigger.WORLD, S.CONNECTING, "enter"),
    ((S.WAITING,), Trigger.TOLD, S.GONE, "leave_job"),
    # All members connect, and are brought to one state.
    ((S.CONNECTING,), Trigger.CONNECTED, S.SYNCING, "synchronize"),
    ((S.SYNCING,), Trigger.SYNCED, S.TRAINING, "train"),
    # The world is left: together, mostly after a vote, or at once because it broke.
    (IN_WORLD, Trigger.LEFT, S.LEAVING, "leave_together"),
    (IN_WORLD, Trigger.FAILURE, S.LEAVING, "leave_broken"),
    # The end: nobody is done before all are, so that a member that is lost has somebody to do its part.
    ((S.TRAINING,), Trigger.RETURNED, S.ENDING, "cast_end_vote"),
    ((S.ENDING,), Trigger.ALL_RETURNED, S.COMPLETE, "complete"),
    (tuple(S), Trigger.LAST_WORD, S.GONE, "say_last_word"),
    ((S.GONE,), Trigger.READY, S.GONE, "leave_job"),
)
# What is not in the table changes nothing.
TABLE: Mapping[tuple[WorkerState, Trigger | None], tuple[WorkerState, str]] = {
    (before, trigger): (state, action) for states, trigger, state, action in _ROWS for before in states
}


MAX_FRUITLESS_WORLDS = 20  # in a row, broken before a single step was made: by then it is not bad luck


class WorkerCore(StepCore):
    """Decides for one worker. ``under_master`` is False for a script that runs alone: its one world is there from the start.

    ``linger_seconds``: how long a member that is told to leave stays for another to take its state, if no other holds it.
    """

    def __init__(self, worker_id: int = 0, *, under_master: bool = True, linger_seconds: float = 0.0) -> None:
        super().__init__(under_master=under_master)
        self.worker_id = worker_id
        self.linger_seconds = linger_seconds
        self.stopping: p.LeaveJob | None = None  # it is to leave for good
        self.lost = ""  # why there is no master any more
        self.request: m.Ask | None = None  # not answered yet
        self.last_word: m.Finished | m.Failed | None = None
        self.left_version = 0  # of the world that was left last
        self.left_broken = False  # it broke: nobody knows which of its members are still there
        self.left_because = ""
        self.may_be_last = False  # it leaves, and perhaps nobody else holds the state
        self._linger_until: float | None = None
        self._generation = -1  # of the latest master that was heard, if one was
        self._refused = False  # the present stream is that of an earlier one
        self._broken = 0  # version of the newest world that is known to be broken
        self._change = 0  # version of the world that is to be left
        self._next: p.WorldPublished | None = None  # it came while this worker was in an earlier world
        self._entries: list[m.KvPut] = []  # into the store of the present world
        self._draining: m.Draining | None = None
        self._entered_at = (0, 0)  # step with which the present world began, and steps made till then
        self._fruitless = 0  # worlds in a row without a step
        self.reporting.enter(ALONE)
        if under_master:
            self.reporting.leave()

    # ---- what shells ask ----

    @property
    def inside(self) -> int:
        """Version of the world that this worker is in, 0 between worlds."""
        return self.world.version if self.state in IN_WORLD or self.state is S.LEAVING else 0

    @property
    def lingers(self) -> bool:
        """It was told to leave, and stays as long as perhaps nobody else holds the state."""
        return self._linger_until is not None

    @property
    def broken(self) -> bool:
        """Whether the present world is known to be broken."""
        return self.inside != 0 and (self.inside <= self._broken or (self.state is S.LEAVING and self.left_broken))

    # ---- the way in ----

    def step(self, event: p.Event, now: float) -> list[p.Instruction]:
        """``now`` in seconds of a clock that only goes forward."""
        out = self._note(event, now)
        transition = TABLE.get((self.state, self._trigger(event)))
        if transition is None and self.state is S.WAITING and (self.stopping or self.lost):
            transition, self.may_be_last = TABLE[S.WAITING, Trigger.TOLD], True
        if transition is not None:
            before, (self.state, action) = self.state, transition
            out += getattr(self, f"_{action}")(event, before, now)
        is_over = self._change == self.inside != 0
        # Who is alone waits for nobody, and so is not woken by a break.
        is_broken = self.world.size == 1 and self.broken
        self.leaving = self.stopping is not None or bool(self.lost) or is_over or is_broken
        return out

    def _trigger(self, event: p.Event) -> Trigger | None:
        match event:
            case Trigger():
                return event
            case p.WorldPublished(world):
                return self._world_trigger(world)
            case p.Said(m.Finished() | m.Failed()):
                return Trigger.LAST_WORD if self.under_master else None
            case p.WorldLeft():
                return Trigger.LEFT
            case p.CollectiveFailed():
                return Trigger.FAILURE
        return None

    def _world_trigger(self, world: World) -> Trigger | None:
        """A world that is broken already is entered, to leave it as all do."""
        is_old = world.version < self._broken or world.version <= self.left_version
        return None if self._refused or is_old else Trigger.WORLD

    # ---- what may happen at any time ----

    def _note(self, event: p.Event, now: float) -> list[p.Instruction]:
        match event:
            case Trigger.TICK:
                return self._tick(now)
            case p.Said(m.Notice("pause") as pause):  # before the step that has ended it
                return _send(pause)
            case p.Said(m.Notice() as notice):
                return _send(*self.reporting.flush(), notice)
            case p.Said(m.KvPut() as entry):
                if entry.world_version == self.inside:
                    self._entries.append(entry)
                return [p.Send(entry)]
            case p.Terminated(reason):
                return self._terminated(reason, now)
            case _:
                return self._hear(event)

    def _hear(self, event: p.Event) -> list[p.Instruction]:
        """What comes over the session. The orders of a master that is refused don't count."""
        match event:
            case p.SessionOpened(unsent):
                self._refused = False
                return self._greet(unsent)
            case p.Welcomed(interval, generation):
                if generation < self._generation:
                    self._refused = True
                    return [p.RefuseMaster(f"a later master of this job than number {generation} was heard already")]
                self._generation, self.reporting.interval = generation, interval
            case p.MasterLost(reason):
                self.lost = reason
            case _ if self._refused:
                pass
            case p.Ordered(m.Change(version)):
                self._change = version
            case p.Ordered(m.Broken(version, reason)):
                self._broken = max(self._broken, version)
                return [p.BreakCollective(version, reason, entered=version == self.inside != 0)]
            case p.WorldPublished(world) if self.inside and world.version > self.inside:
                # The master waited to save the present world, and does not expect this worker in it any more.
                self._next, self._broken = event, max(self._broken, self.inside)
                if self.state in IN_WORLD:
                    return [p.BreakCollective(self.inside, f"world {world.version} follows it", entered=True)]
            case p.Ordered(m.Drain(reason)):
                return self._drain(reason)
            case p.Ordered(m.StopWork(reason, checkpoint)):
                if not (self.stopping and self.stopping.checkpoint):
                    self.stopping = p.LeaveJob(reason, checkpoint, drained=False)
            case p.Ordered(m.DumpStacks()):
                return [Command.DUMP_STACKS]
        return []

    def _greet(self, unsent: Iterable[m.Message]) -> list[p.Instruction]:
        """What a master must know that has not heard of this worker, or not lately."""
        hello = m.Hello(world_version=self.inside)
        entries = self._entries if self.inside else []
        again = self.reporting.again()
        return _send(hello, *entries, self.request, *again, self._draining, *unsent, self.last_word)

    def _tick(self, now: float) -> list[p.Instruction]:
        out: list[p.Instruction] = []
        if self._linger_until is not None and now >= self._linger_until and self._draining:
            self.may_be_last = True
            out += self._drain(self._draining.reason)
        beat = self.reporting.tick(self.inside, self.position.progress.step, now) if self.under_master else []
        return [*out, *_send(*beat)]

    def _terminated(self, reason: str, now: float) -> list[p.Instruction]:
        """Whether others stay that hold the state, the master knows, and says so at once."""
        holds = self.position.has_state and self.under_master
        if not (holds and self.linger_seconds > 0) or self.state in (S.PREPARING, S.COMPLETE, S.GONE):
            return self._drain(reason)
        if self.stopping is None and self._draining is None:
            self._draining = m.Draining(reason, lingers=True)
            self._linger_until = now + self.linger_seconds
            return [p.Send(self._draining)]
        return []

    def _drain(self, reason: str) -> list[p.Instruction]:
        self._linger_until = None
        if self.stopping is not None:
            return []
        self.stopping = p.LeaveJob(reason, checkpoint=not self.under_master, drained=self.under_master)
        self._draining = m.Draining(reason)
        return [p.Send(self._draining)] if self.under_master else []

    # ---- actions ----

    def _ask(self, event: p.Event, before: WorkerState, now: float) -> list[p.Instruction]:
        reason, broken = "ready", False
        if before is not S.PREPARING:
            self.left_version = self.world.version
        if before is S.LEAVING:
            reason, broken = self.left_because, self.left_broken
            self.reporting.clock.mark("stopped", now)
        out = _send(*self.reporting.flush())
        self.reporting.leave()
        if self.stopping or self.lost:
            self.state = S.GONE
            return [*out, *self._leave_job(event, before, now)]
        if not self.under_master:
            self.state = S.CONNECTING
            return [*out, *self._enter(p.WorldPublished(ALONE), before, now)]
        following, self._next = self._next, None
        if following and self._world_trigger(following.world):
            self.state = S.CONNECTING
            return [*out, *self._enter(following, before, now)]
        at, position = self.position.progress, self.position
        self.request = m.Ask(
            self.left_version, at.step, position.has_state, broken, reason, at.epoch, position.synced_in
        )
        return [*out, p.Send(self.request)]

    def _enter(self, event: p.WorldPublished, before: WorkerState, now: float) -> list[p.Instruction]:
        self.world, self.request = event.world, None
        self._entries.clear()
        self.reporting.enter(self.world)
        self.reporting.clock.mark("joined", now)
        self._entered_at = (self.position.progress.step, self.position.made)
        return [Command.CONNECT]

    def _synchronize(self, event: p.Event, before: WorkerState, now: float) -> list[p.Instruction]:
        self.reporting.clock.mark("started", now)
        return [Command.SYNCHRONIZE]

    def _train(self, event: p.Event, before: WorkerState, now: float) -> list[p.Instruction]:
        self.reporting.training_begins(now)
        self._entered_at = (self.position.progress.step, self.position.made)
        return [Command.TRAIN]

    def _leave_together(self, event: p.WorldLeft, before: WorkerState, now: float) -> list[p.Instruction]:
        self._fruitless = 0
        self.reporting.clock.left(now, broken=False, torn=False)
        self.left_because, self.left_broken = event.reason, False
        return [p.LeaveWorld(event.reason, broken=False)]

    def _leave_broken(self, event: p.CollectiveFailed, before: WorkerState, now: float) -> list[p.Instruction]:
        self.reporting.clock.left(now, broken=True, torn=before in IN_TRAINING)
        out: list[p.Instruction] = [p.BreakCollective(self.world.version, event.reason, entered=True)]
        step, made = self._entered_at
        moved = self.position.safe.step > step or self.position.made > made
        self._fruitless = 0 if moved else self._fruitless + 1
        if self._fruitless >= MAX_FRUITLESS_WORLDS:
            self.state = S.GONE
            text = f"{self._fruitless} worlds in a row broke before a step; the last: {event.reason}"
            return [*out, p.Fail(JobFailedError, text)]
        self.left_because, self.left_broken = event.reason, True
        return [*out, p.LeaveWorld(event.reason, broken=True)]

    def _cast_end_vote(self, event: p.Event, before: WorkerState, now: float) -> list[p.Instruction]:
        return [Command.CAST_END_VOTE]

    def _complete(self, event: p.Event, before: WorkerState, now: float) -> list[p.Instruction]:
        return [*_send(*self.reporting.flush()), Command.COMPLETE]

    def _leave_job(self, event: p.Event, before: WorkerState, now: float) -> list[p.Instruction]:
        self.request = None
        # No fault of its own: what it has trained is kept, as where the job is stopped.
        if self.lost and self._generation >= 0:
            return [self.stopping or p.LeaveJob(self.lost, checkpoint=True, drained=False)]
        return [self.stopping or p.Fail(UnreachableError, self.lost or "this worker has left its job")]

    def _say_last_word(self, event: p.Said, before: WorkerState, now: float) -> list[p.Instruction]:
        assert isinstance(event.message, m.Finished | m.Failed)
        self.request = None
        made = self.position.made > 0
        self.last_word = replace(event.message, trained=made) if isinstance(event.message, m.Failed) else event.message
        return _send(*self.reporting.flush(), self.last_word)


def _send(*messages: m.Message | None) -> list[p.Instruction]:
    return [p.Send(message) for message in messages if message is not None]
