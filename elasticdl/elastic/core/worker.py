"""The worker's part of the protocol: the actions that the table of `elasticdl.elastic.core.lifecycle` names.

`WorkerCore.step` is the only way in. An event becomes a trigger; the table gives the next state and the action. What may
happen at any time, such as a message of the master, is in `_note`: it changes what the worker knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from elasticdl.common.errors import JobFailedError, UnreachableError, UserError
from elasticdl.elastic.core import messages as m
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.lifecycle import IN_WORLD, TABLE, TRAINING, WorkerState
from elasticdl.elastic.core.position import Position
from elasticdl.elastic.core.protocol import Command, Trigger
from elasticdl.elastic.core.reporting import Reporting
from elasticdl.elastic.core.step_times import Activity
from elasticdl.elastic.core.vote import Vote
from elasticdl.elastic.core.world import ALONE, World

S = WorkerState
MAX_FRUITLESS_WORLDS = 20  # in a row, broken before a single step was made: by then it is not bad luck


class WorkerCore:
    """Decides for one worker. ``under_master`` is False for a script that runs alone: its one world is there from the start.

    ``linger_seconds``: how long the only member, told to leave, stays for another to take its state.
    """

    def __init__(self, worker_id: int = 0, *, under_master: bool = True, linger_seconds: float = 0.0) -> None:
        self.worker_id = worker_id
        self.under_master = under_master
        self.linger_seconds = linger_seconds
        self.state = S.PREPARING if under_master else S.BETWEEN
        self.world: World = ALONE  # the present one, or the last
        self.position = Position()
        self.reporting = Reporting()
        self.stopping: p.LeaveJob | None = None  # it is to leave for good
        self.lost = ""  # why there is no master any more
        self.request: m.JoinRequest | None = None  # not answered yet
        self.last_word: m.Finished | m.Failed | None = None
        self.left_version = 0  # of the world that was left last
        self.left_broken = False  # it broke: nobody knows which of its members are still there
        self._left_because = ""
        self._linger_until: float | None = None
        self._generation = 0  # of the latest master that was heard
        self._refused = False  # the present stream is that of an earlier one
        self._broken = 0  # version of the newest world that is known to be broken
        self._change = 0  # version of the world that is to be left
        self._next: p.WorldPublished | None = None  # it came while this worker was in an earlier world
        self._entries: list[m.StoreEntry] = []  # into the store of the present world
        self._draining: m.Draining | None = None
        self._entered_at = 0  # step with which the present world began
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
    def leaving(self) -> bool:
        """This member's vote: whether the present world is to be left after this step."""
        return self.stopping is not None or bool(self.lost) or self._change == self.inside != 0

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
            transition = TABLE[S.WAITING, Trigger.TOLD]
        if transition is None:
            return out
        before, (self.state, action) = self.state, transition
        return [*out, *getattr(self, f"_{action}")(event, before, now)]

    def _trigger(self, event: p.Event) -> Trigger | None:
        last = self.position.vote
        match event:
            case Trigger.COMMIT if last is not None and last.leaving:
                return Trigger.LAST_COMMIT
            case Trigger.RETURNED if self.world.size == 1:
                return Trigger.RETURNED_ALONE
            case Trigger():
                return event
            case p.Voted(vote) if self.state is S.ENDING:
                return Trigger.ALL_RETURNED if vote.ended == self.world.size else Trigger.WRONG_VOTE
            case p.Voted(vote):
                batch = self.position.batch
                is_right = vote.one_batch and not vote.ended and (batch is None or vote.samples == batch.batch)
                return Trigger.VOTE if is_right else Trigger.WRONG_VOTE
            case p.StepMade():
                return Trigger.STEP if last is not None else None
            case p.WorldPublished(world):
                return self._world_trigger(world)
            case p.Said(m.Finished() | m.Failed()):
                return Trigger.LAST_WORD if self.under_master else None
        return _TRIGGERS.get(type(event))

    def _world_trigger(self, world: World) -> Trigger | None:
        if self._refused or world.version < self._broken or world.version <= self.left_version:
            return None
        return Trigger.TORN_WORLD if world.version == self._broken else Trigger.WORLD

    def validate(self) -> None:
        """What holds after every step; called in the tests.

        Raises:
            AssertionError: an invariant does not hold; the message names it.
        """
        position, state = self.position, self.state
        invariants = {
            "a request to join is open exactly while the worker waits": (self.request is not None)
            == (state is S.WAITING),
            "a batch is in hand only before the first world and in training": position.batch is None
            or state in (S.PREPARING, *TRAINING),
            "a step is unsaved only where training stands": not position.unsaved
            or state in (S.PREPARING, *TRAINING, S.COMPLETE, S.GONE),
            "what is saved is never ahead of where training stands": position.saved.step <= position.progress.step,
            "an unsaved step is saved in its place": not position.unsaved
            or position.saved.step == position.progress.step,
            "who trains holds the state": state not in TRAINING or position.has_state or not self.under_master,
            "a worker that is to leave does not wait": state is not S.WAITING or not (self.stopping or self.lost),
            "a last word is the end": self.last_word is None or state is S.GONE,
            "no world is entered that was left": state not in IN_WORLD
            or not self.under_master
            or self.world.version > self.left_version
            or state is S.COMPLETE,
        }
        violated = [sentence for sentence, holds in invariants.items() if not holds]
        assert not violated, f"worker {self.worker_id}, {state}: {'; '.join(violated)}"

    # ---- what may happen at any time ----

    def _note(self, event: p.Event, now: float) -> list[p.Instruction]:
        match event:
            case Trigger.COMMIT | p.BatchGiven() | p.StepMade():  # these tell no more than what they trigger
                pass
            case p.Advanced(activity):
                self.reporting.advance(activity, now)
            case Trigger.TICK:
                return self._tick(now)
            case p.Voted(vote, _, device_seconds):
                self.position.vote = vote
                self.reporting.voted(device_seconds, now)
            case Trigger.BATCHES_OVER:
                self.position.batch = None
            case Trigger.EPOCH_ENDED:
                self.position.progress = self.position.progress.next_epoch()
            case Trigger.CLOCK_RESUMED:
                self.reporting.resume_clock(now)
            case p.Said(m.Notice() as notice):
                return _send(*self.reporting.flush(), notice)
            case p.Said(m.StoreEntry() as entry):
                if entry.world_version == self.inside:
                    self._entries.append(entry)
                return [p.Send(entry)]
            case p.StateMade(progress, has_state, order, copies):
                if self.under_master and self.state in (S.CONNECTING, *TRAINING):
                    return []  # the members have not got one of it each
                self.position = Position(progress, has_state=has_state, order=order, copies_parameters=copies)
            case p.Loaded(progress):
                return self.position.loaded(progress)
            case p.Totals(steps, epochs):
                self.reporting.total_steps, self.reporting.total_epochs = steps, epochs
            case p.Terminated(reason):
                return self._terminated(reason, now)
            case _:
                return self._hear(event)
        return []

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
            case p.ChangeAnnounced(version):
                self._change = version
            case p.BreakAnnounced(version, reason):
                self._broken = max(self._broken, version)
                return [p.BreakCollective(version, reason, entered=version == self.inside != 0)]
            case p.WorldPublished(world) if self.inside and world.version > self.inside:
                # The master waited to save the present world, and does not expect this worker in it any more.
                self._next, self._broken = event, max(self._broken, self.inside)
                if self.state in IN_WORLD:
                    return [p.BreakCollective(self.inside, f"world {world.version} follows it", entered=True)]
            case p.DrainOrdered(reason):
                return self._drain(reason)
            case p.StopOrdered(reason, checkpoint):
                if not (self.stopping and self.stopping.checkpoint):
                    self.stopping = p.LeaveJob(reason, checkpoint, drained=False)
            case Trigger.STACKS_ASKED:
                return [Command.DUMP_STACKS]
        return []

    def _greet(self, unsent: Iterable[m.Message]) -> list[p.Instruction]:
        """What a master must know that has not heard of this worker, or not lately."""
        members, entries = (self.world.members, self._entries) if self.inside else ((), [])
        hello = m.Hello(self.inside, self.position.progress.step, members)
        again = self.reporting.again()
        return _send(hello, *entries, self.request, *again, self._draining, *unsent, self.last_word)

    def _tick(self, now: float) -> list[p.Instruction]:
        out: list[p.Instruction] = []
        if self._linger_until is not None and now >= self._linger_until and self._draining:
            out += self._drain(self._draining.reason)
        beat = self.reporting.tick(self.inside, self.position.progress.step, now) if self.under_master else []
        return [*out, *_send(*beat)]

    def _terminated(self, reason: str, now: float) -> list[p.Instruction]:
        holds_alone = self.world.size == 1 and self.position.has_state and self.under_master
        if not (holds_alone and self.linger_seconds > 0) or self.state in (S.PREPARING, S.COMPLETE, S.GONE):
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

    def _nothing(self, event: p.Event, before: WorkerState, now: float) -> list[p.Instruction]:
        return []

    def _ask(self, event: p.Event, before: WorkerState, now: float) -> list[p.Instruction]:
        reason, broken = "ready", False
        if before is not S.PREPARING:
            self.left_version = self.world.version
        if before is S.LEAVING:
            reason, broken = self._left_because, self.left_broken
            self.reporting.clock.mark("stopped", now)
        out = [*self.position.leave(), *_send(*self.reporting.flush())]
        self.reporting.leave()
        if self.stopping or self.lost:
            self.state = S.GONE
            return [*out, *self._leave_job(event, before, now)]
        if not self.under_master:
            self.state = S.CONNECTING
            return [*out, *self._enter(p.WorldPublished(ALONE), before, now)]
        following, self._next = self._next, None
        trigger = following and self._world_trigger(following.world)
        if following and trigger:
            self.state, action = TABLE[S.WAITING, trigger]
            return [*out, *getattr(self, f"_{action}")(following, before, now)]
        return [*out, *self._send_request(self.left_version, reason, broken=broken)]

    def _ask_again(self, event: p.WorldPublished, before: WorkerState, now: float) -> list[p.Instruction]:
        """The world broke before this worker had entered it."""
        self.left_version = event.world.version
        return self._send_request(event.world.version, "broken before it was entered", broken=True)

    def _send_request(self, left: int, reason: str, *, broken: bool) -> list[p.Instruction]:
        at, position = self.position.progress, self.position
        self.request = m.JoinRequest(left, at.step, position.has_state, broken, reason, at.epoch, position.synced_in)
        return [p.Send(self.request)]

    def _enter(self, event: p.WorldPublished, before: WorkerState, now: float) -> list[p.Instruction]:
        self.world, self.request = event.world, None
        self._entries.clear()
        self.reporting.enter(self.world)
        self.reporting.clock.mark("joined", now)
        self._entered_at = self.position.progress.step
        return [p.Connect(self.world)]

    def _synchronize(self, event: p.Event, before: WorkerState, now: float) -> list[p.Instruction]:
        self.reporting.clock.mark("started", now)
        return [p.Synchronize(self.world)]

    def _train(self, event: p.Synced, before: WorkerState, now: float) -> list[p.Instruction]:
        self.reporting.training_begins(now)
        self._entered_at = event.progress.step
        out = self.position.synced(event.progress, self.world.version)
        if self._draining is not None and self._draining.lingers and self.world.size > 1:
            out += self._drain(self._draining.reason)  # the others hold the state now
        return [*out, p.Train(self.world)]

    def _begin_step(self, event: p.BatchGiven, before: WorkerState, now: float) -> list[p.Instruction]:
        self.reporting.times.samples = event.plan.samples
        return self.position.begin(event.plan, settings_changed=event.settings_changed)

    def _step_made(self, event: p.StepMade, before: WorkerState, now: float) -> list[p.Instruction]:
        assert self.position.vote is not None
        out = self.position.step_made()
        self._fruitless = 0
        ends_epoch = self.position.ends_epoch(self.world.size)
        at, vote = self.position.progress, self.position.vote
        self.reporting.count(at, vote, event.learning_rate, now, ends_epoch=ends_epoch, compared=event.compared)
        return [*out, *_send(self.reporting.pause_ended(now))]

    def _pass_by(self, event: p.Event, before: WorkerState, now: float) -> list[p.Instruction]:
        self.reporting.advance(Activity.WAIT, now)
        return _send(self.reporting.pause_ended(now))

    def _count_step(self, event: p.Event, before: WorkerState, now: float) -> list[p.Instruction]:
        self.position.progress = self.position.saved = self.position.progress.after(0)
        self.position.made += 1
        self._fruitless = 0
        self.reporting.count(self.position.progress, Vote(False, 0, 0.0), 0.0, now, ends_epoch=False)
        return []

    def _commit(self, event: p.Event, before: WorkerState, now: float) -> list[p.Instruction]:
        return self.position.commit(self.world.size, step_was_reduced=before is S.REDUCED)

    def _commit_and_leave(self, event: p.Event, before: WorkerState, now: float) -> list[p.Instruction]:
        return [*self._commit(event, before, now), *self._leave("the members voted to leave this world", now)]

    def _leave_together(self, event: p.WorldLeft, before: WorkerState, now: float) -> list[p.Instruction]:
        return [*self.position.leave(), *self._leave(event.reason, now)]

    def _leave(self, reason: str, now: float) -> list[p.Instruction]:
        self.position.vote = self.position.batch = None
        self._fruitless = 0
        self.reporting.clock.left(now, broken=False, torn=False)
        self._left_because, self.left_broken = reason, False
        return [p.LeaveWorld(reason, broken=False)]

    def _leave_broken(self, event: p.CollectiveFailed, before: WorkerState, now: float) -> list[p.Instruction]:
        self.reporting.clock.left(now, broken=True, torn=before in TRAINING)
        out = [p.BreakCollective(self.world.version, event.reason, entered=True), *self.position.restore()]
        moved = self.position.progress.step > self._entered_at
        self._fruitless = 0 if moved else self._fruitless + 1
        if self._fruitless >= MAX_FRUITLESS_WORLDS:
            self.state = S.GONE
            text = f"{self._fruitless} worlds in a row broke before a step; the last: {event.reason}"
            return [*out, p.Fail(JobFailedError, text)]
        self._left_because, self.left_broken = event.reason, True
        return [*out, p.LeaveWorld(event.reason, broken=True)]

    def _refuse_uneven_steps(self, event: p.Voted, before: WorkerState, now: float) -> list[p.Instruction]:
        text = self.position.disagreement(event, self.world.size)
        self.position.batch = None
        return [p.Fail(UserError if event.difference else RuntimeError, text)]

    def _cast_end_vote(self, event: p.Event, before: WorkerState, now: float) -> list[p.Instruction]:
        return [Command.CAST_END_VOTE]

    def _complete(self, event: p.Event, before: WorkerState, now: float) -> list[p.Instruction]:
        self.position.batch = None
        return [*_send(*self.reporting.flush()), Command.COMPLETE]

    def _leave_job(self, event: p.Event, before: WorkerState, now: float) -> list[p.Instruction]:
        self.request = None
        return [self.stopping or p.Fail(UnreachableError, self.lost or "this worker has left its job")]

    def _say_last_word(self, event: p.Said, before: WorkerState, now: float) -> list[p.Instruction]:
        assert isinstance(event.message, m.Finished | m.Failed)
        self.request = self.position.batch = None
        made = self.position.made > 0
        self.last_word = replace(event.message, trained=made) if isinstance(event.message, m.Failed) else event.message
        return _send(*self.reporting.flush(), self.last_word)


def _send(*messages: m.Message | None) -> list[p.Instruction]:
    return [p.Send(message) for message in messages if message is not None]


_TRIGGERS: Mapping[type[p.Event], Trigger] = {
    p.Synced: Trigger.SYNCED,
    p.BatchGiven: Trigger.BATCH,
    p.WorldLeft: Trigger.LEFT,
    p.CollectiveFailed: Trigger.FAILURE,
}
