"""The job: one step function over its workers, what must be saved after each step, and what people are shown.

`Job.step` is the only way in. It never raises for what a worker may send, however late or often. An event of a worker becomes a
trigger; `elasticdl.master.core.transitions` says what follows. Then the job looks at the whole: whether workers are to be launched
or let go, whether a world can be formed, whether the job is over. A job that follows another listens first
(`elasticdl.master.core.recovery`).
"""

from __future__ import annotations

from dataclasses import replace

from elasticdl.job.messages import Ask, Drain, Draining, Failed, Finished, Heartbeat, Hello, Notice, Progress
from elasticdl.master.core import events
from elasticdl.master.core.events import (
    AdoptWorld,
    EndJob,
    ExitCause,
    Instruction,
    KillWorker,
    LaunchWorker,
    NewSteps,
    Record,
    SaveState,
    Tell,
    is_unsaved,
)
from elasticdl.master.core.fleet import Fleet
from elasticdl.master.core.recovery import Recovery
from elasticdl.master.core.rendezvous import NOBODY, Rendezvous
from elasticdl.master.core.rule import ProgressLimits, Rule
from elasticdl.master.core.sizing import SizeRule
from elasticdl.master.core.slowness import SlowRule, pace_of
from elasticdl.master.core.transitions import Ending, TransitionContext, Transitions, Trigger
from elasticdl.master.core.values import (
    DONE,
    IN_WORLD,
    STARTING,
    Outcome,
    Phase,
    Settings,
    WorkerState,
    World,
)
from elasticdl.master.core.watching import Liveness, StuckRule
from elasticdl.master.core.worker_record import (
    JobSnapshot,
    Pulse,
    Records,
    Training,
    TrainingSnapshot,
    WorkerRecord,
    WorkerSnapshot,
    WorkerView,
)


