"""How fast the job is with how many workers, what it says of that, and how many workers it wants.

Of what `SizeRule` holds a next master has the target; the rest is measured anew.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from elasticdl.common.backoff import Backoff
from elasticdl.job.messages import StepReport
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core.events import Instruction, Record
from elasticdl.master.core.rule import RuledJob
from elasticdl.master.core.values import Settings, World
from elasticdl.master.core.worker_record import JobSnapshot

# How fast a job trains with how many workers, compared with one: what was measured, and what follows for other numbers.
#
# A number that was measured is believed as measured. For others the time of a step is
#
#     T(N) = a + b * share + c * (N - 1)        a, b, c >= 0
#
# by least squares over the numbers that were measured. ``share`` is the largest part of the global batch that one worker has;
# it is constant where the batch follows the workers. What this form misses at the next smaller number that was measured is
# corrected. As long as only one number was measured, nothing is known of others.


ROUNDS = 1000  # of least squares; they take a few milliseconds


@dataclass(frozen=True, slots=True)
class Observation:
    """Ordinary steps with one number of workers."""

    workers: int
    samples: int  # of a step
    seconds: float  # of a step, the mean without the extremes

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds


@dataclass(frozen=True, slots=True)
class SpeedupPoint:
    """With so many workers the job trains ``speedup`` times as fast as with one."""

    workers: int
    speedup: float
    measured: bool  # so many, and one; else it is an estimate

    @property
    def efficiency(self) -> float:
        """The part of one worker's work alone that each of these does."""
        return self.speedup / self.workers


class SpeedupCurve:
    """What is known of the speedup; nothing, if there are no observations, or of one number of workers only.

    ``observations``: by number of workers.
    """

    def __init__(self, observations: Sequence[Observation] = ()) -> None:
        self._measured = {each.workers: each for each in observations}
        self._form = _Form(observations) if len(observations) > 1 else None

    @property
    def seconds(self) -> dict[int, float]:
        """Of a step, by number of workers that was measured."""
        return {workers: each.seconds for workers, each in self._measured.items()}

    def at(self, workers: int) -> SpeedupPoint | None:
        """None, if nothing is known of so many. N workers never do more than N times the work of one."""
        if self._form is None:
            return SpeedupPoint(1, 1.0, True) if workers == 1 in self._measured else None
        speedup = min(float(workers), self._rate(workers) / self._rate(1))
        return SpeedupPoint(workers, speedup, workers in self._measured and 1 in self._measured)

    def above(self, present: int) -> Iterator[SpeedupPoint]:
        """Of more workers, as far as twice as many, and of those beyond that were measured."""
        numbers = {*range(present + 1, 2 * present + 1), *(n for n in self._measured if n > present)}
        return (point for n in sorted(numbers) if (point := self.at(n)) is not None)

    def _rate(self, workers: int) -> float:
        assert self._form is not None, "an estimate needs several numbers of workers"
        if workers in self._measured:
            return self._measured[workers].rate
        # What the form misses where it is closest is taken to be missed here, too.
        near = max((n for n in self._measured if n < workers), default=min(self._measured))
        missed = self._measured[near].seconds / self._form.seconds(near)
        return self._form.samples(workers) / (self._form.seconds(workers) * missed)

    def published(self, present: int) -> list[dict[str, Any]]:
        """For people and other programs: the numbers that were measured, the present one, one more, and twice as many."""
        numbers = sorted({1, *self._measured, present, present + 1, 2 * present} - {0})
        points = [point for n in numbers if (point := self.at(n)) is not None]
        return [{"workers": p.workers, "speedup": round(p.speedup, 3), "measured": p.measured} for p in points]

    def advice(self, present: int) -> str:
        """What so many workers bring, and one more; empty if there is nothing to say."""
        here, more = self.at(present), self.at(present + 1)
        if here is None:
            alone = f"only {present} workers were measured, so what fewer or more would do is not known"
            return alone if present in self._measured else ""
        if more is None:
            return ""
        said = []
        if present > 1:
            how = "measured" if here.measured else "by estimate"
            each = f"each does {here.efficiency:.2f} of one worker, {how}"
            said.append(f"{present} workers do {here.speedup:.1f} times the work of one ({each})")
        said.append(f"one more {_brings(more, more.speedup - here.speedup)}")
        return "; ".join(said)


