"""How the job scales, as far as it knows: what it says of that, and how many workers it wants.

Steps are measured, and the curve is fitted, outside of the core (`elasticdl.master.shell.scaling_observer`); it arrives here
as an event. What `Sizing` holds may be lost without harm.
"""

from __future__ import annotations

import statistics
from collections import deque

from elasticdl.job import messages
from elasticdl.job.spec import WorkerRange
from elasticdl.master.rules.rule import RuledJob
from elasticdl.master.rules.worker_target import Situation, WorkerTarget
from elasticdl.master.state import events as e
from elasticdl.master.state import instructions as i
from elasticdl.master.state.instructions import Instruction, Record
from elasticdl.master.state.learnt import MOST_OBSERVATIONS, Learnt
from elasticdl.master.state.snapshot import JobSnapshot
from elasticdl.master.state.speedup import Curve
from elasticdl.master.state.states import LIVE

# What a change costs is the median of so many pauses, or this many seconds before there was any.
PAUSES_KEPT = 32
UNKNOWN_PAUSE = 1.0
# The journal has advice again after so many seconds, if a speedup has changed by this part.
ADVICE_SECONDS = 30.0
MATERIAL = 0.1


class Sizing:
    """It reads the workers' records and the training, and never changes them."""

    def __init__(self, job: RuledJob, past: JobSnapshot) -> None:
        settings = job.settings
        self._seen = job
        self._records = job.records
        self._rendezvous = job.rendezvous
        self._training = job.training
        self._curve = Curve()
        self._learnt = past.learnt
        self._policy: WorkerTarget | None = None
        if settings.scale_policy == "efficiency":
            self._policy = WorkerTarget(settings.min_efficiency, past.target or past.limits.minimum)
        self._recalled = past.learnt.rejections  # until it is known whether they are of such a job as this
        self._pauses: deque[float] = deque(maxlen=PAUSES_KEPT)
        self._present, self._compared = 0, False  # workers that were last measured; other numbers were, too
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
        return self._curve.advice(self._present, compared=self._compared)

    @property
    def learnt(self) -> Learnt:
        return self._learnt

    def most(self) -> tuple[int, str]:
        """How many workers there may be, and why no more."""
        limits = self._seen.limits
        if self._policy is None or self._policy.target >= limits.maximum:
            return limits.maximum, f"the job was scaled to at most {limits.maximum}"
        return max(limits.minimum, self._policy.target), self._policy.reason

    def allowed(self) -> WorkerRange:
        """The range within which the policy lets the job be."""
        least, (most, _) = self._seen.limits.minimum, self.most()
        return WorkerRange(minimum=least, maximum=max(least, most))

    # ---- what happens ----

    def scaled(self) -> list[Instruction]:
        """The range of workers is another now."""
        policy = self._policy
        if policy is None or not policy.scaled(self._seen.limits):
            return []
        return [Record("decision", {"workers": policy.target, "reason": policy.reason})]

    def notice(self, worker_id: int, notice: messages.Notice, now: float) -> list[Instruction]:
        """A worker has something for the journal."""
        told = {**notice.fields, "worker": worker_id}
        learnt = told.pop("learnt", "")
        if notice.event == "pause":
            self._pauses.append(told["total"])
        return [Record(notice.event, told), *(self._recall(learnt) if learnt else [])]

    def _recall(self, text: str) -> list[Instruction]:
        """A worker goes on from a checkpoint that says this."""
        try:
            learnt = Learnt.from_json(text)
        except ValueError as error:
            reason = f"what the checkpoint says of how the job scales can't be used: {error}"
            return [Record("warning", {"message": reason})]
        # It is in the next checkpoint, too, though this job may be over before it has learnt.
        if self._learnt == Learnt():
            self._learnt, self._recalled = learnt, learnt.rejections
        return [i.Recall(learnt), *self._tell()]

    def learn(self, event: e.ScalingLearnt, now: float, *, suspected: bool = False) -> list[Instruction]:
        """``suspected``: a member looks slow."""
        self._curve, self._present = event.curve if event.curve.can_be else Curve(), event.workers
        self._compared = any(each.workers != event.workers for each in event.observations)
        stable = self._rendezvous.world is not None and self._rendezvous.change is None
        members = len(self._rendezvous.active_members()) if stable and not suspected else 0
        out = self._decide(self._policy, event, members, now) if self._policy else []
        rejections = self._policy.rejections(now)[:MOST_OBSERVATIONS] if self._policy else ()
        self._learnt = Learnt(event.observations, rejections, event.forgotten)
        return [*out, *self._tell(), *self._advise(now)]

    def _tell(self) -> list[Instruction]:
        """Any worker may write the next checkpoint; those that connect later are told then."""
        there = tuple(record.worker_id for record in self._records.of(*LIVE) if record.connected)
        if not there or not self._learnt.differs(self._told):
            return []
        self._told = self._learnt
        return [i.Tell(there, messages.Learnt(self._learnt.to_json()))]

    def _decide(self, policy: WorkerTarget, event: e.ScalingLearnt, members: int, now: float) -> list[Instruction]:
        observed = {each.workers for each in event.observations}
        # What was measured of another batch, or on faster machines, was dropped, and so is what followed from it. That a single
        # number is not there means less: that it was slower than fewer is forgotten long before its back-off is over.
        policy.recall(() if event.dropped else self._recalled, now)
        self._recalled = ()
        situation = Situation(
            limits=self._seen.limits,
            present=members,
            measured=event.workers == members,
            incomplete=self._records.live != members,
            observed=observed,
            pause=statistics.median(self._pauses) if self._pauses else UNKNOWN_PAUSE,
            time_left=self._training.time_left(now),
            now=now,
        )
        changed = policy.decide(self._curve, situation)
        return [Record("decision", {"workers": policy.target, "reason": policy.reason})] if changed else []

    def _advise(self, now: float) -> list[Instruction]:
        text = self.advice
        if not text:
            return []
        if self._advised is not None:
            at, present, curve = self._advised
            recent = now - at < ADVICE_SECONDS or not self._curve.differs(curve, MATERIAL)
            if recent and present == self._present:
                return []
        self._advised = now, self._present, self._curve
        return [Record("advice", {"text": text, "curve": self._curve.published()})]
