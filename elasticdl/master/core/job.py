"""The job: one step function over the records of its workers.

`Job.step` is the only way in. It never raises for what a worker may send, however late or often. It says which trigger
an event means, and `elasticdl.master.core.lifecycle` what follows; then it looks at the whole: whether workers are to be
launched or let go, whether a world can be formed, whether the job is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elasticdl.master.core import events as e
from elasticdl.master.core import instructions as i
from elasticdl.master.core.ending import Ending, Overdue
from elasticdl.master.core.fleet import DONE, Fleet
from elasticdl.master.core.instructions import Instruction, Outcome, Phase, Record
from elasticdl.master.core.invariants import Core, check
from elasticdl.master.core.lifecycle import JOB, STARTING, Condition, Trigger, WorkerState
from elasticdl.master.core.liveness import Liveness
from elasticdl.master.core.record import NotificationLevel, Pulse, WorkerRecord
from elasticdl.master.core.recovery import Recovery, take_up
from elasticdl.master.core.rendezvous import Rendezvous
from elasticdl.master.core.settings import Settings
from elasticdl.master.core.snapshot import JobSnapshot, TrainingSnapshot, WorkerSnapshot
from elasticdl.master.core.training import Training
from elasticdl.master.core.transitions import Happening, Transitions
from elasticdl.master.core.values import World
from elasticdl.master.core.view import JobView, view_worker

# Between asking a stuck worker for its stacks and killing it.
TIME_TO_DUMP = 1.0
_S = WorkerState


class Job:
    """With a ``snapshot`` it goes on where an earlier one was, once it has been told what was found."""

    def __init__(self, settings: Settings, snapshot: JobSnapshot | None = None) -> None:
        self._past = past = snapshot or JobSnapshot(settings.workers)
        self._settings = settings
        self._limits = past.limits
        self._records: dict[int, WorkerRecord] = {}
        self._rendezvous = Rendezvous(self._records, settings.join_window)
        self._rendezvous.version = past.world.version if past.world else 0
        self._ending = Ending(settings.stop_grace, past.outcome)
        self._transitions = Transitions(self._rendezvous, self._ending, settings)
        self._fleet = Fleet(self._records, settings, past)
        self._liveness = Liveness(self._records, settings.heartbeat_timeout, settings.progress_timeout)
        self._recovery = Recovery(self._records, settings, past.world) if snapshot else None
        self._phase = Phase.STOPPING if past.phase.final else past.phase  # it may have died of its last deed
        self._save_problem = ""
        self.training = Training.restore(past.training)
        self._saved = past

    def step(self, event: e.Event, now: float) -> list[Instruction]:
        if self._phase.final:
            return []
        match event:  # the frequent ones change nothing that would have to be weighed
            case e.HeartbeatReceived():
                self._liveness.heard(event, now)
                if self._recovery:
                    self._recovery.heard(event, now)
                return []
            case e.ProgressReported():
                report, milestones = self.training.report(event, now)
                self._fleet.crashes.trained(len(report.steps))
                return self._in_order([i.NewSteps(report), *milestones]) if milestones else [i.NewSteps(report)]
            case e.PauseReported():
                return [Record("pause", {**event.parts, "worker": event.worker_id})]
            case e.NoticeReported():
                self.training.notice(event)
                return self._in_order([Record(event.event, {**event.fields, "worker": event.worker_id})])
            case e.StateSaveStalled(reason):
                self._save_problem = reason
                message = f"what was decided waits until the job's state is saved: {reason}"
                return [Record("warning", {"message": message})]
            case e.StateSaved():
                self._save_problem = ""
                return []
        out: list[Instruction] = [*self.training.finish(event)] if isinstance(event, e.WorkerFinished) else []
        out += self._handle(event, now)
        if self._recovery is None:
            out += self._end(now) if self._ending.outcome else self._advance(now)
        return self._in_order([*out, *self._note_phase()])

    def snapshot(self) -> JobSnapshot:
        """What another job needs to go on from here."""
        if self._recovery and not self._recovery.begun:
            return self._past
        workers = tuple(
            WorkerSnapshot(r.worker_id, r.state, r.reason, r.world_version, r.ready, r.failure)
            for r in self._records.values()
            if r.state is not _S.COMPLETED
        )
        numbers, crashes = self.training.snapshot(), self._fleet.crashes.snapshot()
        return replace(self._durable(), training=numbers, workers=workers, crashes=crashes)

    def view(self) -> JobView:
        world, outcome = self._rendezvous.world, self._ending.outcome
        _, reason = self._assess()
        return JobView(
            phase=self._phase,
            reason=f"waits until the job's state is saved: {self._save_problem}" if self._save_problem else reason,
            traceback=outcome.traceback if outcome else "",
            world_version=self._rendezvous.version,
            last_change=world.reason if world else "",
            limits=self._limits,
            workers=tuple(view_worker(r) for r in self._records.values() if r.state is not _S.COMPLETED),
        )

    def validate(self) -> None:
        """
        Raises:
            InvariantError: something is so that must never be.
        """
        recovering = self._recovery is not None
        check(Core(self._records, self._rendezvous, self._fleet, self._ending, self._phase, recovering))

    # ---- after another master ----

    def _handle(self, event: e.Event, now: float) -> list[Instruction]:
        if isinstance(event, e.WorkersFound):
            return self._find(event, now)
        return self._act(event, now) if self._recovery is None else self._listen(event, self._recovery, now)

    def _find(self, event: e.WorkersFound, now: float) -> list[Instruction]:
        if self._recovery is None and event.workers and self._fleet.next_id == 0:  # what was known of them is lost
            self._recovery = Recovery(self._records, self._settings, None)
        recovery = self._recovery
        if recovery is None or recovery.begun:
            return []
        findings = take_up(self._past, event.workers, self._settings, now)
        self._records.update(findings.records)
        self._fleet.next_id = max([self._fleet.next_id, *(worker_id + 1 for worker_id in self._records)])
        recovery.begin(event.workers, frozenset(worker.worker_id for worker in self._past.workers), now)
        for worker_id in findings.missing:
            reason = "it was not there when the master started again"
            recovery.hold(e.WorkerExited(worker_id, e.ExitCause.DELETED, -1, reason), now)
        condemned = [r for r in self._rendezvous.of(_S.KILLING) if r.worker_id not in findings.missing]
        out: list[Instruction] = [i.KillWorker(record.worker_id, record.reason) for record in condemned]
        return [*out, *self._recover(recovery, now)] if self._ending.outcome or recovery.over(now) else out

    def _listen(self, event: e.Event, recovery: Recovery, now: float) -> list[Instruction]:
        match event:
            case e.StopRequested() | e.LauncherFailed() if recovery.begun:  # no world is to be formed any more
                return [*self._recover(recovery, now), *self._act(event, now)]
            case e.ScaleRequested():
                return self._act(event, now)
            case e.Tick():
                recovery.forgive(self._liveness.forgive_own_absence(now))
            case e.WorkerFinished(worker_id) if worker_id in self._records:  # must be saved as soon as it is taken
                self._finished(event, self._records[worker_id], now)
            case _:
                recovery.hold(event, now)
        return self._recover(recovery, now) if recovery.over(now) else []

    def _recover(self, recovery: Recovery, now: float) -> list[Instruction]:
        """Take up what was found, and go on as if it had always been so."""
        world, missing = recovery.world, recovery.missing if recovery.over(now) else []
        fields = {
            "world": world.version if world else 0,
            "members": list(world.worker_ids) if world else [],
            "missing": missing,
            "seconds": round(recovery.waited(now), 6),
        }
        out: list[Instruction] = [Record("master_restarted", fields)]
        if world:
            out += self._adopt(world, now)
        for event in recovery.held:
            out += self._act(event, now)
        late = f"had not come back {recovery.waited(now):.0f} s after the master was started again"
        for worker_id in missing:
            if record := self._records.get(worker_id):
                out += self._give_up(record, late, now)
        self._recovery = None  # only now, so that who is to be launched or let go is seen from the whole
        return [*out, *self._reconcile(now)]

    def _adopt(self, world: World, now: float) -> list[Instruction]:
        """Its members stand in this world, wherever they are, unless something became of them."""
        self._rendezvous.adopt(world)
        self._fleet.crashes.reached_world()
        for rank, member in enumerate(world.members):
            lost = f"worker {member.worker_id} was lost while there was no master"
            record = self._records.get(member.worker_id)
            if record is None:
                self._rendezvous.begin(now, broken=True).causes[member.worker_id] = lost
                continue
            record.world_version, record.rank, record.ready = world.version, rank, True
            record.step, record.epoch, record.has_state = member.step, member.epoch, True
            cause = f"worker {member.worker_id} leaves: {record.reason}" if record.state is _S.DRAINING else lost
            self._transitions.fire(record, Trigger.ADOPT, Happening(now, cause=cause))
        return [i.AdoptWorld(world)]

    # ---- events ----

    def _act(self, event: e.Event, now: float) -> list[Instruction]:
        match event:
            case e.Tick():
                return self._tick(now)
            case e.WorkerExited():
                return self._exited(event, now)
            case e.ScaleRequested(workers):
                self._limits = workers
                return [Record("scale_requested", {"workers": str(workers)}), *self._reconcile(now)]
            case e.LauncherFailed(reason):
                self._ending.decide(Outcome(Phase.FAILED, reason))
            case e.StopRequested():
                return self._stop_requested(event, now)
            case e.WorkersFound() | e.StateSaveStalled() | e.StateSaved():
                pass
            case _:
                record = self._records.get(event.worker_id)
                if record and record.state not in (_S.KILLING, _S.COMPLETED):
                    return self._hear(event, record, now)
        return []

    def _hear(self, event: e.Event, record: WorkerRecord, now: float) -> list[Instruction]:
        """What a worker has said that still counts, or what was said about it."""
        match event:
            case e.WorkerPending(_, reason) if not record.pid:
                known = (record.state, record.reason) == (_S.PENDING, reason)
                out = [] if known else self._fire(record, Trigger.NO_PLACE, Happening(now, reason))
                if self._fleet.nobody_comes:  # who waits for a replacement may have its place
                    waiting = self._rendezvous.lingering()
                    out += [i.DrainWorker(r.worker_id, "no replacement has a place") for r in waiting]
                return out
            case e.WorkerPlaced(_, host, pid) if not record.pid and record.state in STARTING:
                record.host, record.pid = host, pid
                if not self._settings.own_program:  # which may do without the library, and then never connects
                    record.deadline = now + self._settings.start_timeout
                return self._fire(record, Trigger.PLACED, Happening(now, record.reason))
            case e.WorkerConnected():
                return self._connected(event, record, now)
            case e.WorkerDisconnected():
                if record.state is _S.DRAINING:  # the end of its session, and it may take its time to end
                    record.pulse = None
                if record.pulse and record.connected:
                    record.pulse.heard = now
                record.connected = False
            case e.JoinRequested():
                return self._asked(event, record, now)
            case e.WorkerDraining():
                return self._draining(event, record, now)
            case e.WorkerFinished():
                return self._finished(event, record, now)
            case e.WorkerFailed(worker_id, _, message):
                if record.state is not _S.FINISHED:
                    record.failure = record.failure or message
                cause = f"worker {worker_id} failed: {message}"
                return self._fire(record, Trigger.FAIL, Happening(now, message, cause, event=event))
        return []

    def _connected(self, event: e.WorkerConnected, record: WorkerRecord, now: float) -> list[Instruction]:
        record.connected, record.unheard, record.notified = True, False, NotificationLevel.NOTHING
        record.host, record.pid = event.host, event.pid  # behind a shell the process that was placed is another one
        self._fleet.joined()
        if record.state in (_S.FINISHED, _S.FAILED):
            return []
        self._rendezvous.version = max(self._rendezvous.version, event.world_version)
        record.ready = record.ready or event.world_version > 0
        record.pulse = record.pulse or Pulse(now, now)
        record.pulse.heard = now
        trigger = Trigger.CONNECT_IN_WORLD if event.world_version else Trigger.CONNECT
        out = self._fire(record, trigger, Happening(now, event=event))
        if record.state is _S.EXCLUDED:
            self._liveness.restart((record.worker_id,), now)
        return out

    def _asked(self, event: e.JoinRequested, record: WorkerRecord, now: float) -> list[Instruction]:
        record.ready = True
        if record.pulse:
            record.pulse.heard = now
        current = self._rendezvous.world.version if self._rendezvous.world else 0
        if record.state in (_S.MEMBER, _S.REJOINING) and event.left_world != current:
            return []  # about an earlier world: late, or sent again
        self._rendezvous.version = max(self._rendezvous.version, event.left_world)
        cause = f"worker {record.worker_id}: {event.reason or 'left the world'}"
        return self._fire(record, Trigger.JOIN, Happening(now, cause=cause, event=event))

    def _draining(self, event: e.WorkerDraining, record: WorkerRecord, now: float) -> list[Instruction]:
        lingers = event.lingers and self._rendezvous.alone(record)
        cause = f"worker {record.worker_id} leaves: {event.reason}"
        out = self._fire(record, Trigger.LINGER if lingers else Trigger.DRAIN, Happening(now, event.reason, cause))
        if event.lingers and not lingers:
            out.append(i.DrainWorker(record.worker_id, event.reason))  # others hold the state: it need not wait
        return [*out, *self._reconcile(now)]

    def _finished(self, event: e.WorkerFinished, record: WorkerRecord, now: float) -> list[Instruction]:
        record.together = record.together or event.together
        return self._fire(record, Trigger.FINISH, Happening(now))

    def _exited(self, event: e.WorkerExited, now: float) -> list[Instruction]:
        record = self._records.get(event.worker_id)
        if record is None or record.state is _S.COMPLETED:
            return []
        world_runs = bool(self._rendezvous.active_members())
        verdict = self._fleet.exited(record, event, now, world_runs=world_runs)
        left = {"cause": str(verdict.cause), "reason": verdict.reason, "code": event.code}
        out: list[Instruction] = [Record("worker_left", {"worker": event.worker_id, **left})]
        if verdict.warning:
            out.append(Record("warning", {"message": verdict.warning}))
        gone = f"worker {event.worker_id} {verdict.reason}"
        out += self._fire(record, Trigger.EXIT, Happening(now, cause=gone, clean=event.code == 0), departure=gone)
        if verdict.fatal:
            self._ending.decide(Outcome(Phase.FAILED, verdict.fatal, event.output))
        return [*out, *self._reconcile(now)]

    def _stop_requested(self, event: e.StopRequested, now: float) -> list[Instruction]:
        checkpoint = event.checkpoint and not event.now
        self._ending.decide(Outcome(Phase.STOPPED, event.reason, checkpoint=checkpoint))
        out: list[Instruction] = [Record("stop_requested", {"reason": event.reason, "checkpoint": checkpoint})]
        return [*out, *self._dismiss(now), *self._kill_all("told to stop now", now)] if event.now else out

    def _fire(
        self, record: WorkerRecord, trigger: Trigger, happening: Happening, departure: str = ""
    ) -> list[Instruction]:
        """``departure``: why a replacement is launched, if one is due now."""
        held_place = record.holds_place
        out = self._transitions.fire(record, trigger, happening)
        if held_place and not record.holds_place and record.state not in DONE:
            self._fleet.departed(departure or f"worker {record.worker_id} leaves")
        if record.state is _S.GONE:
            del self._records[record.worker_id]
        return out

    # ---- time ----

    def _tick(self, now: float) -> list[Instruction]:
        self._liveness.forgive_own_absence(now)
        if self._ending.outcome:
            return self._enforce_deadline(now)
        out: list[Instruction] = []
        for record, reason in self._liveness.silent(now):
            out += self._give_up(record, reason, now)
        for record in self._fleet.overstaying(now):
            out += self._give_up(record, f"had not left {self._settings.stop_grace:g} s after it was to", now)
        stuck, late = self._find_stuck(now), self._fleet.start_timed_out(now)
        for record in self._records.values():
            if record.kill_at is not None and record not in stuck and record not in late:
                record.kill_at = None
        out += self._press(stuck, f"no progress for {self._settings.progress_timeout:g} s", now)
        out += self._press(late, f"not ready {self._settings.start_timeout:g} s after its start", now, crashed=True)
        return [*out, *self._reconcile(now)]

    def _find_stuck(self, now: float) -> list[WorkerRecord]:
        """In a broken world waiting is no excuse: it must be left. So must a world that went on without the worker."""
        members = self._rendezvous.active_members()
        still = self._liveness.still(members, now)
        stuck = [r for r in still if self._rendezvous.broken or not (r.pulse and r.pulse.waiting)]
        if still and not stuck and len(still) == len(members):
            limit = f"{self._settings.progress_timeout:g} s"
            self._rendezvous.break_up(f"no progress for {limit}, all members wait for one another", now)
        return [*stuck, *self._liveness.still(self._rendezvous.of(_S.EXCLUDED), now)]

    def _press(
        self, records: Sequence[WorkerRecord], reason: str, now: float, *, crashed: bool = False
    ) -> list[Instruction]:
        """Have them show where they are stuck, and give them up a moment later."""
        out: list[Instruction] = []
        for record in records:
            if record.kill_at is None:
                record.kill_at = now + TIME_TO_DUMP
                warning = f"worker {record.worker_id}: {reason}"
                if record.connected:
                    out.append(i.DumpStacks(record.worker_id))
                    warning += "; its stacks are in its log"
                out.append(Record("warning", {"message": warning}))
            elif now >= record.kill_at:
                if crashed:  # others may do no better, so it counts against the job
                    record.failure = record.failure or reason
                out += self._give_up(record, reason, now)
        return out

    def _give_up(self, record: WorkerRecord, reason: str, now: float) -> list[Instruction]:
        why = f"worker {record.worker_id}: {reason}"
        return self._fire(record, Trigger.GIVE_UP, Happening(now, reason, why), departure=why)

    # ---- the whole ----

    def _reconcile(self, now: float) -> list[Instruction]:
        """Launch what is missing, let go what is too much."""
        rendezvous = self._rendezvous
        if self._recovery or self._ending.outcome or rendezvous.ending or rendezvous.recovering_from_break(now):
            return []
        out: list[Instruction] = []
        plan = self._fleet.plan(self._limits.maximum, rendezvous.retention_order, now)
        reason = f"the job was scaled to at most {self._limits.maximum}"
        for record in plan.let_go:
            cause = f"worker {record.worker_id} leaves: {reason}"
            out += self._transitions.fire(record, Trigger.LET_GO, Happening(now, reason, cause))
        for _ in range(plan.launch):
            record, replaces = self._fleet.launch()
            fields = {"worker": record.worker_id, "reason": record.reason, "replaces": replaces}
            out += [i.LaunchWorker(record.worker_id, record.reason), Record("worker_launched", fields)]
        return out

    def _advance(self, now: float) -> list[Instruction]:
        """Form a new world if it is time to, and end the job if training is complete."""
        rendezvous = self._rendezvous
        for record in rendezvous.cut_off():
            lost = f"worker {record.worker_id} lost its connection"
            self._transitions.fire(record, Trigger.EXCLUDE, Happening(now, cause=lost))
        out: list[Instruction] = []
        if rendezvous.reopened:
            self._reopen(now)
            out += self._reconcile(now)
        rendezvous.let_newcomers_in(now, self._limits)
        out += self._tell_members(now)
        if world := rendezvous.next_world(now, self._limits):
            out += self._publish(world, now)
        if self._is_complete():
            self._ending.decide(Outcome(Phase.SUCCEEDED, "training is complete"))
            out += self._end(now)
        return out

    def _tell_members(self, now: float) -> list[Instruction]:
        notice = self._rendezvous.notice()
        if notice is None:
            return []
        for worker_id in notice.worker_ids:
            self._records[worker_id].notified = notice.level
        fields = {"world": notice.version, "reason": notice.reason}
        if notice.level is NotificationLevel.CHANGE:
            change = i.AnnounceChange(notice.worker_ids, notice.version, notice.reason)
            return [change, Record("change_announced", fields)]
        self._liveness.restart(notice.worker_ids, now)
        broken = i.BreakWorld(notice.worker_ids, notice.version, notice.reason)
        return [broken, Record("world_broken", fields)]

    def _publish(self, world: World, now: float) -> list[Instruction]:
        rendezvous = self._rendezvous
        if rendezvous.ending:  # what looked like the end was not
            self._reopen(now)
        since = rendezvous.change.since if rendezvous.change else now
        for record in rendezvous.of(_S.STANDBY, _S.REJOINING):
            chosen = record.worker_id in world.worker_ids
            self._transitions.fire(record, Trigger.ENTER if chosen else Trigger.PASS_OVER, Happening(now))
        for rank, worker_id in enumerate(world.worker_ids):
            record = self._records[worker_id]
            record.world_version, record.rank, record.notified = world.version, rank, NotificationLevel.NOTHING
        rendezvous.adopt(world)
        self._fleet.crashes.reached_world()
        self._liveness.restart(world.worker_ids, now)
        holders = [member.step for member in world.members if member.has_state]
        fields = {
            "world": world.version,
            "members": list(world.worker_ids),
            "step": max(holders, default=0),
            "reason": world.reason,
            "seconds": round(now - since, 6),
        }
        out: list[Instruction] = [i.PublishWorld(world, world.worker_ids), Record("world_formed", fields)]
        if self.training.step and not holders:
            message = (
                f"no worker was left that held the state after step {self.training.lose_state()}: training goes on from "
                "what the last has left, or the last checkpoint, or from the beginning if there is neither"
            )
            out.append(Record("warning", {"message": message}))
        return out

    def _reopen(self, now: float) -> None:
        """Training goes on, with others in the place of those who believe it is over."""
        for record in self._rendezvous.of(*DONE):
            record.world_version = 0  # nobody waits for what it may still write
            self._transitions.fire(record, Trigger.REOPEN, Happening(now, "finished before the others"))
            if record.state is _S.GONE:
                del self._records[record.worker_id]

    # ---- the end ----

    def _is_complete(self) -> bool:
        """The user's own program may have more to do after its training, and is waited for."""
        if self._rendezvous.complete:
            return not (self._settings.own_program and self._rendezvous.of(_S.FINISHED))
        return self._rendezvous.world is None and self._fleet.all_completed

    def _end(self, now: float) -> list[Instruction]:
        """It is decided how the job ends: send everybody home."""
        out = self._dismiss(now)
        if self._rendezvous.broken:  # its members must be told, but no other world is formed
            out += self._tell_members(now)
        outcome = self._ending.outcome
        if outcome and self._all_gone():
            out.append(i.EndJob(outcome.phase, outcome.reason, outcome.traceback))
        return out

    def _dismiss(self, now: float) -> list[Instruction]:
        outcome, out = self._ending.outcome, list[Instruction]()
        if outcome is None or self._ending.dismissed:
            return out
        self._ending.dismiss(now)
        for record in self._records.values():
            before = record.state
            out += self._transitions.fire(record, Trigger.DISMISS, Happening(now, outcome.reason))
            if record.state is not before:
                record.reason = f"the job ends: {outcome.reason}"
        return out

    def _enforce_deadline(self, now: float) -> list[Instruction]:
        grace = f"{self._settings.stop_grace:g} s"
        match self._ending.overdue(now):
            case Overdue.KILL:
                return self._kill_all(f"had not left {grace} after it was to", now)
            case Overdue.ABANDON:
                left = sorted(r.worker_id for r in self._records.values() if r.state is not _S.COMPLETED)
                self._records.clear()
                return [
                    Record("warning", {"message": f"workers {left} are still there {grace} after they were killed"})
                ]
        return []

    def _kill_all(self, reason: str, now: float) -> list[Instruction]:
        self._ending.kill(now)
        return [i.KillWorker(r.worker_id, reason) for r in self._records.values() if r.state is not _S.COMPLETED]

    def _all_gone(self) -> bool:
        return all(record.state is _S.COMPLETED for record in self._records.values())

    def _note_phase(self) -> list[Instruction]:
        conditions, reason = self._assess()
        out: list[Instruction] = []
        for condition in conditions:
            if phase := JOB.get((self._phase, condition)):
                self._phase = phase
                out.append(Record("phase", {"phase": str(phase), "reason": reason}))
        return out

    def _assess(self) -> tuple[tuple[Condition, ...], str]:
        """What is so of the job, one thing after another, and why."""
        outcome, rendezvous = self._ending.outcome, self._rendezvous
        if self._recovery:
            listening = "the master was started again, and waits for workers to come back"
            return (Condition.LISTENING,), outcome.reason if outcome else listening
        if outcome:
            over = (Condition[outcome.phase.name],) if self._all_gone() else ()
            return (Condition.DECIDED, *over), outcome.reason
        if rendezvous.world:
            return (Condition.TOO_FEW if rendezvous.shortage else Condition.TRAINING,), rendezvous.shortage
        if self._settings.own_program and any(record.pid for record in self._records.values()):
            return (Condition.PROGRAMS_RUN,), rendezvous.shortage or "no worker has joined yet"
        condition = Condition.TOO_FEW if rendezvous.version else Condition.NO_WORLD
        return (condition,), rendezvous.shortage or "workers are starting"

    # ---- what must be saved ----

    def _durable(self) -> JobSnapshot:
        """The part of the snapshot that must not be lost."""
        rendezvous, recovery = self._rendezvous, self._recovery
        finished = rendezvous.of(*DONE)
        return JobSnapshot(
            self._limits,
            self._fleet.next_id,
            tuple(record.worker_id for record in finished),
            any(record.together for record in finished),
            recovery.world if recovery else rendezvous.world,
            self._phase,
            self._ending.outcome,
            TrainingSnapshot(self.training.epochs_done),
        )

    def _in_order(self, out: list[Instruction]) -> list[Instruction]:
        """What need not be saved first, then the saving, then the rest; starting processes takes longest, so it is last."""
        before, self._saved = self._saved, self._durable()
        save = [i.SaveState()] if self._saved != before else []
        first = [instruction for instruction in out if isinstance(instruction, i.UNSAVED)]
        rest = [instruction for instruction in out if not isinstance(instruction, i.UNSAVED)]
        return [*first, *save, *sorted(rest, key=lambda instruction: isinstance(instruction, i.LaunchWorker))]