class _Form:
    """T(N) = a + b * share + c * (N - 1), by the observations of at least two numbers of workers."""

    def __init__(self, observations: Sequence[Observation]) -> None:
        fewest, most = observations[0], observations[-1]
        growth = math.log(most.samples / fewest.samples) / math.log(most.workers / fewest.workers)
        self._follows = growth > 0.5  # the global batch follows the number of workers
        self._batch = most.samples / most.workers if self._follows else float(most.samples)
        # Relative to the seconds that were measured: errors are in proportion to them.
        rows = [[term / each.seconds for term in self._terms(each.workers)] for each in observations]
        self._factors = _least_squares(rows)

    def samples(self, workers: int) -> float:
        return self._batch * workers if self._follows else self._batch

    def seconds(self, workers: int) -> float:
        """Positive, however absurd the observations are."""
        return max(sum(map(float.__mul__, self._factors, self._terms(workers))), 1e-12)

    def _terms(self, workers: int) -> list[float]:
        share = 1.0 if self._follows else math.ceil(self._batch / workers) / self._batch
        return [1.0, *([] if self._follows else [share]), workers - 1.0]


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float]:
    """Factors >= 0 of the columns, with which each row sums up to 1, nearly: one after another each is made the best beside the others.

    Where several choices are as good, as with fewer rows than columns, the earlier columns have the larger part.
    """
    columns = range(len(rows[0]))
    products = [[sum(row[i] * row[j] for row in rows) for j in columns] for i in columns]
    wanted = [sum(row[i] for row in rows) for i in columns]
    factors = [0.0 for _ in columns]
    for _ in range(ROUNDS):
        for i in columns:
            missing = wanted[i] - sum(map(float.__mul__, products[i], factors))
            factors[i] = max(0.0, factors[i] + missing / products[i][i])
    return factors


def _brings(more: SpeedupPoint, gain: float) -> str:
    if more.measured:
        return f"adds {gain:.1f}, measured" if round(gain, 1) > 0 else "adds nothing, measured"
    if round(gain, 1) > 0:
        return f"would add about {gain:.1f}"
    return "would make the job slower" if round(gain, 1) < 0 else "would add nothing that can be measured"


# From the steps that are reported to one observation for each number of workers.


# Steps of a world that are not measured: the first are slow, as caches are cold and newcomers warm up.
SKIPPED = 3
KEPT = 200  # newest steps of a world that count
# At least this share of the steps has one size. Otherwise another size may be the commonest in the next world, and only steps of
# the same size are compared.
USUAL = 0.6
TRIMMED = 0.1  # of the steps, at each end: evaluations, checkpoints, what else the machine does
# A world has been measured after so many steps of one size, or after so many that took so long.
ENOUGH, FEWEST, LONG = 20, 5, 60.0
# If the same number of workers becomes this much faster or slower, all older measurements are outdated. So are they if more
# workers are each this much faster than fewer.
CONTRADICTION = 0.25
# So long a measurement that more workers are no better is believed: it may have been the machine's fault.
BELIEVED = 600.0


class MeasuredSteps:
    """Times are passed in, seconds."""

    def __init__(self) -> None:
        self.workers = 0  # in the present world; 0 as long as there is none
        self._version = 0
        self._steps: deque[StepReport] = deque(maxlen=KEPT)  # of the present world
        self._seen = 0
        self._known: dict[int, tuple[float, Observation]] = {}  # by number of workers, and when it was measured

    def enter(self, version: int, workers: int) -> bool:
        """The present world has so many workers. Returns whether it is another than before."""
        if version == self._version:
            return False
        self.workers, self._version = workers, version
        self._steps.clear()
        self._seen = 0
        return True

    def take(self, step: StepReport) -> None:
        if step.world_version != self._version:
            return  # of a world that is over: its last moments count for nothing
        self._seen += 1
        # What an `Observation` may have: a worker tells what it likes.
        if self._seen > SKIPPED and 1e-9 <= step.seconds <= 1e9 and 0 < step.samples <= 2**53:
            self._steps.append(step)

    @property
    def enough(self) -> bool:
        alike = _alike(self._steps)
        return len(alike) >= ENOUGH or (len(alike) >= FEWEST and sum(step.seconds for step in alike) >= LONG)

    def observations(self, now: float) -> tuple[Observation, ...]:
        """By number of workers."""
        if self.enough:
            self._measure(summarize(self.workers, _alike(self._steps)), now)
        return tuple(each for _, (_, each) in sorted(self._known.items()))

    def _measure(self, present: Observation, now: float) -> None:
        if any(_contradict(present, before) for _, before in self._known.values()):
            self._known.clear()
        # As a measurement is believed, a number that did not pay would never be tried again.
        outdated = [n for n, (at, _) in self._known.items() if n > self.workers and now - at > BELIEVED]
        for workers in outdated:
            del self._known[workers]
        self._known[self.workers] = now, present


