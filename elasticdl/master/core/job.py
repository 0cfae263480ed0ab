"""The job: one step function over the rendezvous, the fleet and the judgement of heartbeats.

`Job.step` is the only way in. It never raises for what a worker may send, however late or often; an event of a worker
that is gone or given up means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from elasticdl.master.core import events as e
from elasticdl.master.core import instructions as i
from elasticdl.master.core.ending import Ending
from elasticdl.master.core.fleet import Fleet
from elasticdl.master.core.instructions import Instruction, Phase
from elasticdl.master.core.liveness import Liveness, Stall
from elasticdl.master.core.recovery import Recovery
from elasticdl.master.core.rendezvous import Rendezvous
from elasticdl.master.core.settings import Settings
from elasticdl.master.core.snapshot import JobSnapshot
from elasticdl.master.core.view import JobView, view_worker
from elasticdl.master.core.workers import Worker, WorkerState

# Between asking a stuck worker for its stacks and killing it.
TIME_TO_DUMP = 1.0


class Job:
    """With a ``snapshot`` it goes on where an earlier one was, once it has been told what was found."""

    def __init__(self, settings: Settings, snapshot: JobSnapshot | None = None) -> None:
        past = snapshot or JobSnapshot(settings.workers)
        self._settings = settings
        self._limits = past.limits
        self._rendezvous = Rendezvous(settings.join_window)
        self._fleet = Fleet(
            settings.start_timeout, settings.stop_grace, own_program=settings.own_program, memory=past.fleet
        )
        self._liveness = Liveness(settings.heartbeat_timeout, settings.progress_timeout)
        self._doomed: dict[int, float] = {}  # by when they will be killed, unless they move
        self._step = past.step
        self._ending = Ending(self._fleet, settings, past.outcome)
        self._phase = Phase.STOPPING if past.phase.final else past.phase  # it may have died of its last deed
        self._recovery = Recovery(settings, past.world) if snapshot else None

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
                self._step = max([self._step, *(report.step for report in event.steps)])
                self._fleet.trained(self._step)
                return []
            case e.PauseReported():
                return [i.Record("pause", {**event.parts, "worker": event.worker_id})]
            case e.NoticeReported():
                return [i.Record(event.event, {**event.fields, "worker": event.worker_id})]
        out = self._handle(event, now)
        if self._ending.outcome is None and self._recovery is None:
            out += self._advance(now)
        out += [*self._close(), *self._note_phase()]
        # Starting a process takes the edge longer than anything else, and workers may be waiting to be told something.
        return sorted(out, key=lambda instruction: isinstance(instruction, i.LaunchWorker))

    def snapshot(self) -> JobSnapshot:
        """What another job needs to go on from here. Changes only with an event that is not a mere number."""
        world = self._recovery.world if self._recovery else self._rendezvous.world
        return JobSnapshot(self._limits, self._fleet.memory(), world, self._phase, self._ending.outcome, self._step)

    def view(self) -> JobView:
        world, peers, outcome = self._rendezvous.world, self._rendezvous.peers, self._ending.outcome
        phase, reason = self._assess()
        return JobView(
            phase=phase,
            reason=reason,
            traceback=outcome.traceback if outcome else "",
            world_version=self._rendezvous.version,
            last_change=world.reason if world else "",
            limits=self._limits,
            workers=tuple(view_worker(w, peers.get(w.worker_id)) for w in self._fleet.workers.values()),
        )

    # ---- after another master ----

    def _find(self, event: e.WorkersFound, now: float) -> list[Instruction]:
        if self._recovery is None and event.workers and self._fleet.untouched:  # what was known of them is lost
            self._recovery = Recovery(self._settings, None)
        if self._recovery is None or self._recovery.begun:
            return []
        adoption = self._fleet.adopt(event.workers, now)
        self._recovery.begin(adoption.expected, [found.worker_id for found in event.workers if found.doubtful], now)
        for worker_id in adoption.missing:
            gone = e.WorkerExited(worker_id, e.ExitCause.DELETED, -1, "it was not there when the master started again")
            self._recovery.hold(gone, now)
        out: list[Instruction] = list(adoption.kills)
        if self._ending.outcome or self._recovery.over(now):
            out += self._recover(self._recovery, now)
        return [*out, *self._ending.decide(self._ending.outcome, now)] if self._ending.outcome else out

    def _listen(self, event: e.Event, recovery: Recovery, now: float) -> list[Instruction]:
        match event:
            case e.StopRequested() | e.LauncherFailed() if recovery.begun:  # no world is to be formed any more
                return [*self._recover(recovery, now), *self._act(event, now)]
            case e.ScaleRequested():
                return self._act(event, now)
            case e.Tick():
                recovery.forgive(self._liveness.forgive_own_absence(now))
            case e.WorkerFinished(worker_id):
                self._fleet.finished(worker_id)  # must be remembered as soon as it is taken
                recovery.hold(event, now)
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
        out: list[Instruction] = [i.Record("master_restarted", fields)]
        if world:
            self._rendezvous.adopt(world, recovery.connected)
            self._fleet.reached_world(world.worker_ids)
            out.append(i.AdoptWorld(world))
            for worker_id in world.worker_ids:
                self._settle(worker_id, now)
        for event in recovery.held:
            out += self._act(event, now)
        late = f"had not come back {recovery.waited(now):.0f} s after the master was started again"
        for worker_id in missing:
            out += self._give_up(worker_id, late, now)
        self._recovery = None  # only now, so that who is to be launched or let go is seen from the whole
        return [*out, *self._reconcile(now)]

    def _settle(self, worker_id: int, now: float) -> None:
        """What had become of a member before the earlier master was gone."""
        worker = self._fleet.get(worker_id)
        if worker_id in self._fleet.completed or (worker and worker.finished):
            self._rendezvous.finish(worker_id)
        elif worker is None or worker.failure:
            self._rendezvous.remove(worker_id, f"worker {worker_id} was lost while there was no master", now)
        elif worker.state is WorkerState.DRAINING:
            self._rendezvous.drain(worker_id, worker.reason, now)

    # ---- events ----

    def _handle(self, event: e.Event, now: float) -> list[Instruction]:
        if isinstance(event, e.WorkersFound):
            return self._find(event, now)
        return self._act(event, now) if self._recovery is None else self._listen(event, self._recovery, now)

    def _act(self, event: e.Event, now: float) -> list[Instruction]:
        match event:
            case e.Tick():
                return self._tick(now)
            case e.WorkerExited():
                return self._worker_exited(event, now)
            case e.ScaleRequested(workers):
                self._limits = workers
                return [i.Record("scale_requested", {"workers": str(workers)}), *self._reconcile(now)]
            case e.LauncherFailed(reason) if self._ending.outcome is None:
                return self._ending.decide(i.Outcome(Phase.FAILED, reason), now)
            case e.LauncherFailed() | e.WorkersFound():
                return []
            case e.StopRequested():
                return self._stop_requested(event, now)
            case _:
                worker = self._fleet.get(event.worker_id)
                return [] if worker is None else self._handle_worker(event, worker, now)

    def _handle_worker(self, event: e.Event, worker: Worker, now: float) -> list[Instruction]:
        """What a worker that still counts has said, or what was said about it."""
        match event:
            case e.WorkerPending(worker_id, reason):
                out = self._fleet.pending(worker_id, reason)
                if self._fleet.nobody_comes:  # who waits for a replacement may have its place
                    out += [i.DrainWorker(waits, "no replacement has a place") for waits in self._rendezvous.lingering]
                return out
            case e.WorkerPlaced(worker_id, host, pid):
                return self._fleet.placed(worker_id, host, pid, now)
            case e.WorkerConnected():
                return self._worker_connected(event, worker, now)
            case e.WorkerDisconnected(worker_id):
                if worker.state is WorkerState.DRAINING:  # the end of its session, and it may take its time to end
                    self._liveness.forget(worker_id)
                self._liveness.disconnected(worker_id, now)
                self._rendezvous.disconnect(worker_id)
            case e.JoinRequested():
                self._fleet.ready(worker.worker_id)
                self._liveness.asked(worker.worker_id, now)
                return self._rendezvous.ask(event, now)
            case e.WorkerDraining(worker_id, reason, lingers):
                self._rendezvous.drain(worker_id, reason, now, lingers=lingers)
                out = self._fleet.leaving(worker_id, reason, now)
                if lingers and worker_id not in self._rendezvous.lingering:
                    out.append(i.DrainWorker(worker_id, reason))  # others hold the state: it need not wait
                return [*out, *self._reconcile(now)]
            case e.WorkerFinished(worker_id):
                self._rendezvous.finish(worker_id, together=event.together)
                self._fleet.finished(worker_id)
                self._liveness.forget(worker_id)
            case e.WorkerFailed():
                return self._worker_failed(event, now)
        return []

    def _worker_connected(self, event: e.WorkerConnected, worker: Worker, now: float) -> list[Instruction]:
        self._fleet.connected(event.worker_id, event.host, event.pid, now)
        if worker.finished or worker.failure:
            return []
        self._liveness.connected(event.worker_id, now)
        if event.world_version:  # it was ready for it
            self._fleet.ready(event.worker_id)
            self._liveness.asked(event.worker_id, now)
        out = self._rendezvous.connect(event, now)
        if event.worker_id in self._rendezvous.overdue:
            self._liveness.restart((event.worker_id,), now)
        if outcome := self._ending.outcome:
            return [i.StopWorkers((event.worker_id,), outcome.reason, outcome.checkpoint)]
        lingers = event.worker_id in self._rendezvous.lingering
        if worker.state is WorkerState.DRAINING and not lingers:  # it may not have been told, and must not be let in
            self._rendezvous.drain(event.worker_id, worker.reason, now)
            return [*out, i.DrainWorker(event.worker_id, worker.reason)]
        return out

    def _worker_failed(self, event: e.WorkerFailed, now: float) -> list[Instruction]:
        reason = f"worker {event.worker_id} failed: {event.message}"
        self._liveness.forget(event.worker_id)
        self._fleet.failing(event.worker_id, event.message, now)
        self._rendezvous.remove(event.worker_id, reason, now)
        if event.cause is e.FailureCause.USER and self._ending.outcome is None:
            outcome = i.Outcome(Phase.FAILED, event.message, event.traceback)
            return [*self._ending.decide(outcome, now), *self._rendezvous.warn()]
        return self._rendezvous.warn() if self._ending.outcome else []

    def _worker_exited(self, event: e.WorkerExited, now: float) -> list[Instruction]:
        world_runs = bool(self._rendezvous.members)
        verdict = self._fleet.exited(event, now, step=self._step, world_runs=world_runs)
        if verdict is None:
            return []
        worker_id, clean = event.worker_id, event.code == 0
        self._liveness.forget(worker_id)
        left = {"worker": worker_id, "cause": str(verdict.cause), "reason": verdict.reason, "code": event.code}
        out: list[Instruction] = [i.Record("worker_left", left)]
        if verdict.warning:
            out.append(i.Record("warning", {"message": verdict.warning}))
        if verdict.cause is e.ExitCause.FINISHED:
            self._rendezvous.finish(worker_id)
        if self._ending.outcome and clean:
            self._rendezvous.discard(worker_id)
        else:
            self._rendezvous.remove(worker_id, f"worker {worker_id} {verdict.reason}", now, clean=clean)
        if self._ending.outcome:
            return [*out, *self._rendezvous.warn()]
        if verdict.fatal:
            return [*out, *self._ending.decide(i.Outcome(Phase.FAILED, verdict.fatal, event.output), now)]
        return [*out, *self._reconcile(now)]

    def _stop_requested(self, event: e.StopRequested, now: float) -> list[Instruction]:
        checkpoint = event.checkpoint and not event.now
        out: list[Instruction] = [i.Record("stop_requested", {"reason": event.reason, "checkpoint": checkpoint})]
        if self._ending.outcome is None:
            out += self._ending.decide(i.Outcome(Phase.STOPPED, event.reason, checkpoint=checkpoint), now)
        return [*out, *self._ending.kill("told to stop now", now)] if event.now else out

    # ---- time ----

    def _tick(self, now: float) -> list[Instruction]:
        self._liveness.forgive_own_absence(now)
        if self._ending.outcome:
            return self._ending.press(now)
        out: list[Instruction] = []
        for worker_id, reason in self._liveness.silent(now).items():
            out += self._give_up(worker_id, reason, now)
        stuck, unready = self._find_stuck(now), self._fleet.unready(now)
        suspects = {*stuck, *unready}
        self._doomed = {worker_id: when for worker_id, when in self._doomed.items() if worker_id in suspects}
        out += self._press_stuck(stuck, f"no progress for {self._settings.progress_timeout:g} s", now)
        late = f"not ready {self._settings.start_timeout:g} s after its start"
        out += self._press_stuck(unready, late, now, crashed=True)
        return [*out, *self._reconcile(now)]

    def _find_stuck(self, now: float) -> list[int]:
        finding = self._liveness.stalled(self._rendezvous.members, now, broken=self._rendezvous.broken)
        if finding and finding.stall is Stall.HUNG:
            limit = f"{self._settings.progress_timeout:g} s"
            self._rendezvous.break_up(f"no progress for {limit}, all members wait for one another", now)
            finding = None
        late = self._liveness.stalled(self._rendezvous.overdue, now, broken=True)
        return [worker_id for found in (finding, late) if found for worker_id in found.worker_ids]

    def _press_stuck(
        self, worker_ids: Sequence[int], reason: str, now: float, *, crashed: bool = False
    ) -> list[Instruction]:
        """Have them show where they are stuck, and give them up a moment later."""
        out: list[Instruction] = []
        for worker_id in worker_ids:
            if worker_id not in self._doomed:
                self._doomed[worker_id] = now + TIME_TO_DUMP
                out += self._show_stacks(worker_id, reason)
            elif now >= self._doomed[worker_id]:
                out += self._give_up(worker_id, reason, now, crashed=crashed)
        return out

    def _show_stacks(self, worker_id: int, reason: str) -> list[Instruction]:
        peer = self._rendezvous.peers.get(worker_id)
        if peer is None or not peer.connected:
            return [i.Record("warning", {"message": f"worker {worker_id}: {reason}"})]
        warning = f"worker {worker_id}: {reason}; its stacks are in its log"
        return [i.DumpStacks(worker_id), i.Record("warning", {"message": warning})]

    def _give_up(self, worker_id: int, reason: str, now: float, *, crashed: bool = False) -> list[Instruction]:
        self._liveness.forget(worker_id)
        self._rendezvous.remove(worker_id, f"worker {worker_id}: {reason}", now)
        return self._fleet.condemn(worker_id, reason, crashed=crashed)

    def _reconcile(self, now: float) -> list[Instruction]:
        if self._recovery or self._ending.outcome or self._rendezvous.ending or self._rendezvous.hurried(now):
            return []
        out = self._fleet.reconcile(self._limits.maximum, self._rendezvous.precedence, now)
        for instruction in out:
            if isinstance(instruction, i.DrainWorker):
                self._rendezvous.drain(instruction.worker_id, instruction.reason, now)
            elif isinstance(instruction, i.KillWorker):
                self._liveness.forget(instruction.worker_id)
                reason = f"worker {instruction.worker_id} {instruction.reason}"
                self._rendezvous.remove(instruction.worker_id, reason, now)
        return out

    def _advance(self, now: float) -> list[Instruction]:
        was_ending = self._rendezvous.ending
        out = self._rendezvous.advance(now, self._limits)
        for instruction in tuple(out):
            if isinstance(instruction, i.PublishWorld):
                self._fleet.reached_world(instruction.worker_ids)
                out += self._note_lost_state(instruction.world)
            if isinstance(instruction, i.PublishWorld | i.BreakWorld):
                self._liveness.restart(instruction.worker_ids, now)
        if was_ending and not self._rendezvous.ending:  # what looked like the end was not
            self._fleet.reopen(now)
        if self._is_complete():
            out += self._ending.decide(i.Outcome(Phase.SUCCEEDED, "training is complete"), now)
        return out

    # ---- the end ----

    def _note_lost_state(self, world: i.World) -> list[Instruction]:
        if self._step == 0 or any(member.has_state for member in world.members):
            return []
        message = (
            f"no worker was left that held the state after step {self._step}: training goes on from what the last has left, "
            "or the last checkpoint, or from the beginning if there is neither"
        )
        return [i.Record("warning", {"message": message})]

    def _is_complete(self) -> bool:
        """The user's own program may have more to do after its training, and is waited for."""
        if self._rendezvous.complete:
            return not (self._settings.own_program and self._fleet.finishing)
        return self._rendezvous.world is None and self._fleet.all_completed

    def _close(self) -> list[Instruction]:
        out = self._ending.close()
        for instruction in out:
            if isinstance(instruction, i.EndJob):
                self._phase = instruction.phase
        return out

    def _note_phase(self) -> list[Instruction]:
        phase, reason = self._assess()
        if phase is self._phase:
            return []
        self._phase = phase
        return [i.Record("phase", {"phase": str(phase), "reason": reason})]

    def _assess(self) -> tuple[Phase, str]:
        """The phase, and why the job is in it."""
        if self._ending.outcome:
            return (self._phase if self._phase.final else Phase.STOPPING), self._ending.outcome.reason
        if self._recovery:
            return self._phase, "the master was started again, and waits for workers to come back"
        if self._rendezvous.world is None:
            if self._settings.own_program and any(w.pid for w in self._fleet.workers.values()):
                return Phase.RUNNING, self._rendezvous.starved or "no worker has joined yet"
            phase = Phase.WAITING if self._rendezvous.version else Phase.PENDING
            return phase, self._rendezvous.starved or "workers are starting"
        if self._rendezvous.starved:
            return Phase.WAITING, self._rendezvous.starved
        return Phase.RUNNING, ""
