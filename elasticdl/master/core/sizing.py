"""How the job scales, as far as its steps tell: what it says of that, and how many workers it wants.

Of what `SizeRule` holds a next master has the speeds and the target; the rest may be lost without harm.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from elasticdl.common.backoff import Backoff
from elasticdl.job.messages import StepReport
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core.events import Instruction, Record
from elasticdl.master.core.rule import RuledJob
from elasticdl.master.core.speedup import Observation, SpeedupCurve, SpeedupPoint
from elasticdl.master.core.values import Settings, World
from elasticdl.master.core.worker_record import JobSnapshot

# From the steps that are reported to one observation for each number of workers.


# Steps of a world that are not measured: the first are slow, as caches are cold and newcomers warm up.
SKIPPED = 3
KEPT = 200  # newest steps of a world that count
FEWEST = 10  # steps of one size that make an observation
# At least this share of the steps has that size. Otherwise another size may be the commonest in the next world, and only steps of
# the same size are compared.
USUAL = 0.6
TRIMMED = 0.1  # of the steps, at each end: evaluations, checkpoints, what else the machine does
# A world has been measured after so many steps, or after so long and at least half of FEWEST.
ENOUGH, LONG = 20, 60.0
# If the same number of workers comes again and is this much faster or slower, all older measurements are outdated. So are they if
# more workers are faster, by this much, than their smaller parts of the batch allow.
CONTRADICTION = 0.25
# A measurement that more workers are slower may be the machine's fault: it is kept for so long.
BELIEVED = 600.0
# Numbers of workers of which the speed is kept: what a cluster keeps of a job has to be small.
MOST_OBSERVATIONS = 32


class MeasuredSteps:
    """Times are passed in, seconds."""

    def __init__(self) -> None:
        self.workers = 0  # in the present world; 0 as long as there is none
        self._version = 0
        self._steps: deque[StepReport] = deque(maxlen=KEPT)  # of the present world
        self._seen = 0
        self._compared = False
        self._last = 0.0  # time of the last of them
        self._known: dict[int, tuple[float, Observation]] = {}  # of earlier worlds, and when; the newest last

    def recall(self, observations: Sequence[Observation], now: float) -> None:
        """What an earlier job, or an earlier master of this one, has measured."""
        for each in observations:
            self._known.setdefault(each.workers, (now - each.age, each))

    def enter(self, version: int, workers: int) -> bool:
        """The present world has so many workers. Returns whether it is another than before."""
        if version == self._version:
            return False
        self._remember()
        self.workers, self._version = workers, version
        self._steps.clear()
        self._seen, self._compared = 0, False
        return True

    def take(self, step: StepReport, now: float) -> None:
        if step.world_version != self._version:
            return  # of a world that is over: its last moments count for nothing
        self._seen += 1
        # What an `Observation` may have: a worker tells what it likes.
        if self._seen > SKIPPED and 1e-9 <= step.seconds <= 1e9 and 0 < step.samples <= 2**53:
            self._steps.append(step)
            self._last = now

    @property
    def enough(self) -> bool:
        return _are_enough(_alike(self._steps))

    def observations(self, now: float) -> tuple[Observation, ...]:
        """By number of workers; no more than MOST_OBSERVATIONS, the newest."""
        self._compare()
        present = self._present()
        if present:
            self._forget_slower(present, now)
        found = {n: replace(each, age=max(0.0, now - at)) for n, (at, each) in self._known.items()}
        if present:
            found.pop(self.workers, None)
            found[self.workers] = replace(present, age=max(0.0, now - self._last))
        newest = sorted(found.values(), key=lambda each: each.age)[:MOST_OBSERVATIONS]
        return tuple(sorted(newest, key=lambda each: each.workers))

    def _present(self) -> Observation | None:
        alike = _alike(self._steps)
        if len(alike) < FEWEST and not _are_enough(alike):
            return None
        return summarize(self.workers, alike)

    def _remember(self) -> None:
        self._compare()
        if present := self._present():
            self._known.pop(self.workers, None)
            self._known[self.workers] = self._last, present
        while len(self._known) > MOST_OBSERVATIONS:
            del self._known[next(iter(self._known))]

    def _forget_slower(self, present: Observation, now: float) -> None:
        """Forget numbers that were slower than the present one, after a while: as a measurement is believed, they would never be tried
        again. (If the policy has given one up, it waits for its back-off, too.)"""
        for workers, (at, each) in list(self._known.items()):
            slower = workers > present.workers and each.rate <= present.rate
            if slower and now - at > BELIEVED:
                del self._known[workers]

    def _compare(self) -> None:
        """Compare the present world with what was known of other numbers of workers, and once with what was known of this number."""
        if not (self._known and (present := self._present())):
            return
        others = [before for _, before in self._known.values()]
        if any(_is_impossible(present, before) or _is_of_another_batch(present, before) for before in others):
            self._known.clear()
        if self._compared or self.workers not in self._known:
            return
        self._compared = True
        _, before = self._known[self.workers]
        if abs(math.log(present.seconds / before.seconds)) > CONTRADICTION:
            self._known.clear()


def _is_impossible(one: Observation, other: Observation) -> bool:
    """As where the first epoch reads its data from afar, and the next ones don't."""
    few, many = sorted((one, other), key=lambda each: each.workers)
    if few.workers == many.workers:
        return False
    smaller = math.ceil(few.samples / few.workers) / math.ceil(many.samples / many.workers)
    return math.log(few.seconds / many.seconds) > math.log(smaller) + CONTRADICTION