class Job:
    """With a ``snapshot`` it goes on where an earlier one was, once it has been told what was found."""

    def __init__(self, settings: Settings, snapshot: JobSnapshot | None = None) -> None:
        self._past = self._saved = past = snapshot or JobSnapshot(settings.workers, settings.first_worker)
        self._finished: tuple[int, ...] = ()  # as of the last step
        self.settings = settings
        self.limits = past.limits  # as they are now: the specification says what they were at the start
        self.records = Records()
        scaled = "" if settings.gang else settings.job_name
        self.rendezvous = Rendezvous(self.records, settings.join_window, past, scaled)
        self.ending = Ending(past.outcome)
        self.transitions = Transitions(self.records, self.rendezvous, self.ending, settings)
        self.training = Training.restore(past.training)  # what it has achieved so far
        self.fleet = Fleet(self.records, settings, past, self.training)
        self.progress_limits = ProgressLimits(settings.progress_timeout)
        self.liveness = Liveness(self.records, settings.heartbeat_timeout, self.progress_limits)
        self.stuck, self.slow, self.size = (
            StuckRule(),
            SlowRule(replace=settings.replace_slow),
            SizeRule(settings, past),
        )
        self._rules: tuple[Rule, ...] = (self.stuck, self.slow, self.size)
        # After another master, until it is known what there is.
        self.recovery = Recovery(self.records, settings, past) if snapshot else None
        # An earlier master may have died just after it had ended the job.
        self.phase = Phase.STOPPING if past.phase.final else past.phase

    def step(self, event: events.Event, now: float) -> list[Instruction]:
        if self.phase.final:
            return []
        match event:  # the frequent ones change nothing that would have to be weighed
            case events.FromWorker(worker_id, Heartbeat() as beat):
                self.liveness.heard(worker_id, beat, now)
                if record := self.records.get(worker_id):
                    self.fleet.losses.heard(record)
                if self.recovery:
                    self.recovery.heard(worker_id, beat, now)
                return []
            case events.FromWorker(worker_id, Progress(told) as progress):
                world_version = getattr(self.records.get(worker_id), "world_version", 0)
                if self.rendezvous.world and world_version < max((s.world_version for s in told), default=1):
                    return []  # it was not a member of that world
                had_begun, counted = self.training.begun, self.training.counted
                steps, milestones = self.training.report(progress, now)
                self.fleet.crashes = self.fleet.crashes.after_steps(sum(each.step > counted for each in steps))
                self.progress_limits.stepped(steps, progress.total_steps, now)
                self.size.stepped(self.rendezvous.world, steps, now)
                news = NewSteps(steps, pace_of(self.records.of(WorkerState.MEMBER)))
                must_be_kept = milestones or self.training.begun is not had_begun
                return self._in_order([news, *milestones]) if must_be_kept else [news]
            case events.FromWorker(worker_id, Notice("worker_stuck") as notice):
                return self.stuck.told(self, worker_id, notice, now)
            case events.FromWorker(worker_id, Notice("worker_waits") as notice):
                return self._in_order(self.stuck.waits(self, worker_id, notice))
            case events.FromWorker(worker_id, Notice() as notice):
                self.training.notice(notice)
                return self._in_order([Record(notice.event, {**notice.fields, "worker": worker_id})])
            case events.StateSaveStalled(problem):
                self.liveness.save_problem = problem
                message = f"what was decided waits until the job's state is saved: {problem}"
                return [Record("warning", {"message": message})] if problem else []
        out: list[Instruction] = []
        if isinstance(event, events.FromWorker) and isinstance(event.said, Finished):
            out += self.training.finish(event.said)
        is_new = self.fleet.next_id == self.settings.first_worker
        if isinstance(event, events.WorkersFound) and event.workers and is_new and self.recovery is None:
            self.recovery = Recovery(self.records, self.settings, self._past)  # what was known of them is lost
        out += self._listen(self.recovery, event, now) if self.recovery else self._act(event, now)
        if self.recovery is None:
            out += self._advance(now)
        return self._in_order([*out, *self._note_phase()])

    def snapshot(self) -> JobSnapshot:
        """What another job needs to go on from here."""
        if self.recovery and not self.recovery.begun:
            return self._past
        known = self._past.workers  # of those whom a recovery has found nothing is known yet
        if not self.recovery:
            known = tuple(
                WorkerSnapshot(r.worker_id, r.state, r.reason, r.world_version, r.ready, r.failure, r.place_id)
                for r in self.records.values()
                if r.state is not WorkerState.COMPLETED
            )
        numbers, crashes = self.training.snapshot(), self.fleet.crashes
        return replace(self._durable(), training=numbers, workers=known, crashes=crashes)

    @property
    def reason(self) -> str:
        """Why it stands where it does, for people."""
        _, reason = self._assess()
        if problem := self.liveness.save_problem:
            reason = f"waits until the job's state is saved: {problem}"
        if not self.ending.outcome and (wait := self.fleet.wait):
            reason = f"{reason}; {wait}" if reason else wait
        return reason

    @property
    def workers(self) -> tuple[WorkerView, ...]:
        """Those whose processes are not gone, for people."""
        return tuple(r.view() for r in self.records.values() if r.state is not WorkerState.COMPLETED)

    # ---- what happens ----

    def _act(self, event: events.Event, now: float) -> list[Instruction]:
        match event:
            case events.Tick():
                return self._tick(now)
            case events.WorkerExited():
                return self._exited(event, now)
            case events.ScaleRequested(workers):
                if self.rendezvous.world and self.rendezvous.shortage and not self.settings.gang:
                    # It goes on with as many as it waits for already: who is asked for now joins when it comes.
                    least = min(workers.minimum, self.limits.minimum)
                    workers = workers.model_copy(update={"minimum": least})
                self.limits = workers
                self.fleet.scaled(workers.maximum)
                requested = Record("scale_requested", {"workers": str(workers)})
                return [requested, *self.size.scaled(self.limits, now), *self._reconcile(now)]
            case events.LauncherFailed(reason):
                self.ending.decide(Outcome(Phase.FAILED, reason))
            case events.StopRequested():
                checkpoint = event.checkpoint and not event.now
                self.ending.decide(Outcome(Phase.STOPPED, event.reason, checkpoint=checkpoint))
                out: list[Instruction] = [Record("stop_requested", {"reason": event.reason, "checkpoint": checkpoint})]
                return [*out, *self._dismiss(now), *self._kill_all("told to stop now", now)] if event.now else out
            case events.StacksFound():
                return self.stuck.found(self, event, now)
            case events.FromWorker(worker_id, Finished() as told):
                return self._take_finish(worker_id, told, now)
            case events.WorkerEvent():
                record = self.records.get(event.worker_id)
                if record and record.state not in (WorkerState.KILLING, WorkerState.COMPLETED):
                    return self._hear(event, record, now)
        return []

    # ---- what is said of a worker ----

    def _hear(self, event: events.WorkerEvent, record: WorkerRecord, now: float) -> list[Instruction]:
        """A worker has said something that still counts, or something was said of it."""
        match event:
            case events.WorkerPending(_, reason, node) if not record.pid:
                record.node = node
                known = (record.state, record.reason) == (WorkerState.PENDING, reason)
                out = [] if known else self._fire(record, Trigger.NO_PLACE, TransitionContext(now, reason))
                # Who waits for a replacement may have its place. It leaves the state where that finds it, if pods have such a place.
                # While others are still to leave, their places are free in a moment.
                if self.fleet.nobody_comes and self.settings.state_can_be_left:
                    waiting = [r for r in self.records.lingering() if not self.rendezvous.leaves_others(r)]
                    out += [Tell((r.worker_id,), Drain("no replacement has a place")) for r in waiting]
                return out
            case events.WorkerPlaced(_, host, pid, node, place) if not record.pid and record.state in STARTING:
                record.host, record.pid, record.node, record.place_id = host, pid, node, place
                record.quiet_since = now
                if not self.settings.own_program:  # which may do without the library, and then never connects
                    record.deadline = now + self.settings.start_timeout
                return self._fire(record, Trigger.PLACED, TransitionContext(now))  # it waits for nothing any more
            case events.FromWorker(_, Hello() as hello):
                return self._connected(hello, record, now)
            case events.WorkerDisconnected():
                if record.state is WorkerState.DRAINING:  # the end of its session, and it may take its time to end
                    record.pulse = None
                if record.pulse and record.connected:
                    record.pulse.heard = now
                self.records.connect(record, connected=False)
            case events.FromWorker(_, Ask() as asked):
                return self._asked(asked, record, now)
            case events.FromWorker(_, Draining() as draining):
                return self._draining(draining, record, now)
            case events.FromWorker(worker_id, Failed(_, message) as failed):
                cause = f"worker {worker_id} failed: {message}"
                said = self.fleet.failed(record, failed)
                return self._fire(record, Trigger.FAIL, TransitionContext(now, message, cause, said=said))
        return []

    def _connected(self, hello: Hello, record: WorkerRecord, now: float) -> list[Instruction]:
        self.records.connect(record, connected=True)
        record.unheard = False
        self.rendezvous.tell_again(record)
        record.host, record.pid = hello.host, hello.pid  # behind a shell the process that was placed is another one
        self.fleet.somebody_joined = True
        if record.state in (WorkerState.FINISHED, WorkerState.FAILED):
            return []
        record.quiet_since = None
        self.rendezvous.heard_of(hello.world_version)
        record.ready = record.ready or hello.world_version > 0
        record.pulse = record.pulse or Pulse(now, now)
        record.pulse.heard = now
        trigger = Trigger.CONNECT_IN_WORLD if hello.world_version else Trigger.CONNECT
        out = self._fire(record, trigger, TransitionContext(now, said=hello))
        if record.state is WorkerState.EXCLUDED:
            self.liveness.restart((record.worker_id,), now)
        return out

    def _asked(self, asked: Ask, record: WorkerRecord, now: float) -> list[Instruction]:
        record.ready = True
        if record.pulse:
            record.pulse.heard = now
        current = self.rendezvous.world.version if self.rendezvous.world else 0
        if record.state in IN_WORLD and asked.left_world < current:
            return []  # about an earlier world: late, or sent again
        self.rendezvous.heard_of(asked.left_world)
        cause = f"worker {record.worker_id}: {asked.reason or 'left the world'}"
        return self._fire(record, Trigger.JOIN, TransitionContext(now, cause=cause, said=asked))

    def _draining(self, told: Draining, record: WorkerRecord, now: float) -> list[Instruction]:
        lingers = told.lingers and self.rendezvous.alone(record)
        # Where others hold the state it need not wait, and is told so.
        trigger = Trigger.LINGER if lingers else Trigger.LET_GO if told.lingers else Trigger.DRAIN
        return [*self._leaves(record, trigger, told.reason, now), *self._reconcile(now)]

    def _relieve(self, now: float) -> list[Instruction]:
        """Whoever waits for another to take its state need not any more, once one has it that stays."""
        waiting = self.records.lingering()
        if not waiting or self.rendezvous.alone(waiting[0]):
            return []
        return [out for record in waiting for out in self._leaves(record, Trigger.LET_GO, record.reason, now)]

    def _leaves(self, record: WorkerRecord, trigger: Trigger, reason: str, now: float) -> list[Instruction]:
        """It was told to by somebody else than this master."""
        cause = f"worker {record.worker_id} leaves: {reason}"
        return self._fire(record, trigger, TransitionContext(now, reason, cause, lost=ExitCause.DRAINED))

    def _take_finish(self, worker_id: int, told: Finished, now: float) -> list[Instruction]:
        """One says for all that they have finished together; whoever it is, it counts."""
        self.rendezvous.together = self.rendezvous.together or told.together
        outcome = self.ending.outcome
        if told.together and outcome and outcome.phase is Phase.STOPPED:  # that came too late to stop anything
            self.ending.outcome = Outcome(Phase.SUCCEEDED, self.training.completion)
        record = self.records.get(worker_id)
        return self._fire(record, Trigger.FINISH, TransitionContext(now)) if record else []

    def _exited(self, event: events.WorkerExited, now: float) -> list[Instruction]:
        record = self.records.get(event.worker_id)
        if record is None or record.state is WorkerState.COMPLETED:
            return []
        runs, least = self.records.count(WorkerState.MEMBER) > 0, self.limits.minimum
        end = self.fleet.exited(record, event, world_runs=runs, least=least)
        left = {"cause": str(end.cause), "reason": end.reason, "code": event.code}
        out: list[Instruction] = [Record("worker_left", {"worker": event.worker_id, **left})]
        if end.warning:
            out.append(Record("warning", {"message": end.warning}))
        record.node = record.node or event.node  # one that is refused by a node was never placed
        # If the reason is the worker's own text, "leaves: " goes before it.
        told_why = end.reason == record.reason and record.state is WorkerState.DRAINING
        gone = f"worker {event.worker_id} {'leaves: ' if told_why else ''}{end.reason}"
        context = TransitionContext(now, end.reason, gone, lost=end.cause, clean=event.code == 0)
        out += self._fire(record, Trigger.EXIT, context)
        if end.fatal:
            self.ending.decide(Outcome(Phase.FAILED, end.fatal, event.output, checkpoint=end.keeps))
        return [*out, *self._reconcile(now)]

    def _fire(self, record: WorkerRecord, trigger: Trigger, context: TransitionContext) -> list[Instruction]:
        held_place = record.holds_place
        out = self.transitions.fire(record, trigger, context)
        if held_place and not record.holds_place and record.state not in DONE:
            why = context.cause or f"worker {record.worker_id} leaves"
            if warning := self.fleet.miss(record, why, context.reason, context.lost, now=context.now):
                out.append(Record("warning", {"message": warning}))
        if record.state is WorkerState.GONE:
            del self.records[record.worker_id]
        return out

    # ---- time ----

    def _tick(self, now: float) -> list[Instruction]:
        self._forgive_own_absence(now)
        if self.ending.outcome:
            return self._enforce_deadline(now)
        out = [instruction for rule in self._rules for instruction in rule.look(self, now)]
        return [*out, *self._relieve(now), *self._reconcile(now)]

    def _forgive_own_absence(self, now: float) -> float:
        """Move every deadline by the time in which the master could not hear or act. Returns that time."""
        absence = self.liveness.forgive_own_absence(now)
        self.ending.deadline += absence
        return absence

    # ---- what rules ask for ----

    @property
    def somebody_seems_slow(self) -> bool:
        return self.slow.suspects(self.rendezvous.active_members())

    def give_up(self, record: WorkerRecord, reason: str, now: float) -> list[Instruction]:
        why = f"worker {record.worker_id}: {reason}"
        return self._fire(record, Trigger.GIVE_UP, TransitionContext(now, reason, why, lost=ExitCause.FROZEN))

    def replace(self, record: WorkerRecord, reason: str, now: float) -> list[Instruction]:
        cause = f"worker {record.worker_id} is {reason}"
        return self._fire(record, Trigger.LET_GO, TransitionContext(now, reason, cause))

    def leave_world(self, cause: str, now: float) -> None:
        self.rendezvous.begin(now, broken=True).causes[NOBODY] = cause

    # ---- the whole ----

    def _reconcile(self, now: float) -> list[Instruction]:
        """Launch what is missing, let go what is too much."""
        rendezvous = self.rendezvous
        if self.recovery or self.ending.outcome or rendezvous.ending or rendezvous.recovering_from_break(now):
            return []
        out: list[Instruction] = []
        most, reason = self.size.most(self.limits)
        missing, too_many = self.fleet.plan(most, rendezvous.retention_order, now)
        for record in too_many:
            cause = f"worker {record.worker_id} leaves: {reason}"
            out += self.transitions.fire(record, Trigger.LET_GO, TransitionContext(now, reason, cause))
        for _ in range(missing):
            out += self.fleet.launch()
        return out

    def _advance(self, now: float) -> list[Instruction]:
        """After each event: form a new world if it is time to, or let all workers leave."""
        if self.ending.outcome:
            return self._end(now)
        rendezvous = self.rendezvous
        for record in rendezvous.cut_off():  # each is a cause of the change, and may come back later
            lost = f"worker {record.worker_id} lost its connection"
            self.transitions.fire(record, Trigger.EXCLUDE, TransitionContext(now, cause=lost))
        out: list[Instruction] = []
        if rendezvous.reopened:
            self._reopen(now)
            out += self._reconcile(now)
        rendezvous.let_newcomers_in(now, self.size.allowed(self.limits))
        out += self._tell_members(now)
        if world := rendezvous.next_world(now, self.size.allowed(self.limits)):
            out += self._publish(world, now)
        if self._is_complete():
            self.ending.decide(Outcome(Phase.SUCCEEDED, self.training.completion))
            out += self._end(now)
        return out

    def _tell_members(self, now: float) -> list[Instruction]:
        notice = self.rendezvous.notice()
        if notice is None:
            return []
        (to, message), broken = notice, self.rendezvous.broken
        if broken:
            self.liveness.restart(to, now)
        fields = {"world": message.world_version, "reason": message.reason}
        return [Tell(to, message), Record("world_broken" if broken else "change_announced", fields)]

    def _publish(self, world: World, now: float) -> list[Instruction]:
        rendezvous = self.rendezvous
        if rendezvous.ending:  # what looked like the end was not
            self._reopen(now)
        since = rendezvous.change.since if rendezvous.change else now
        chosen = frozenset(world.worker_ids)
        for record in self.records.of(WorkerState.STANDBY, WorkerState.REJOINING):
            enters = record.worker_id in chosen
            self.transitions.fire(record, Trigger.ENTER if enters else Trigger.PASS_OVER, TransitionContext(now))
        for rank, worker_id in enumerate(world.worker_ids):
            record = self.records[worker_id]
            if not record.world_version:
                self.fleet.losses.reached_world(record)
            record.world_version, record.rank = world.version, rank
        rendezvous.adopt(world)
        self.fleet.crashes = self.fleet.crashes.after_world()
        self.liveness.restart(world.worker_ids, now)
        holders = [member.step for member in world.members if member.has_state]
        fields = {
            "world": world.version,
            "members": list(world.worker_ids),
            # Before the first step they may have loaded a checkpoint of their own.
            "step": max(holders or [member.step for member in world.members]),
            "reason": world.reason,
            "seconds": round(now - since, 6),
        }
        out: list[Instruction] = [Tell(world.worker_ids, world), Record("world_formed", fields)]
        if self.training.step and not holders:
            message = (
                f"no worker was left that held the state after step {self.training.lose_state()}: training goes on from "
                "what the last has left, or the last checkpoint, or from the beginning if there is neither"
            )
            out.append(Record("warning", {"message": message}))
        return out

    def _reopen(self, now: float) -> None:
        """Training goes on; workers that believe it is over are replaced."""
        for record in self.records.of(*DONE):
            record.world_version = 0  # nobody waits for what it may still write
            self._fire(record, Trigger.REOPEN, TransitionContext(now, "finished before the others"))

    # ---- the end ----

    def _is_complete(self) -> bool:
        """The user's own program may have more to do after its training, and is waited for."""
        if self.rendezvous.complete:
            return not (self.settings.own_program and self.records.of(WorkerState.FINISHED))
        return self.rendezvous.world is None and self.fleet.all_completed

    def _end(self, now: float) -> list[Instruction]:
        """It is decided how the job ends: let all workers leave."""
        out = self._dismiss(now)
        if self.rendezvous.broken:  # its members must be told, but no other world is formed
            out += self._tell_members(now)
        outcome = self.ending.outcome
        if outcome and self.all_gone():
            out.append(EndJob(outcome.phase, outcome.reason, outcome.traceback))
        return out

    def _dismiss(self, now: float) -> list[Instruction]:
        outcome, out = self.ending.outcome, list[Instruction]()
        if outcome is None or self.ending.dismissed:
            return out
        self.ending.deadline = now + self.settings.stop_grace
        for record in self.records.values():
            before, record.remark = record.state, ""  # nobody watches over it any more
            out += self.transitions.fire(record, Trigger.DISMISS, TransitionContext(now, outcome.reason))
            if record.state is not before:
                record.reason = f"the job ends: {outcome.reason}"
        return out

    def _enforce_deadline(self, now: float) -> list[Instruction]:
        if now <= self.ending.deadline:
            return []
        grace = f"{self.settings.stop_grace:g} s"
        if not self.ending.killed:
            return self._kill_all(f"had not left {grace} after it was to", now)
        left = sorted(r.worker_id for r in self.records.values() if r.state is not WorkerState.COMPLETED)
        self.records.clear()
        return [Record("warning", {"message": f"workers {left} are still there {grace} after they were killed"})]

    def _kill_all(self, reason: str, now: float) -> list[Instruction]:
        self.ending.killed, self.ending.deadline = True, now + self.settings.stop_grace
        return [KillWorker(r.worker_id, reason) for r in self.records.values() if r.state is not WorkerState.COMPLETED]

    def all_gone(self) -> bool:
        return all(record.state is WorkerState.COMPLETED for record in self.records.values())

    # ---- after another master ----

    def _listen(self, recovery: Recovery, event: events.Event, now: float) -> list[Instruction]:
        """Hold the event back, unless it can't wait; go on once everybody who is awaited was heard of, or the time is over."""
        out: list[Instruction] = []
        match event:
            case events.WorkersFound(found):
                out += recovery.begin(found, now)
                self.fleet.next_id = max([self.fleet.next_id, *(worker_id + 1 for worker_id in self.records)])
                if self.ending.outcome:
                    return [*out, *self._take_up(recovery, now)]
            case events.StopRequested() | events.LauncherFailed() if recovery.begun:
                # No world is to be formed any more.
                return [*self._take_up(recovery, now), *self._act(event, now)]
            case events.ScaleRequested():
                return self._act(event, now)
            case events.Tick():
                recovery.forgive(self._forgive_own_absence(now))
            case events.FromWorker(worker_id, Finished() as told) if worker_id in self.records:
                self._take_finish(worker_id, told, now)  # saved as soon as it is taken
            case _:
                recovery.hold(event, now)
        return [*out, *self._take_up(recovery, now)] if recovery.is_over(now) else out

    def _take_up(self, recovery: Recovery, now: float) -> list[Instruction]:
        """Go on from what was found, as if it had always been so."""
        missing, world = recovery.missing(now), recovery.world
        out: list[Instruction] = [recovery.report(now)]
        if world:
            out.append(self._adopt(world, now))
        late = f"had not come back {recovery.waited(now):.0f} s after the master was started again"
        for worker_id in missing:  # first, as nobody may leave who holds the state for none but these
            if record := self.records.get(worker_id):
                out += self.give_up(record, late, now)
        for event in recovery.held:
            out += self._act(event, now)
        # Only now, so that who is to be launched or let go is seen from the whole.
        self.recovery = None
        return [*out, *self._reconcile(now)]

    def _adopt(self, world: World, now: float) -> Instruction:
        """Its members stand in this world, wherever they are, unless something became of them."""
        rendezvous, fleet = self.rendezvous, self.fleet
        rendezvous.adopt(world)
        fleet.crashes = fleet.crashes.after_world()
        for rank, member in enumerate(world.members):
            record = self.records.get(member.worker_id)
            if record is None:  # of a world that was saved, and not saved with it: the master before has seen its end
                cause = f"worker {member.worker_id} had left the world before"
                rendezvous.begin(now, broken=True).causes[member.worker_id] = cause
                continue
            record.world_version, record.rank, record.ready = world.version, rank, True
            record.step, record.epoch, record.has_state = member.step, member.epoch, True
            is_draining = record.state is WorkerState.DRAINING
            what = f"leaves: {record.reason}" if is_draining else "was lost while there was no master"
            cause = f"worker {member.worker_id} {what}"
            self.transitions.fire(record, Trigger.ADOPT, TransitionContext(now, cause=cause))
        return AdoptWorld(world)

    # ---- phases, and what must be saved ----

    def _note_phase(self) -> list[Instruction]:
        now, reason = self._assess()
        out: list[Instruction] = []
        for phase in (Phase.STOPPING, now) if now.final else (now,):
            if phase is not self.phase:
                self.phase = phase
                out.append(Record("phase", {"phase": str(phase), "reason": reason}))
        return out

    def _assess(self) -> tuple[Phase, str]:
        """Where the job stands by what is so now, and why."""
        outcome, rendezvous = self.ending.outcome, self.rendezvous
        if self.recovery:
            listening = "the master was started again, and waits for workers to come back"
            return self.phase, outcome.reason if outcome else listening
        if outcome:
            return outcome.phase if self.all_gone() else Phase.STOPPING, outcome.reason
        if rendezvous.world:
            return Phase.WAITING if rendezvous.shortage else Phase.RUNNING, rendezvous.shortage
        if self.settings.own_program and any(record.pid for record in self.records.values()):
            return Phase.RUNNING, rendezvous.shortage or "no worker has joined yet"
        phase = Phase.WAITING if rendezvous.version else Phase.PENDING
        return phase, rendezvous.shortage or self.fleet.awaited or "workers are starting"

    def _durable(self) -> JobSnapshot:
        """The part of the snapshot that must not be lost."""
        rendezvous = self.rendezvous
        # Workers are added one by one and taken out all at once (REOPEN): unless their number changes, they do not.
        if len(self._finished) != self.records.count(*DONE):
            self._finished = tuple(record.worker_id for record in self.records.of(*DONE))
        return JobSnapshot(
            self.limits,
            self.fleet.next_id,
            self._finished,
            rendezvous.together,
            rendezvous.world
            or self._past.world,  # one that was left for a later one still says which versions are used
            self.phase,
            self.ending.outcome,
            TrainingSnapshot(self.training.epochs_done, self.training.begun),
            target=self.size.target,
        )

    def _in_order(self, out: list[Instruction]) -> list[Instruction]:
        """What need not be saved first, then the saving, then the rest. Workers of a world that ends hear of it before anything is
        recorded, as a slow disk must not hold them up. Starting processes takes longest, so it is last."""
        before, self._saved = self._saved, self._durable()
        save = [SaveState()] if self._saved != before else []
        first = [instruction for instruction in out if is_unsaved(instruction)]
        first.sort(key=lambda instruction: not isinstance(instruction, Tell))
        rest = [instruction for instruction in out if not is_unsaved(instruction)]
        rest.sort(key=lambda instruction: isinstance(instruction, LaunchWorker))
        return [*first, *save, *rest]
