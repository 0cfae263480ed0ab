"""The workers of a job, and what is done about them.

An event of a worker becomes a trigger; `elasticdl.master.core.transitions` says what follows. Then `Workers` looks at
the whole: whether workers are to be launched or let go, whether a world can be formed, whether the job is over.
"""

from __future__ import annotations

from elasticdl.job.messages import Ask, Drain, Draining, Failed, Finished, Hello
from elasticdl.master.core.fleet import TRIES_OF_PLACE, Departure, Fleet
from elasticdl.master.core.transitions import Ending, TransitionContext, Transitions, Trigger
from elasticdl.master.rules.liveness import Liveness
from elasticdl.master.rules.progress_limits import ProgressLimits
from elasticdl.master.rules.rule import Rule
from elasticdl.master.rules.sizing import Sizing
from elasticdl.master.rules.slowness import SlowWorkers
from elasticdl.master.rules.watching import Watch
from elasticdl.master.state import events as e
from elasticdl.master.state import instructions as i
from elasticdl.master.state.instructions import Instruction, Outcome, Phase, Record
from elasticdl.master.state.records_by_state import Records
from elasticdl.master.state.rendezvous import NOBODY, Rendezvous
from elasticdl.master.state.snapshot import JobSnapshot
from elasticdl.master.state.states import DONE, IN_WORLD, STARTING, WorkerState
from elasticdl.master.state.training import Training
from elasticdl.master.state.values import Settings, World
from elasticdl.master.state.worker_record import NotificationLevel, Pulse, WorkerRecord

_S = WorkerState