def _is_of_another_batch(one: Observation, other: Observation) -> bool:
    """Neither is the global batch the same, nor each worker's; nearly, as a script may leave out what can't be divided."""
    of_all = abs(math.log(one.samples / other.samples))
    of_each = abs(math.log(one.samples / other.samples * other.workers / one.workers))
    return of_all > 0 if one.workers == other.workers else min(of_all, of_each) > CONTRADICTION


def _alike(steps: Collection[StepReport]) -> list[StepReport]:
    """Those of the usual size, without others as at the end of an epoch; none if steps have no usual size."""
    if not steps:
        return []
    samples = statistics.mode(step.samples for step in steps)
    alike = [step for step in steps if step.samples == samples]
    return alike if len(alike) >= USUAL * len(steps) else []


def _are_enough(alike: Sequence[StepReport]) -> bool:
    long = len(alike) >= FEWEST / 2 and sum(step.seconds for step in alike) >= LONG
    return len(alike) >= ENOUGH or long


def summarize(workers: int, alike: Sequence[StepReport]) -> Observation:
    """Of steps of one size."""
    seconds = sorted(step.seconds for step in alike)
    cut = int(len(seconds) * TRIMMED)
    kept = seconds[cut : len(seconds) - cut]
    return Observation(workers, alike[0].samples, statistics.fmean(kept))


# How many workers pay: the policy of ``--scale_policy efficiency``.
#
# The job wants the largest number of workers N within its range for which each does at least ``--min_efficiency`` of what one
# does alone: speedup(N) / N. It
#
# - starts with the fewest, and tries more: up to twice as many if they pay even where the estimate is wrong by `DOUBT`, else one
#   more if it may pay, or if nothing is known of it;
# - stays until it has measured, and gives up a number that does not pay. That one, and any above it, is tried again after a
#   back-off that doubles each time;
# - changes only if what is gained within the horizon is more than what a pause costs.
#
# So in a time t there are at most about 2 log2(t / FIRST_BACKOFF) changes over each number of workers, however noisy the speed is.


FIRST_BACKOFF = 600.0
LONGEST_BACKOFF = 4 * 3600.0
# Seconds for which a gain is counted, unless the job is over sooner.
HORIZON = 600.0
UNKNOWN = "how the job scales is not known yet"
# By this part an estimate may be wrong.
DOUBT = 0.1
# The present number is kept unless its efficiency is below the limit by this part.
SLACK = 0.02


@dataclass(frozen=True, slots=True)
class Situation:
    """Where the job stands. Times in seconds."""

    limits: WorkerRange
    present: int  # members of the world
    measured: bool  # they have made enough steps
    incomplete: bool  # others are on their way, or have no place
    pause: float  # that a change costs
    time_left: float  # of the job; negative if not known
    now: float

    @property
    def horizon(self) -> float:
        return min(HORIZON, self.time_left) if self.time_left >= 0 else HORIZON


