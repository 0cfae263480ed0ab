"""The job: one step function over its workers, what must be saved after each step, and what people are shown.

`Job.step` is the only way in. It never raises for what a worker may send, however late or often. A job that follows
another listens first (`elasticdl.master.core.recovery`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticdl.job.messages import Finished, Heartbeat, Notice, Progress
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core.recovery import Recovery
from elasticdl.master.core.workers import Workers
from elasticdl.master.rules.slowness import pace_of
from elasticdl.master.state import events as e
from elasticdl.master.state import instructions as i
from elasticdl.master.state.instructions import Instruction, Phase, Record
from elasticdl.master.state.learnt import Learnt
from elasticdl.master.state.snapshot import JobSnapshot, TrainingSnapshot, WorkerSnapshot
from elasticdl.master.state.states import DONE, JOB, Condition, WorkerState
from elasticdl.master.state.values import Settings
from elasticdl.master.state.worker_record import WorkerView

_S = WorkerState


@dataclass(frozen=True, slots=True)
class JobView:
    """The job at one moment, for people."""

    phase: Phase
    reason: str
    traceback: str
    world_version: int
    last_change: str
    limits: WorkerRange
    advice: str  # how fast it is with how many workers
    decision: str  # why it wants as many as it does
    workers: tuple[WorkerView, ...]


class Job:
    """With a ``snapshot`` it goes on where an earlier one was, once it has been told what was found."""

    def __init__(self, settings: Settings, snapshot: JobSnapshot | None = None) -> None:
        self._past = self._saved = past = snapshot or JobSnapshot(settings.workers, settings.first_worker)
        self._settings = settings
        self._finished: tuple[int, ...] = ()  # as of the last step
        self._workers = Workers(settings, past)
        self._recovery = Recovery(self._workers, past) if snapshot else None
        self.training = self._workers.training  # what it has achieved so far
        # An earlier master may have died just after it had ended the job.
        self.phase = Phase.STOPPING if past.phase.final else past.phase

    @property
    def limits(self) -> WorkerRange:
        """As they are now: the specification says what they were at the start."""
        return self._workers.limits

    @property
    def learnt(self) -> Learnt:
        """How it scales, as far as it knows."""
        return self._workers.sizing.learnt

    def step(self, event: e.Event, now: float) -> list[Instruction]:
        if self.phase.final:
            return []
        workers = self._workers
        match event:  # the frequent ones change nothing that would have to be weighed
            case e.FromWorker(worker_id, Heartbeat() as beat):
                workers.liveness.heard(worker_id, beat, now)
                if self._recovery:
                    self._recovery.heard(worker_id, beat, now)
                return []
            case e.FromWorker(worker_id, Progress(told) as progress):
                world_version = getattr(workers.records.get(worker_id), "world_version", 0)
                if workers.rendezvous.world and world_version < max((s.world_version for s in told), default=1):
                    return []  # it was not a member of that world
                had_begun = self.training.begun
                steps, milestones = self.training.report(progress, now)
                workers.fleet.crashes = workers.fleet.crashes.after_steps(len(steps))
                workers.progress_limits.stepped(steps, progress.total_steps, now)
                news = i.NewSteps(steps, pace_of(workers.records.of(_S.MEMBER)))
                must_be_kept = milestones or self.training.begun is not had_begun
                return self._in_order([news, *milestones]) if must_be_kept else [news]
            case e.FromWorker(worker_id, Notice("worker_stuck") as notice):
                return workers.watch.told(worker_id, notice, now)
            case e.FromWorker(worker_id, Notice("worker_waits") as notice):
                return self._in_order(workers.watch.waits(worker_id, notice))
            case e.FromWorker(worker_id, Notice() as notice):
                self.training.notice(notice)
                return self._in_order(workers.sizing.notice(worker_id, notice, now))
            case e.ScalingLearnt():  # the next tick acts on it
                # While a member looks slow, and is not called so yet, it may be why the job is, and not the number of workers.
                suspected = workers.slow_workers.suspects
                return self._in_order([] if self._recovery else workers.sizing.learn(event, now, suspected=suspected))
            case e.StateSaveStalled(problem):
                workers.liveness.save_problem = problem
                message = f"what was decided waits until the job's state is saved: {problem}"
                return [Record("warning", {"message": message})] if problem else []
        out: list[Instruction] = []
        if isinstance(event, e.FromWorker) and isinstance(event.said, Finished):
            out += self.training.finish(event.said)
        if isinstance(event, e.WorkersFound):
            # What was known of them is lost.
            if self._recovery is None and event.workers and workers.fleet.next_id == self._settings.first_worker:
                self._recovery = Recovery(workers, self._past)
            out += self._recovery.begin(event.workers, now) if self._recovery else []
        else:
            out += (self._recovery or workers).act(event, now)
        if not workers.listening:
            self._recovery = None
            out += workers.advance(now)
        return self._in_order([*out, *self._note_phase()])

    def snapshot(self) -> JobSnapshot:
        """What another job needs to go on from here."""
        workers = self._workers
        if self._recovery and not self._recovery.begun:
            return self._past
        known = self._past.workers  # of those whom a recovery has found nothing is known yet
        if not self._recovery:
            known = tuple(
                WorkerSnapshot(r.worker_id, r.state, r.reason, r.world_version, r.ready, r.failure, r.place_id)
                for r in workers.records.values()
                if r.state is not _S.COMPLETED
            )
        numbers, crashes = self.training.snapshot(), workers.fleet.crashes
        return replace(self._durable(), training=numbers, workers=known, crashes=crashes, learnt=self.learnt)

    def view(self) -> JobView:
        workers = self._workers
        outcome = workers.ending.outcome
        _, reason = self._assess()
        if problem := workers.liveness.save_problem:
            reason = f"waits until the job's state is saved: {problem}"
        elif reason and not outcome and (unreached := workers.watch.unreached()):
            reason += f"; {unreached}"
        if not outcome and (wait := workers.fleet.wait):
            reason = f"{reason}; {wait}" if reason else wait
        reason = reason or workers.fleet.crashes.given_up
        return JobView(
            phase=self.phase,
            reason=reason,
            traceback=outcome.traceback if outcome else "",
            world_version=workers.rendezvous.version,
            last_change=workers.rendezvous.why_changed,
            limits=workers.limits,
            advice=workers.sizing.advice,
            decision="" if outcome else workers.sizing.decision,
            workers=tuple(r.view() for r in workers.records.values() if r.state is not _S.COMPLETED),
        )

    # ---- phases, and what must be saved ----

    def _note_phase(self) -> list[Instruction]:
        conditions, reason = self._assess()
        out: list[Instruction] = []
        for condition in conditions:
            if phase := JOB.get((self.phase, condition)):
                self.phase = phase
                out.append(Record("phase", {"phase": str(phase), "reason": reason}))
        return out

    def _assess(self) -> tuple[tuple[Condition, ...], str]:
        """What is so of the job, one thing after another, and why."""
        workers = self._workers
        outcome, rendezvous = workers.ending.outcome, workers.rendezvous
        if self._recovery:
            listening = "the master was started again, and waits for workers to come back"
            return (Condition.LISTENING,), outcome.reason if outcome else listening
        if outcome:
            over = (Condition[outcome.phase.name],) if workers.all_gone() else ()
            return (Condition.DECIDED, *over), outcome.reason
        if rendezvous.world:
            return (Condition.TOO_FEW if rendezvous.shortage else Condition.TRAINING,), rendezvous.shortage
        if self._settings.own_program and any(record.pid for record in workers.records.values()):
            return (Condition.PROGRAMS_RUN,), rendezvous.shortage or "no worker has joined yet"
        condition = Condition.TOO_FEW if rendezvous.version else Condition.NO_WORLD
        return (condition,), rendezvous.shortage or workers.fleet.awaited or "workers are starting"

    def _durable(self) -> JobSnapshot:
        """The part of the snapshot that must not be lost."""
        workers, rendezvous = self._workers, self._workers.rendezvous
        # Workers are added one by one and taken out all at once (REOPEN): unless their number changes, they do not.
        if len(self._finished) != workers.records.count(*DONE):
            self._finished = tuple(record.worker_id for record in workers.records.of(*DONE))
        return JobSnapshot(
            workers.limits,
            workers.fleet.next_id,
            self._finished,
            rendezvous.together,
            rendezvous.world
            or self._past.world,  # one that was left for a later one still says which versions are used
            self.phase,
            workers.ending.outcome,
            TrainingSnapshot(self.training.epochs_done, self.training.begun),
            target=workers.sizing.target,
        )

    def _in_order(self, out: list[Instruction]) -> list[Instruction]:
        """What need not be saved first, then the saving, then the rest. Workers of a world that ends hear of it before anything is
        recorded, as a slow disk must not hold them up. Starting processes takes longest, so it is last."""
        before, self._saved = self._saved, self._durable()
        save = [i.SaveState()] if self._saved != before else []
        first = [instruction for instruction in out if i.is_unsaved(instruction)]
        first.sort(key=lambda instruction: not isinstance(instruction, i.Tell))
        rest = [instruction for instruction in out if not i.is_unsaved(instruction)]
        return [*first, *save, *sorted(rest, key=lambda instruction: isinstance(instruction, i.LaunchWorker))]