class Workers:
    def __init__(self, settings: Settings, past: JobSnapshot) -> None:
        self.settings = settings
        self.limits = past.limits
        self.records = Records()
        self.rendezvous = Rendezvous(
            self.records, settings.join_window, past, "" if settings.gang else settings.job_name
        )
        self.ending = Ending(past.outcome)
        self.transitions = Transitions(self.records, self.rendezvous, self.ending, settings)
        self.training = Training.restore(past.training)
        self.fleet = Fleet(self.records, settings, past, self.training)
        self.progress_limits = ProgressLimits(settings.progress_timeout)
        self.liveness = Liveness(self.records, settings.heartbeat_timeout, self.progress_limits)
        self.watch, self.slow_workers, self.sizing = Watch(self), SlowWorkers(self), Sizing(self, past)
        self._rules: tuple[Rule, ...] = (self.watch, self.slow_workers)
        self.listening = False  # after another master, until it is known what there is

    def act(self, event: e.Event, now: float) -> list[Instruction]:
        match event:
            case e.Tick():
                return self._tick(now)
            case e.WorkerExited():
                return self._exited(event, now)
            case e.ScaleRequested(workers):
                if self.rendezvous.world and self.rendezvous.shortage and not self.settings.gang:
                    # It goes on with as many as it waits for already: who is asked for now joins when it comes.
                    least = min(workers.minimum, self.limits.minimum)
                    workers = workers.model_copy(update={"minimum": least})
                self.limits = workers
                self.fleet.scaled(workers.maximum)
                requested = Record("scale_requested", {"workers": str(workers)})
                return [requested, *self.sizing.scaled(), *self.reconcile(now)]
            case e.LauncherFailed(reason):
                self.ending.decide(Outcome(Phase.FAILED, reason))
            case e.StopRequested():
                checkpoint = event.checkpoint and not event.now
                self.ending.decide(Outcome(Phase.STOPPED, event.reason, checkpoint=checkpoint))
                out: list[Instruction] = [Record("stop_requested", {"reason": event.reason, "checkpoint": checkpoint})]
                return [*out, *self._dismiss(now), *self._kill_all("told to stop now", now)] if event.now else out
            case e.StacksFound():
                return self.watch.found(event, now)
            case e.FromWorker(worker_id, Finished() as told):
                return self.finished(worker_id, told, now)
            case e.WorkerEvent():
                record = self.records.get(event.worker_id)
                if record and record.state not in (_S.KILLING, _S.COMPLETED):
                    return self._hear(event, record, now)
        return []

    # ---- what is said of a worker ----

    def _hear(self, event: e.WorkerEvent, record: WorkerRecord, now: float) -> list[Instruction]:
        """A worker has said something that still counts, or something was said of it."""
        match event:
            case e.WorkerPending(_, reason, node) if not record.pid:
                record.node = node
                known = (record.state, record.reason) == (_S.PENDING, reason)
                out = [] if known else self._fire(record, Trigger.NO_PLACE, TransitionContext(now, reason))
                # Who waits for a replacement may have its place. It leaves the state where that finds it, if pods have such a place.
                # While others are still to leave, their places are free in a moment.
                if self.fleet.nobody_comes and self.settings.state_can_be_left:
                    waiting = [r for r in self.records.lingering() if not self.rendezvous.leaves_others(r)]
                    out += [i.Tell((r.worker_id,), Drain("no replacement has a place")) for r in waiting]
                return out
            case e.WorkerPlaced(_, host, pid, node, place) if not record.pid and record.state in STARTING:
                record.host, record.pid, record.node, record.place_id = host, pid, node, place
                record.quiet_since = now
                if not self.settings.own_program:  # which may do without the library, and then never connects
                    record.deadline = now + self.settings.start_timeout
                return self._fire(record, Trigger.PLACED, TransitionContext(now))  # it waits for nothing any more
            case e.FromWorker(_, Hello() as hello):
                return self._connected(hello, record, now)
            case e.WorkerDisconnected():
                if record.state is _S.DRAINING:  # the end of its session, and it may take its time to end
                    record.pulse = None
                if record.pulse and record.connected:
                    record.pulse.heard = now
                self.records.connect(record, connected=False)
            case e.FromWorker(_, Ask() as asked):
                return self._asked(asked, record, now)
            case e.FromWorker(_, Draining() as draining):
                return self._draining(draining, record, now)
            case e.FromWorker(worker_id, Failed(_, message) as failed):
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
        if record.state in (_S.FINISHED, _S.FAILED):
            return []
        record.quiet_since = None
        self.rendezvous.version = max(self.rendezvous.version, hello.world_version)
        record.ready = record.ready or hello.world_version > 0
        record.pulse = record.pulse or Pulse(now, now)
        record.pulse.heard = now
        trigger = Trigger.CONNECT_IN_WORLD if hello.world_version else Trigger.CONNECT
        out = self._fire(record, trigger, TransitionContext(now, said=hello))
        if record.state is _S.EXCLUDED:
            self.liveness.restart((record.worker_id,), now)
        return out

    def _asked(self, asked: Ask, record: WorkerRecord, now: float) -> list[Instruction]:
        record.ready = True
        if record.pulse:
            record.pulse.heard = now
        current = self.rendezvous.world.version if self.rendezvous.world else 0
        if record.state in IN_WORLD and asked.left_world < current:
            return []  # about an earlier world: late, or sent again
        self.rendezvous.version = max(self.rendezvous.version, asked.left_world)
        cause = f"worker {record.worker_id}: {asked.reason or 'left the world'}"
        return self._fire(record, Trigger.JOIN, TransitionContext(now, cause=cause, said=asked))

    def _draining(self, told: Draining, record: WorkerRecord, now: float) -> list[Instruction]:
        lingers = told.lingers and self.rendezvous.alone(record)
        cause = f"worker {record.worker_id} leaves: {told.reason}"
        context = TransitionContext(now, told.reason, cause, lost=e.ExitCause.DRAINED)
        out = self._fire(record, Trigger.LINGER if lingers else Trigger.DRAIN, context)
        if told.lingers and not lingers:
            out.append(i.Tell((record.worker_id,), Drain(told.reason)))  # others hold the state: it need not wait
        return [*out, *self.reconcile(now)]

    def finished(self, worker_id: int, told: Finished, now: float) -> list[Instruction]:
        """One says for all that they have finished together; whoever it is, it counts."""
        self.rendezvous.together = self.rendezvous.together or told.together
        outcome = self.ending.outcome
        if told.together and outcome and outcome.phase is Phase.STOPPED:  # that came too late to stop anything
            self.ending.outcome = Outcome(Phase.SUCCEEDED, self.training.completion)
        record = self.records.get(worker_id)
        return self._fire(record, Trigger.FINISH, TransitionContext(now)) if record else []

    def _exited(self, event: e.WorkerExited, now: float) -> list[Instruction]:
        record = self.records.get(event.worker_id)
        if record is None or record.state is _S.COMPLETED:
            return []
        runs, least = self.records.count(_S.MEMBER) > 0, self.limits.minimum
        cause, reason, fatal, warning = self.fleet.exited(record, event, world_runs=runs, least=least)
        left = {"cause": str(cause), "reason": reason, "code": event.code}
        out: list[Instruction] = [Record("worker_left", {"worker": event.worker_id, **left})]
        if warning:
            out.append(Record("warning", {"message": warning}))
        record.node = record.node or event.node  # one that is refused by a node was never placed
        told_why = reason == record.reason and record.state is _S.DRAINING  # a sentence of its own
        gone = f"worker {event.worker_id} {'leaves: ' if told_why else ''}{reason}"
        context = TransitionContext(now, reason, gone, lost=cause, clean=event.code == 0)
        out += self._fire(record, Trigger.EXIT, context)
        if fatal:
            keeps = record.tries >= TRIES_OF_PLACE  # nothing is wrong with those that train
            self.ending.decide(Outcome(Phase.FAILED, fatal, event.output, checkpoint=keeps))
        return [*out, *self.reconcile(now)]

    def _fire(self, record: WorkerRecord, trigger: Trigger, context: TransitionContext) -> list[Instruction]:
        held_place = record.holds_place
        out = self.transitions.fire(record, trigger, context)
        if record.worker_id == self.slow_workers.outgoing and not record.holds_place:
            self.slow_workers.outgoing = None  # its replacement was asked for before it left
        elif held_place and not record.holds_place and record.state not in DONE:
            why = context.cause or f"worker {record.worker_id} leaves"
            if warning := self.fleet.miss(record, why, context.reason, context.lost, now=context.now):
                out.append(Record("warning", {"message": warning}))
        if record.state is _S.GONE:
            del self.records[record.worker_id]
        return out

    # ---- time ----

    def _tick(self, now: float) -> list[Instruction]:
        self.forgive_own_absence(now)
        if self.ending.outcome:
            return self._enforce_deadline(now)
        out = [instruction for rule in self._rules for instruction in rule.look(now)]
        return [*out, *self.reconcile(now)]

    def forgive_own_absence(self, now: float) -> float:
        """Move every deadline by the time in which the master could not hear or act. Returns that time."""
        absence = self.liveness.forgive_own_absence(now)
        self.ending.deadline += absence
        return absence

    # ---- what rules ask for ----

    def give_up(self, record: WorkerRecord, reason: str, now: float) -> list[Instruction]:
        why = f"worker {record.worker_id}: {reason}"
        return self._fire(record, Trigger.GIVE_UP, TransitionContext(now, reason, why, lost=e.ExitCause.FROZEN))

    def replace(self, record: WorkerRecord, reason: str, now: float, *, first: bool) -> list[Instruction]:
        cause = f"worker {record.worker_id} is {reason}"
        if not first:
            return self._fire(record, Trigger.LET_GO, TransitionContext(now, reason, cause))
        self.fleet.departures.append(Departure(cause, record.node))
        return []

    def let_go(self, record: WorkerRecord, reason: str, now: float) -> list[Instruction]:
        cause = f"worker {record.worker_id} is {reason}"
        return self.transitions.fire(record, Trigger.LET_GO, TransitionContext(now, reason, cause))

    def leave_world(self, cause: str, now: float) -> None:
        self.rendezvous.begin(now, broken=True).causes[NOBODY] = cause

    # ---- the whole ----

    def reconcile(self, now: float) -> list[Instruction]:
        """Launch what is missing, let go what is too much."""
        rendezvous = self.rendezvous
        if self.listening or self.ending.outcome or rendezvous.ending or rendezvous.recovering_from_break(now):
            return []
        out: list[Instruction] = []
        most, reason = self.sizing.most()
        most += self.slow_workers.outgoing is not None
        missing, too_many = self.fleet.plan(most, rendezvous.retention_order, now)
        for record in too_many:
            cause = f"worker {record.worker_id} leaves: {reason}"
            out += self.transitions.fire(record, Trigger.LET_GO, TransitionContext(now, reason, cause))
        for _ in range(missing):
            out += self.fleet.launch()
        return out

    def advance(self, now: float) -> list[Instruction]:
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
            out += self.reconcile(now)
        rendezvous.let_newcomers_in(now, self.sizing.allowed())
        out += self._tell_members(now)
        if world := rendezvous.next_world(now, self.sizing.allowed()):
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
        for worker_id in to:
            self.records[worker_id].notified = NotificationLevel.BROKEN if broken else NotificationLevel.CHANGE
        if broken:
            self.liveness.restart(to, now)
        fields = {"world": message.world_version, "reason": message.reason}
        return [i.Tell(to, message), Record("world_broken" if broken else "change_announced", fields)]

    def _publish(self, world: World, now: float) -> list[Instruction]:
        rendezvous = self.rendezvous
        if rendezvous.ending:  # what looked like the end was not
            self._reopen(now)
        since = rendezvous.change.since if rendezvous.change else now
        chosen = frozenset(world.worker_ids)
        for record in self.records.of(_S.STANDBY, _S.REJOINING):
            enters = record.worker_id in chosen
            self.transitions.fire(record, Trigger.ENTER if enters else Trigger.PASS_OVER, TransitionContext(now))
        for rank, worker_id in enumerate(world.worker_ids):
            record = self.records[worker_id]
            if not record.world_version:
                self.fleet.entered_world(record)
            record.world_version, record.rank, record.notified = world.version, rank, NotificationLevel.NOTHING
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
        out: list[Instruction] = [i.Tell(world.worker_ids, world), Record("world_formed", fields)]
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
            return not (self.settings.own_program and self.records.of(_S.FINISHED))
        return self.rendezvous.world is None and self.fleet.all_completed

    def _end(self, now: float) -> list[Instruction]:
        """It is decided how the job ends: let all workers leave."""
        out = self._dismiss(now)
        if self.rendezvous.broken:  # its members must be told, but no other world is formed
            out += self._tell_members(now)
        outcome = self.ending.outcome
        if outcome and self.all_gone():
            out.append(i.EndJob(outcome.phase, outcome.reason, outcome.traceback))
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
        left = sorted(r.worker_id for r in self.records.values() if r.state is not _S.COMPLETED)
        self.records.clear()
        return [Record("warning", {"message": f"workers {left} are still there {grace} after they were killed"})]

    def _kill_all(self, reason: str, now: float) -> list[Instruction]:
        self.ending.killed, self.ending.deadline = True, now + self.settings.stop_grace
        return [i.KillWorker(r.worker_id, reason) for r in self.records.values() if r.state is not _S.COMPLETED]

    def all_gone(self) -> bool:
        return all(record.state is _S.COMPLETED for record in self.records.values())
