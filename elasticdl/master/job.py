"""The job: one step function over the rendezvous, the fleet and the judgement of heartbeats.

`Job.step` is the only way in. It never raises for what a worker may send, however late or often; an event of a worker
that is gone or given up means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elasticdl.common.spec import WorkerRange
from elasticdl.master import events as e
from elasticdl.master import instructions as i
from elasticdl.master.fleet import Fleet, Worker, WorkerState
from elasticdl.master.instructions import Instruction, Phase
from elasticdl.master.liveness import Liveness, Stall
from elasticdl.master.settings import Settings
from elasticdl.master.world import Rendezvous, Standing

# Between asking a stuck worker for its stacks and killing it.
TIME_TO_DUMP = 1.0


@dataclass(frozen=True, slots=True)
class WorkerView:
    worker_id: int
    state: str  # pending, starting, standby, member, draining
    rank: int  # -1 unless a member
    host: str
    pid: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobView:
    """The job at one moment, for people."""

    phase: Phase
    reason: str
    traceback: str
    world_version: int
    last_change: str
    limits: WorkerRange
    workers: tuple[WorkerView, ...]


@dataclass(slots=True)
class _End:
    """How the job will have ended once its workers are gone."""

    phase: Phase
    reason: str
    traceback: str = ""
    checkpoint: bool = False
    deadline: float = 0.0  # by when they are killed and, once killed, given up
    killed: bool = False


class Job:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._limits = settings.workers
        self._rendezvous = Rendezvous(settings.join_window)
        self._fleet = Fleet(settings.start_timeout, settings.stop_grace, own_program=settings.own_program)
        self._liveness = Liveness(settings.heartbeat_timeout, settings.progress_timeout)
        self._doomed: dict[int, float] = {}  # by when they will be killed, unless they move
        self._step = 0
        self._end: _End | None = None
        self._phase = Phase.PENDING

    def step(self, event: e.Event, now: float) -> list[Instruction]:
        if self._phase.final:
            return []
        match event:  # the frequent ones change nothing that would have to be weighed
            case e.HeartbeatReceived():
                self._liveness.heard(event, now)
                return []
            case e.ProgressReported():
                self._step = max([self._step, *(report.step for report in event.steps)])
                self._fleet.trained(self._step)
                return []
            case e.PauseReported():
                return [i.Record("pause", {**event.parts, "worker": event.worker_id})]
            case e.NoticeReported():
                return [i.Record(event.event, event.fields)]
        out = self._handle(event, now)
        if self._end is None:
            out += self._advance(now)
        out += [*self._end_if_done(), *self._note_phase()]
        # Starting a process takes the edge longer than anything else, and workers may be waiting to be told something.
        return sorted(out, key=lambda instruction: isinstance(instruction, i.LaunchWorker))

    def view(self) -> JobView:
        world = self._rendezvous.world
        phase, reason = self._assess()
        return JobView(
            phase=phase,
            reason=reason,
            traceback=self._end.traceback if self._end else "",
            world_version=world.version if world else 0,
            last_change=world.reason if world else "",
            limits=self._limits,
            workers=tuple(self._view_worker(w) for w in self._fleet.workers.values()),
        )

    # ---- events ----

    def _handle(self, event: e.Event, now: float) -> list[Instruction]:
        match event:
            case e.Tick():
                return self._tick(now)
            case e.WorkerExited():
                return self._worker_exited(event, now)
            case e.ScaleRequested(workers):
                self._limits = workers
                return [i.Record("scale_requested", {"workers": str(workers)}), *self._reconcile(now)]
            case e.StopRequested():
                return self._stop_requested(event, now)
            case _:
                worker = self._fleet.get(event.worker_id)
                return [] if worker is None else self._handle_worker(event, worker, now)

    def _handle_worker(self, event: e.Event, worker: Worker, now: float) -> list[Instruction]:
        """What a worker that still counts has said, or what was said about it."""
        match event:
            case e.WorkerPending(worker_id, reason):
                return self._fleet.pending(worker_id, reason)
            case e.WorkerPlaced(worker_id, host, pid):
                return self._fleet.placed(worker_id, host, pid, now)
            case e.WorkerConnected():
                return self._worker_connected(event, worker, now)
            case e.WorkerDisconnected(worker_id):
                if worker.state is WorkerState.DRAINING:  # the end of its session, and it may take its time to end
                    self._liveness.forget(worker_id)
                self._liveness.disconnected(worker_id, now)
                self._rendezvous.disconnect(worker_id)
            case e.WorkerAsked():
                self._fleet.ready(worker.worker_id)
                self._liveness.asked(worker.worker_id, now)
                return self._rendezvous.ask(event, now)
            case e.WorkerDraining(worker_id, reason):
                self._rendezvous.drain(worker_id, reason, now)
                return [*self._fleet.leaving(worker_id, reason, now), *self._reconcile(now)]
            case e.WorkerFinished(worker_id):
                self._rendezvous.finish(worker_id)
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
        out = self._rendezvous.connect(event, now)
        if event.worker_id in self._rendezvous.overdue:
            self._liveness.restart((event.worker_id,), now)
        if self._end:
            return [i.StopWorkers((event.worker_id,), self._end.reason, self._end.checkpoint)]
        if worker.state is WorkerState.DRAINING:  # in case it was not told before its connection broke
            return [*out, i.DrainWorker(event.worker_id, worker.reason)]
        return out

    def _worker_failed(self, event: e.WorkerFailed, now: float) -> list[Instruction]:
        reason = f"worker {event.worker_id} failed: {event.message}"
        self._liveness.forget(event.worker_id)
        self._fleet.failing(event.worker_id, event.message, now)
        self._rendezvous.remove(event.worker_id, reason, now)
        if event.cause is e.FailureCause.USER and self._end is None:
            end = _End(Phase.FAILED, event.message, event.traceback)
            return [*self._finish(end, now), *self._rendezvous.warn()]
        return self._rendezvous.warn() if self._end else []

    def _worker_exited(self, event: e.WorkerExited, now: float) -> list[Instruction]:
        world_runs = bool(self._rendezvous.members)
        verdict = self._fleet.exited(event, now, step=self._step, world_runs=world_runs)
        if verdict is None:
            return []
        worker_id, clean = event.worker_id, event.cause is e.ExitCause.CLEAN
        self._liveness.forget(worker_id)
        left = {"worker": worker_id, "cause": str(verdict.cause), "reason": verdict.reason, "code": event.code}
        out: list[Instruction] = [i.Record("worker_left", left)]
        if verdict.cause is e.ExitCause.FINISHED:
            self._rendezvous.finish(worker_id)
        if self._end and clean:
            self._rendezvous.discard(worker_id)
        else:
            self._rendezvous.remove(worker_id, f"worker {worker_id} {verdict.reason}", now, clean=clean)
        if self._end:
            return [*out, *self._rendezvous.warn()]
        if verdict.fatal:
            return [*out, *self._finish(_End(Phase.FAILED, verdict.fatal, event.output), now)]
        return [*out, *self._reconcile(now)]

    def _stop_requested(self, event: e.StopRequested, now: float) -> list[Instruction]:
        checkpoint = event.checkpoint and not event.now
        out: list[Instruction] = [i.Record("stop_requested", {"reason": event.reason, "checkpoint": checkpoint})]
        if self._end is None:
            out += self._finish(_End(Phase.STOPPED, event.reason, checkpoint=checkpoint), now)
        return [*out, *self._kill_all("told to stop now", now)] if event.now else out

    # ---- time ----

    def _tick(self, now: float) -> list[Instruction]:
        self._liveness.forgive_own_absence(now)
        if self._end:
            return self._press(self._end, now)
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
        if self._end or self._rendezvous.ending or self._rendezvous.hurried(now):
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
            out += self._finish(_End(Phase.SUCCEEDED, "training is complete"), now)
        return out

    # ---- the end ----

    def _note_lost_state(self, world: i.World) -> list[Instruction]:
        if self._step == 0 or any(member.has_state for member in world.members):
            return []
        message = (
            f"no worker was left that held the state after step {self._step}: training goes on from the last checkpoint, "
            "or from the beginning if there is none"
        )
        return [i.Record("warning", {"message": message})]

    def _is_complete(self) -> bool:
        """The user's own program may have more to do after its training, and is waited for."""
        if self._rendezvous.complete:
            return not (self._settings.own_program and self._fleet.finishing)
        return self._rendezvous.world is None and self._fleet.all_completed

    def _finish(self, end: _End, now: float) -> list[Instruction]:
        """It is decided how the job ends: tell everybody to leave."""
        self._end = end
        end.deadline = now + self._settings.stop_grace
        reason = end.reason
        out: list[Instruction] = []
        told: list[int] = []
        for worker in self._fleet.workers.values():
            if worker.state is WorkerState.RUNNING and not (worker.finished or worker.failure):
                told.append(worker.worker_id)
            elif worker.state is WorkerState.STARTING and self._settings.own_program:
                out.append(i.TerminateWorker(worker.worker_id, reason))
            elif worker.state in (WorkerState.PENDING, WorkerState.STARTING) and not worker.finished:
                out.append(i.KillWorker(worker.worker_id, reason))
        self._fleet.dismiss(reason)
        return [i.StopWorkers(tuple(told), reason, end.checkpoint), *out] if told else out

    def _press(self, end: _End, now: float) -> list[Instruction]:
        """Kill those who have overstayed; do without those who can't even be killed."""
        if now < end.deadline:
            return []
        grace = f"{self._settings.stop_grace:g} s"
        if not end.killed:
            return self._kill_all(f"had not left {grace} after it was to", now)
        left, self._fleet.workers = sorted(self._fleet.workers), {}
        return [i.Record("warning", {"message": f"workers {left} are still there {grace} after they were killed"})]

    def _kill_all(self, reason: str, now: float) -> list[Instruction]:
        if self._end:
            self._end.killed, self._end.deadline = True, now + self._settings.stop_grace
        return [i.KillWorker(worker_id, reason) for worker_id in self._fleet.workers]

    def _end_if_done(self) -> list[Instruction]:
        if self._end is None or self._fleet.workers:
            return []
        self._phase = self._end.phase
        fields = {"phase": str(self._phase), "reason": self._end.reason}
        return [i.Record("phase", fields), i.EndJob(self._phase, self._end.reason, self._end.traceback)]

    def _note_phase(self) -> list[Instruction]:
        phase, reason = self._assess()
        if phase is self._phase:
            return []
        self._phase = phase
        return [i.Record("phase", {"phase": str(phase), "reason": reason})]

    def _assess(self) -> tuple[Phase, str]:
        """The phase, and why the job is in it."""
        if self._end:
            return (self._phase if self._phase.final else Phase.STOPPING), self._end.reason
        if self._rendezvous.world is None:
            if self._settings.own_program and any(w.pid for w in self._fleet.workers.values()):
                return Phase.RUNNING, self._rendezvous.starved or "no worker has joined yet"
            return Phase.PENDING, self._rendezvous.starved or "workers are starting"
        if self._rendezvous.starved:
            return Phase.WAITING, self._rendezvous.starved
        return Phase.RUNNING, ""

    def _view_worker(self, worker: Worker) -> WorkerView:
        peer = self._rendezvous.peers.get(worker.worker_id)
        state, rank, reason = str(worker.state), -1, worker.reason
        if worker.state is WorkerState.CONDEMNED or worker.finished:
            state, reason = "draining", "finished" if worker.finished else worker.reason
        elif worker.state is WorkerState.RUNNING:
            standing = peer.standing if peer else Standing.COMING
            if standing in (Standing.MEMBER, Standing.LEFT) and peer:
                state, rank = "member", peer.rank
            else:
                state = str(standing.value)
        return WorkerView(worker.worker_id, state, rank, worker.host, worker.pid, reason)
