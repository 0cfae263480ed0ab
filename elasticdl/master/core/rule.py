"""What a rule is: it looks at the job with each tick, and says what is to be done.

| rule | question |
| --- | --- |
| `elasticdl.master.core.watching` | who is silent, late or stuck, and who is given up for it |
| `elasticdl.master.core.slowness` | who holds the others up, and who is replaced for it |
| `elasticdl.master.core.sizing` | how fast the job is with how many workers, and how many pay |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from elasticdl.job.messages import StepReport
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core.events import Instruction
from elasticdl.master.core.rendezvous import Rendezvous
from elasticdl.master.core.values import Settings
from elasticdl.master.core.worker_record import Pulse, Records, Training, WorkerRecord

# How long a member may go without progress.
#
# There are two limits. At the first a member is *named*: its stack is shown to people, which harms nothing. So this limit is
# learnt from the gaps that this job's members survived. At the second a member is *given up*: killed and replaced, which is wrong
# if it would have gone on. This limit is long, and the same for all jobs.
#
# What was learnt counts after a whole epoch with its evaluation and checkpoint or, where epochs are not known, after a member
# has trained for `LONG_ENOUGH`. Until then, for a member's first steps in a world (compilers), and after the last step the
# defaults hold. Nothing is learnt from a member's first steps.


# Times in seconds.
NAME_FACTOR, NAME_FLOOR = 5.0, 10.0  # of the longest gap; heartbeats and noise are shorter than the floor
UNLEARNT_NAME = 120.0
GIVE_UP = 300.0
# For one whose stack moves: it does something, which may be a validation of the user's own.
GIVE_UP_MOVING = 3600.0
LONG_ENOUGH = 1800.0
FIRST_STEPS = 3  # of a member in a world


class ProgressLimits:
    def __init__(self, given: float | None) -> None:
        """``given``: after so long a member is given up, whatever was learnt."""
        self.given = given
        self.longest = 0.0  # gap that a member survived
        self._together_since: float | None = None  # all members wait in a collective
        self._first_epoch: int | None = None
        self._learnt_at: float | None = None  # when what was learnt began to count
        self.ending = False  # what is left to do was not done before: a last evaluation, an export

    def moved(self, pulse: Pulse, now: float) -> None:
        """A member goes on. To be called before ``pulse`` is updated."""
        gap = now - pulse.moved
        if pulse.steps < FIRST_STEPS or pulse.waiting:
            return
        pulse.trained += gap
        self.longest = max(self.longest, gap)
        if pulse.trained >= LONG_ENOUGH:
            self._learn(now)

    def waited(self, pulses: Sequence[Pulse | None], now: float) -> None:
        """With each tick: the pulses of all members, none while the world changes. A collective takes long, too: from when the
        last member has come to it."""
        since = None
        if pulses and all(pulse and pulse.waiting and pulse.steps >= FIRST_STEPS for pulse in pulses):
            since = max(pulse.moved for pulse in pulses if pulse)
        if pulses and self._together_since not in (None, since):
            self.longest = max(self.longest, now - self._together_since)
        self._together_since = since

    def forgive(self, absence: float) -> None:
        """The master was away: nothing is learnt from what it has not seen."""
        if self._together_since is not None:
            self._together_since += absence

    def stepped(self, steps: tuple[StepReport, ...], total_steps: int, now: float) -> None:
        """``total_steps``: of the whole job; 0 if that is not known."""
        if not steps:
            return
        last = steps[-1]
        if self._first_epoch is None:  # the first report may be of many epochs, none of which was seen by this master
            self._first_epoch = last.epoch
        if last.epoch > self._first_epoch:
            self._learn(now)
        self.ending = last.step >= total_steps > 0

    def _learn(self, now: float) -> None:
        if self._learnt_at is None:
            self._learnt_at = now

    def until_named(self, pulse: Pulse | None) -> float:
        """Seconds without progress. One whose stack moves is named when it would be given up if it stood still."""
        learnt = max(NAME_FLOOR, NAME_FACTOR * self.longest) if self._knows(pulse) else UNLEARNT_NAME
        return min(learnt, self.until_given_up)

    @property
    def until_given_up(self) -> float:
        return GIVE_UP if self.given is None else self.given

    def _knows(self, pulse: Pulse | None) -> bool:
        if self._learnt_at is None or self.ending or pulse is None or pulse.steps < FIRST_STEPS:
            return False
        # A step is reported at once. That a member is through with what came before it shows in its next heartbeat.
        return pulse.heard > self._learnt_at


class RuledJob(Protocol):
    """What a rule may see of the job, and what it may ask of it. What is asked is done at once; the instructions say the rest."""

    settings: Settings
    limits: WorkerRange  # as they are now
    records: Records
    rendezvous: Rendezvous
    training: Training
    progress_limits: ProgressLimits

    @property
    def somebody_seems_slow(self) -> bool:
        """A member looks slow, and has not been watched for long enough to say so."""

    def give_up(self, record: WorkerRecord, reason: str, now: float) -> list[Instruction]:
        """Kill this worker, and replace it."""

    def replace(self, record: WorkerRecord, reason: str, now: float) -> list[Instruction]:
        """Let this worker leave, and another take its place."""

    def leave_world(self, cause: str, now: float) -> None:
        """Let all members leave their world, and form the next."""


class Rule(Protocol):
    """A rule remarks on workers in their records. Whatever else is to change, it asks of the job."""

    def look(self, job: RuledJob, now: float) -> Iterable[Instruction]:
        """Called with each tick, until it is decided how the job ends."""