def _contradict(one: Observation, other: Observation) -> bool:
    """As where the first epoch reads its data from afar, and the next ones don't."""
    few, many = sorted((one, other), key=lambda each: each.workers)
    gain = math.log(many.rate / many.workers) - math.log(few.rate / few.workers)
    return gain > CONTRADICTION or (few.workers == many.workers and gain < -CONTRADICTION)


def _alike(steps: Collection[StepReport]) -> list[StepReport]:
    """Those of the usual size, without others as at the end of an epoch; none if steps have no usual size."""
    if not steps:
        return []
    samples = statistics.mode(step.samples for step in steps)
    alike = [step for step in steps if step.samples == samples]
    return alike if len(alike) >= USUAL * len(steps) else []


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
# - stays until it has measured, and gives up a number that does not pay. That one, and any above it, is tried again soon, as the
#   machine may have been busy; but if it was given up before, much later;
# - changes nothing shortly before the end.
#
# So changes over each number of workers are few, however noisy the speed is.


# Seconds until a number is tried again that was given up once, and one that was given up several times.
FIRST_BACKOFF, NEXT_BACKOFF = 600.0, 4 * 3600.0
# With less time left, in seconds, a change would cost more than it brings.
SHORT = 15.0
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
    time_left: float  # of the job; negative if not known
    now: float


class WorkerTarget:
    def __init__(self, least_efficiency: float, target: int) -> None:
        self.target = target
        self._does, self._why = f"starts with {target}", UNKNOWN
        self._least = least_efficiency
        self._rejected: dict[int, float] = {}  # until when it is not tried

    @property
    def reason(self) -> str:
        """Why as many workers are wanted."""
        return f"{self._does}: {self._why}"

    def decide(self, curve: SpeedupCurve, at: Situation) -> bool:
        """Returns whether it does something else now than before; numbers in the reason may change with each measurement."""
        before = self.target, self._does
        self._fit_into(at.limits)
        if 0 <= at.time_left < SHORT:
            self._stay("the job is over too soon for a change to pay")
        elif at.measured and not self._give_up(curve, at):
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
        here, least = curve.at(at.present), at.limits.minimum
        if here is None or here.workers <= least or self._pays(here, SLACK if here.measured else DOUBT):
            return False
        self._rejected[here.workers] = at.now + (NEXT_BACKOFF if here.workers in self._rejected else FIRST_BACKOFF)
        fewer = [point for n in range(least, here.workers) if (point := curve.at(n)) and self._pays(point)]
        self.target = fewer[-1].workers if fewer else least
        self._does, self._why = f"goes back to {self.target}", self._each_does(here, "does")
        return True

    def _try_more(self, curve: SpeedupCurve, at: Situation) -> None:
        if at.present != self.target or at.incomplete:
            return  # what it has asked for is on its way
        if at.present == at.limits.maximum:
            # As of a job that has a new master: of this number alone nobody knows whether it pays.
            if curve.at(at.present) is None and at.present > at.limits.minimum:
                self._try(at.present - 1, UNKNOWN)
            else:
                self._stay("--num_workers allows no more")
            return
        waiting = [workers for workers, until in self._rejected.items() if at.now < until]
        most = min([at.limits.maximum, *(workers - 1 for workers in waiting)])
        more = curve.at(at.present + 1)
        if more is None and at.present < most:  # the first number that is measured tells nothing of others
            self._try(at.present + 1, UNKNOWN)
            return
        points = [point for point in curve.above(at.present) if point.workers <= most]
        if promising := [point for point in points if self._is_promising(point, at.present)]:
            self._try(promising[-1].workers, self._each_does(promising[-1], "should do", wanted=True))
        elif more is None or self._pays(more):
            self._stay("a further worker does not pay, and is not yet tried again")
        else:
            self._stay(self._each_does(more, "did" if more.measured else "would do"))

    def _try(self, workers: int, why: str) -> None:
        self.target = workers
        self._does, self._why = f"tries {workers}", why

    def _stay(self, why: str) -> None:
        self._does, self._why = f"stays at {self.target}", why

    def _is_promising(self, point: SpeedupPoint, present: int) -> bool:
        if point.measured:
            return self._pays(point)
        return self._pays(point, DOUBT if point.workers == present + 1 else -DOUBT)

    def _pays(self, point: SpeedupPoint, doubt: float = 0.0) -> bool:
        return point.efficiency * (1 + doubt) >= self._least

    def _each_does(self, point: SpeedupPoint, does: str, *, wanted: bool = False) -> str:
        text = f"of {point.workers} workers each {does} {point.efficiency:.2f} of what one does alone"
        return text + (
            f", at least {self._least:g} is wanted" if wanted else f", less than --min_efficiency {self._least:g}"
        )