class WorkerTarget:
    def __init__(self, least_efficiency: float, target: int) -> None:
        self.target = target
        self._does, self._why = f"starts with {target}", UNKNOWN
        self._least = least_efficiency
        self._rejected: dict[int, tuple[float, Backoff]] = {}  # until when it is not tried

    @property
    def reason(self) -> str:
        """Why as many workers are wanted."""
        return f"{self._does}: {self._why}"

    def decide(self, curve: SpeedupCurve, at: Situation) -> bool:
        """Returns whether it does something else now than before; numbers in the reason may change with each measurement."""
        before = self.target, self._does
        self._fit_into(at.limits)
        if at.measured and not self._give_up(curve, at):
            self._try_more(curve, at)
        return before != (self.target, self._does)

    def scaled(self, limits: WorkerRange) -> bool:
        """The range has changed, so the reason changes, too. Returns whether the target has changed."""
        if self._fit_into(limits):
            return True
        self._stay(f"the job was scaled to {limits}, and nothing was measured since")
        return False

    def _fit_into(self, limits: WorkerRange) -> bool:
        before, self.target = self.target, min(max(self.target, limits.minimum), limits.maximum)
        if self.target == before:
            return False
        self._does, self._why = f"goes to {self.target}", f"the job was scaled to {limits}"
        return True

    def _give_up(self, curve: SpeedupCurve, at: Situation) -> bool:
        """Whether there are too many."""
        here = curve.at(at.present)
        if here is None or here.workers <= at.limits.minimum or self._may_pay(here, self._least * (1 - SLACK)):
            return False
        fewer = range(at.limits.minimum, here.workers)
        best = max((n for n in fewer if (point := curve.at(n)) and self._pays(point)), default=at.limits.minimum)
        if at.horizon * (here.workers - best) <= at.pause * here.workers:
            self._stay("the job is over too soon for a change to pay")
            return True
        self._reject(here.workers, at.now)
        self.target = best
        self._does, self._why = f"goes back to {best}", self._each_does(here, "does")
        return True

    def _try_more(self, curve: SpeedupCurve, at: Situation) -> None:
        if at.present != self.target or at.incomplete:
            return  # what it has asked for is on its way
        if at.present == at.limits.maximum:
            self._stay("--num_workers allows no more")
            return
        most, here, more = self._most(at), curve.at(at.present), curve.at(at.present + 1)
        if here is None or more is None:  # the first number that is measured tells nothing of others
            if at.present == most:
                self._stay("a further worker does not pay, and is not yet tried again")
            else:
                self._try(at.present + 1, UNKNOWN, 1 / at.present, at)
            return
        points = [point for point in curve.above(at.present) if point.workers <= most]
        promising = [point for point in points if self._is_promising(point, at)]
        if not promising:
            says = "would not pay" if points else "does not pay, and is not yet tried again"
            each_does = self._each_does(more, "did" if more.measured else "would do")
            self._stay(f"a further worker {says}" if self._pays(more) else each_does)
            return
        best = promising[-1]
        gain = best.speedup / here.speedup - 1
        if best.measured and not self._pays(best):
            self._try(best.workers, self._each_does(best, "did"), gain, at, again=" again")
        else:
            self._try(best.workers, self._each_does(best, "should do", wanted=True), gain, at)

    def _try(self, workers: int, why: str, gain: float, at: Situation, again: str = "") -> None:
        """``gain``: by what share of its speed the job should become faster."""
        if at.horizon * gain <= at.pause:
            self._stay(f"in the time that is left {workers} would gain less than the change costs")
            return
        self.target = workers
        self._does, self._why = f"tries {workers}{again}", why

    def _stay(self, why: str) -> None:
        self._does, self._why = f"stays at {self.target}", why

    def _is_promising(self, point: SpeedupPoint, at: Situation) -> bool:
        if point.measured:
            return self._pays(point) or self._is_due_again(point, at)
        if point.workers == at.present + 1:
            return self._may_pay(point, self._least)
        return point.workers <= 2 * at.present and self._surely_pays(point)

    def _is_due_again(self, point: SpeedupPoint, at: Situation) -> bool:
        """Rejected once, and its back-off is over: the machine may have been busy then.

        Not after a second time: a number that is always a little short of the limit would come and go.
        """
        if point.workers != at.present + 1 or point.workers not in self._rejected:
            return False
        _, backoff = self._rejected[point.workers]
        return backoff.bound() == FIRST_BACKOFF

    def _most(self, at: Situation) -> int:
        """The largest number that may be tried now."""
        waiting = [workers for workers, (until, _) in self._rejected.items() if at.now < until]
        return min([at.limits.maximum, *(workers - 1 for workers in waiting)])

    def _pays(self, point: SpeedupPoint) -> bool:
        return point.efficiency >= self._least

    def _surely_pays(self, point: SpeedupPoint) -> bool:
        return point.efficiency * (1 - DOUBT) >= self._least

    def _may_pay(self, point: SpeedupPoint, least: float) -> bool:
        return point.efficiency * (1 if point.measured else 1 + DOUBT) >= least

    def _reject(self, workers: int, now: float) -> None:
        _, backoff = self._rejected.get(workers, (0.0, Backoff(first=FIRST_BACKOFF, longest=LONGEST_BACKOFF)))
        self._rejected[workers] = now + backoff.delay(), backoff

    def _each_does(self, point: SpeedupPoint, does: str, *, wanted: bool = False) -> str:
        text = f"of {point.workers} workers each {does} {point.efficiency:.2f} of what one does alone"
        return text + (
            f", at least {self._least:g} is wanted" if wanted else f", less than --min_efficiency {self._least:g}"
        )


