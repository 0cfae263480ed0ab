"""How the job scales, as far as its steps tell: what it says of that, and how many workers it wants.

What `SizeRule` holds may be lost without harm.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Sequence

from elasticdl.common.backoff import Backoff
from elasticdl.job import messages
from elasticdl.job.shared_values import StepReport
from elasticdl.job.spec import WorkerRange
from elasticdl.master.rules.measured_steps import MeasuredSteps
from elasticdl.master.rules.rule import RuledJob
from elasticdl.master.rules.worker_target import Situation, WorkerTarget
from elasticdl.master.state.instructions import Instruction, Record, Tell
from elasticdl.master.state.learnt import MOST_OBSERVATIONS, Learnt
from elasticdl.master.state.snapshot import JobSnapshot
from elasticdl.master.state.speedup import Curve
from elasticdl.master.state.states import LIVE
from elasticdl.master.state.values import Settings, World

# What a change costs is the median of so many pauses, or this many seconds before there was any.
PAUSES_KEPT = 32
UNKNOWN_PAUSE = 1.0
# After a world has formed, what its steps tell counts after so long at first, and then after twice as long each time.
FIRST_SECONDS, LONGEST_SECONDS = 4.0, 60.0
# The journal has advice again after so many seconds, if a speedup has changed by this part.
ADVICE_SECONDS = 30.0
MATERIAL = 0.1


class SizeRule:
    """It reads the workers' records and the training, and never changes them."""

    def __init__(self, settings: Settings, past: JobSnapshot) -> None:
        self._curve = Curve()
        self._learnt = past.learnt
        self._steps = MeasuredSteps()
        self._backoff, self._due = Backoff(first=FIRST_SECONDS, longest=LONGEST_SECONDS), 0.0
        self._policy: WorkerTarget | None = None
        if settings.scale_policy == "efficiency":
            self._policy = WorkerTarget(settings.min_efficiency, past.target or past.limits.minimum)
        # Until the job's own steps tell whether it is of such a job as this.
        self._recalled: Learnt | None = past.learnt
        self._pauses: deque[float] = deque(maxlen=PAUSES_KEPT)
        self._present = 0  # workers that were last measured
        self._advised: tuple[float, int, Curve] | None = None  # when, for how many, by what
        self._told = Learnt()  # what the workers were told

    # ---- what is so ----

    @property
    def target(self) -> int:
        """Workers that the policy wants; 0 if there is none."""
        return self._policy.target if self._policy else 0

    @property
    def decision(self) -> str:
        """Why as many workers are wanted."""
        return self._policy.reason if self._policy else ""

    @property
    def advice(self) -> str:
        return self._curve.advice(self._present)

    @property
    def learnt(self) -> Learnt:
        return self._learnt

    def most(self, limits: WorkerRange) -> tuple[int, str]:
        """How many workers there may be, and why no more."""
        if self._policy is None or self._policy.target >= limits.maximum:
            return limits.maximum, f"the job was scaled to at most {limits.maximum}"
        return max(limits.minimum, self._policy.target), self._policy.reason

    def allowed(self, limits: WorkerRange) -> WorkerRange:
        """The range within which the policy lets the job be."""
        least, (most, _) = limits.minimum, self.most(limits)
        return WorkerRange(minimum=least, maximum=max(least, most))

    # ---- what happens ----

    def scaled(self, limits: WorkerRange, now: float) -> list[Instruction]:
        """The range of workers is another now. Whoever asked for it watches what comes of it."""
        self._backoff.reset()
        self._due = now
        policy = self._policy
        if policy is None or not policy.scaled(limits):
            return []
        return [Record("decision", {"workers": policy.target, "reason": policy.reason})]

    def notice(self, job: RuledJob, worker_id: int, notice: messages.Notice) -> list[Instruction]:
        """A worker has something for the journal."""
        told = {**notice.fields, "worker": worker_id}
        learnt = told.pop("learnt", "")
        if notice.event == "pause":
            self._pauses.append(told["total"])
        return [Record(notice.event, told), *(self._recall(job, learnt) if learnt else [])]

    def _recall(self, job: RuledJob, text: str) -> list[Instruction]:
        """A worker goes on from a checkpoint that says this."""
        try:
            learnt = Learnt.from_json(text)
        except ValueError as error:
            reason = f"what the checkpoint says of how the job scales can't be used: {error}"
            return [Record("warning", {"message": reason})]
        # It is in the next checkpoint, too, though this job may be over before it has learnt.
        if self._learnt == Learnt():
            self._learnt = self._recalled = learnt
        return self._tell(job)

    def stepped(self, world: World | None, steps: Sequence[StepReport], now: float) -> None:
        """Steps that were not reported before."""
        if world and self._steps.enter(world.version, len(world.members)):
            self._backoff.reset()
            self._due = now + FIRST_SECONDS
        for step in steps:
            self._steps.take(step, now)

    def look(self, job: RuledJob, now: float) -> Iterator[Instruction]:
        stable = job.rendezvous.world is not None and job.rendezvous.change is None
        # While a member looks slow, and is not called so yet, it may be why the job is, and not the number of workers.
        if now < self._due or not self._steps.enough or not stable or job.somebody_seems_slow:
            return
        self._due = now + self._backoff.delay()
        yield from self._learn(job, now)

    def _learn(self, job: RuledJob, now: float) -> Iterator[Instruction]:
        recalled, self._recalled = self._recalled, None
        if recalled is not None:
            self._steps.recall(recalled.observations, now)
        observations = self._steps.observations(now)
        curve, self._present = Curve(observations), self._steps.workers
        self._curve = curve if curve.can_be else Curve()
        if recalled is not None and self._policy is not None and not self._steps.dropped:
            # What was measured of another batch, or on faster machines, was dropped, and so is what followed from it.
            self._policy.recall(recalled.rejections, now)
        if self._policy is not None:
            yield from self._decide(self._policy, job, now, can_be=curve.can_be)
        rejections = self._policy.rejections(now)[:MOST_OBSERVATIONS] if self._policy else ()
        self._learnt = Learnt(observations, rejections)
        yield from self._tell(job)
        yield from self._advise(now)

    def _tell(self, job: RuledJob) -> list[Instruction]:
        """Any worker may write the next checkpoint; those that connect later are told then."""
        there = tuple(record.worker_id for record in job.records.of(*LIVE) if record.connected)
        if not there or not self._learnt.differs(self._told):
            return []
        self._told = self._learnt
        return [Tell(there, messages.Learnt(self._learnt.to_json()))]

    def _decide(self, policy: WorkerTarget, job: RuledJob, now: float, *, can_be: bool) -> list[Instruction]:
        members = len(job.rendezvous.active_members())
        situation = Situation(
            limits=job.limits,
            present=members,
            measured=self._present == members and can_be,
            incomplete=job.records.live != members,
            pause=statistics.median(self._pauses) if self._pauses else UNKNOWN_PAUSE,
            time_left=job.training.time_left(now),
            now=now,
        )
        changed = policy.decide(self._curve, situation)
        return [Record("decision", {"workers": policy.target, "reason": policy.reason})] if changed else []

    def _advise(self, now: float) -> list[Instruction]:
        text, present = self.advice, self._present
        if not text:
            return []
        if self._advised is not None:
            at, before, curve = self._advised
            recent = now - at < ADVICE_SECONDS or not self._curve.differs(curve, present, MATERIAL)
            if recent and before == present:
                return []
        self._advised = now, present, self._curve
        return [Record("advice", {"text": text, "curve": self._curve.published(present)})]