# By this part of its seconds a step has to differ for the advice to be said again.
MATERIAL = 0.05
# After a world has formed, what its steps tell counts after so long at first, and then after twice as long each time.
FIRST_SECONDS, LONGEST_SECONDS = 4.0, 60.0


class SizeRule:
    """It reads the workers' records and the training, and never changes them."""

    def __init__(self, settings: Settings, past: JobSnapshot) -> None:
        self._steps = MeasuredSteps()
        self._backoff, self._due = Backoff(first=FIRST_SECONDS, longest=LONGEST_SECONDS), 0.0
        self._policy: WorkerTarget | None = None
        if settings.scale_policy == "efficiency":
            self._policy = WorkerTarget(settings.min_efficiency, past.target or past.limits.minimum)
        # Both for people: how fast it is with how many workers, and why as many are wanted.
        self.advice, self.decision = "", self._policy.reason if self._policy else ""
        self._advised: tuple[int, dict[int, float]] | None = None  # for how many workers, by which seconds of a step

    # ---- what is so ----

    @property
    def target(self) -> int:
        """Workers that the policy wants; 0 if there is none."""
        return self._policy.target if self._policy else 0

    def most(self, limits: WorkerRange) -> tuple[int, str]:
        """How many workers there may be, and why no more."""
        if self._policy is None or self._policy.target >= limits.maximum:
            return limits.maximum, f"the job was scaled to at most {limits.maximum}"
        return max(limits.minimum, self._policy.target), self._policy.reason

    def allowed(self, limits: WorkerRange) -> WorkerRange:
        """The range within which the policy lets the job be."""
        return WorkerRange(minimum=limits.minimum, maximum=self.most(limits)[0])

    # ---- what happens ----

    def scaled(self, limits: WorkerRange, now: float) -> list[Instruction]:
        """The range of workers is another now. Whoever asked for it watches what comes of it."""
        self._backoff.reset()
        self._due = now
        return self._decided(self._policy, self._policy.scaled(limits)) if self._policy else []

    def stepped(self, world: World | None, steps: Sequence[StepReport], now: float) -> None:
        """Steps that were not reported before."""
        if world and self._steps.enter(world.version, len(world.members)):
            self._backoff.reset()
            self._due = now + FIRST_SECONDS
        for step in steps:
            self._steps.take(step)

    def look(self, job: RuledJob, now: float) -> Iterator[Instruction]:
        stable = job.rendezvous.world is not None and job.rendezvous.change is None
        # While a member looks slow, and is not called so yet, it may be why the job is, and not the number of workers.
        if now < self._due or not self._steps.enough or not stable or job.somebody_seems_slow:
            return
        self._due = now + self._backoff.delay()
        curve, members = SpeedupCurve(self._steps.observations(now)), len(job.rendezvous.active_members())
        if self._policy is not None:
            situation = Situation(
                limits=job.limits,
                present=members,
                measured=self._steps.workers == members,
                incomplete=job.records.live != members,
                time_left=job.training.time_left(now),
                now=now,
            )
            yield from self._decided(self._policy, self._policy.decide(curve, situation))
        yield from self._advise(curve, self._steps.workers)

    def _decided(self, policy: WorkerTarget, changed: bool) -> list[Instruction]:
        self.decision = policy.reason
        return [Record("decision", {"workers": policy.target, "reason": policy.reason})] if changed else []

    def _advise(self, curve: SpeedupCurve, present: int) -> list[Instruction]:
        """Said again for another number of workers, or when one of the numbers is faster or slower by `MATERIAL`."""
        self.advice, known = curve.advice(present), curve.seconds
        workers, before = self._advised or (0, {})
        is_old = workers == present and known.keys() == before.keys()
        if not self.advice or (is_old and all(abs(known[n] - before[n]) <= MATERIAL * before[n] for n in known)):
            return []
        self._advised = present, known
        return [Record("advice", {"text": self.advice, "curve": curve.published(present)})]