# By this part of its seconds a step has to differ for the advice to be said again.
MATERIAL = 0.05
# What a change costs is the median of so many pauses, or this many seconds before there was any.
PAUSES_KEPT = 32
UNKNOWN_PAUSE = 1.0
# After a world has formed, what its steps tell counts after so long at first, and then after twice as long each time.
FIRST_SECONDS, LONGEST_SECONDS = 4.0, 60.0


class SizeRule:
    """It reads the workers' records and the training, and never changes them."""

    def __init__(self, settings: Settings, past: JobSnapshot) -> None:
        self._curve = SpeedupCurve()
        # Until the job's own steps tell whether its machines are still those.
        self._recalled: tuple[Observation, ...] = past.speeds
        self._steps = MeasuredSteps()
        self._backoff, self._due = Backoff(first=FIRST_SECONDS, longest=LONGEST_SECONDS), 0.0
        self._policy: WorkerTarget | None = None
        if settings.scale_policy == "efficiency":
            self._policy = WorkerTarget(settings.min_efficiency, past.target or past.limits.minimum)
        # Both for people: how fast it is with how many workers, and why as many are wanted.
        self.advice, self.decision = "", self._policy.reason if self._policy else ""
        self._pauses: deque[float] = deque(maxlen=PAUSES_KEPT)
        self._present = 0  # workers that were last measured
        self._advised: tuple[int, dict[int, float]] | None = None  # for how many workers, by which seconds of a step

    # ---- what is so ----

    @property
    def target(self) -> int:
        """Workers that the policy wants; 0 if there is none."""
        return self._policy.target if self._policy else 0

    @property
    def speeds(self) -> tuple[Observation, ...]:
        """What is known of how fast the job is, for the next master."""
        return self._curve.observations or self._recalled

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
        if policy is None:
            return []
        changed, self.decision = policy.scaled(limits), policy.reason
        return [Record("decision", {"workers": policy.target, "reason": policy.reason})] if changed else []

    def paused(self, seconds: float) -> None:
        """For so long a change has kept a worker from training."""
        self._pauses.append(seconds)

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
        self._steps.recall(self._recalled, now)
        self._recalled = ()
        self._curve, self._present = SpeedupCurve(self._steps.observations(now)), self._steps.workers
        if self._policy is not None:
            yield from self._decide(self._policy, job, now)
        yield from self._advise()

    def _decide(self, policy: WorkerTarget, job: RuledJob, now: float) -> list[Instruction]:
        members = len(job.rendezvous.active_members())
        situation = Situation(
            limits=job.limits,
            present=members,
            measured=self._present == members,
            incomplete=job.records.live != members,
            pause=statistics.median(self._pauses) if self._pauses else UNKNOWN_PAUSE,
            time_left=job.training.time_left(now),
            now=now,
        )
        changed, self.decision = policy.decide(self._curve, situation), policy.reason
        return [Record("decision", {"workers": policy.target, "reason": policy.reason})] if changed else []

    def _advise(self) -> list[Instruction]:
        """Said again for another number of workers, or when one of the numbers is faster or slower by `MATERIAL`."""
        self.advice = self._curve.advice(self._present)
        known = {each.workers: each.seconds for each in self._curve.observations}
        present, before = self._advised or (0, {})
        is_old = present == self._present and known.keys() == before.keys()
        if not self.advice or (is_old and all(abs(known[n] - before[n]) <= MATERIAL * before[n] for n in known)):
            return []
        self._advised = self._present, known
        return [Record("advice", {"text": self.advice, "curve": self._curve.published(self._present)})]
