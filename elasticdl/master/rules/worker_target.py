"""How many workers pay: the policy of ``--scale_policy efficiency``.

The job wants the largest number of workers N within its range for which each does at least ``--min_efficiency`` of what one
does alone: speedup(N) / N. It

- starts with the fewest, and tries more: twice as many if that is certain to pay, else one more if that may well pay;
- stays until it has measured, and gives up a number that does not pay. That one, and any above it, is tried again after a
  back-off that doubles each time, or after an eighth of it if by then it is certain to pay;
- changes only if what is gained within the horizon is more than what a pause costs.

So in a time t there are at most about 2 log2(t / FIRST_BACKOFF) changes over each number of workers, however noisy the speed is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elasticdl.common.backoff import Backoff
from elasticdl.job.spec import WorkerRange
from elasticdl.master.state.learnt import Rejection
from elasticdl.master.state.speedup import Curve, Point

FIRST_BACKOFF = 600.0
LONGEST_BACKOFF = 4 * 3600.0
EARLY = 1 / 8
# Seconds for which a gain is counted, unless the job is over sooner.
HORIZON = 600.0
# The present number is kept unless its efficiency is below the limit by this part.
SLACK = 0.02


@dataclass(frozen=True, slots=True)
class Situation:
    """Where the job stands. Times in seconds."""

    limits: WorkerRange
    present: int  # members of the world
    measured: bool  # they have made enough steps
    incomplete: bool  # others are on their way, or have no place
    observed: Collection[int]  # numbers of workers that were measured
    pause: float  # that a change costs
    time_left: float  # of the job; negative if not known
    now: float

    @property
    def horizon(self) -> float:
        return min(HORIZON, self.time_left) if self.time_left >= 0 else HORIZON


class WorkerTarget:
    def __init__(self, least_efficiency: float, target: int) -> None:
        self.target = target
        self.reason = f"starts with {target}: how the job scales is not known yet"
        self._least = least_efficiency
        self._rejected: dict[int, tuple[float, Backoff]] = {}  # until when it is not tried

    def rejections(self, now: float) -> tuple[Rejection, ...]:
        each = sorted(self._rejected.items())
        return tuple(Rejection(n, max(0.0, until - now), backoff.bound()) for n, (until, backoff) in each)

    def recall(self, rejections: Sequence[Rejection], now: float) -> None:
        """What an earlier job, or an earlier master of this one, has found not to pay."""
        for each in rejections:
            backoff = Backoff(first=each.backoff, longest=LONGEST_BACKOFF)
            backoff.delay()  # which is the one that it had
            self._rejected.setdefault(each.workers, (now + min(each.left, LONGEST_BACKOFF), backoff))

    def decide(self, curve: Curve, at: Situation) -> bool:
        """Returns whether the target has changed, or the reason why it stays."""
        before = self.target, self.reason.partition(":")[0]
        self._fit_into(at.limits)
        here = curve.at(at.present)
        if here is not None and at.measured and not self._give_up(curve, here, at):
            self._try_more(curve, here, at)
        return before != (self.target, self.reason.partition(":")[0])

    def scaled(self, limits: WorkerRange) -> bool:
        """The range has changed, so the reason changes, too. Returns whether the target has changed."""
        if self._fit_into(limits):
            return True
        self.reason = f"stays at {self.target}: the job was scaled to {limits}, and nothing was measured since"
        return False

    def _fit_into(self, limits: WorkerRange) -> bool:
        before, self.target = self.target, min(max(self.target, limits.minimum), limits.maximum)
        if self.target == before:
            return False
        self.reason = f"goes to {self.target}: the job was scaled to {limits}"
        return True

    def _give_up(self, curve: Curve, here: Point, at: Situation) -> bool:
        """Whether there are too many."""
        if here.workers <= at.limits.minimum or here.efficiency >= self._least * (1 - SLACK):
            return False
        fewer = [p.workers for p in curve if at.limits.minimum <= p.workers < here.workers and self._pays(p)]
        best = max(fewer, default=at.limits.minimum)
        if at.horizon * (here.workers - best) <= at.pause * here.workers:
            self.reason = f"stays at {self.target}: the job is over too soon for a change to pay"
            return True
        self._reject(here.workers, at.now)
        self.target = best
        self.reason = f"goes back to {best}: {self._each_does(here, 'does')}"
        return True

    def _try_more(self, curve: Curve, here: Point, at: Situation) -> None:
        if here.workers != self.target or at.incomplete:
            return  # what it has asked for is on its way
        stays = f"stays at {self.target}"
        if here.workers == at.limits.maximum:
            self.reason = f"{stays}: --num_workers allows no more"
            return
        allowed = [p for p in curve if here.workers < p.workers <= self._most(curve, at)]
        promising = [p for p in allowed if self._is_promising(p, here, at)]
        more = curve.at(here.workers + 1)
        if not promising:
            tried = more is not None and not allowed
            says = "does not pay, and is not yet tried again" if tried else "would not pay"
            why = self._each_does(more, "would do") if more is not None and not self._pays(more) else ""
            self.reason = f"{stays}: {why or f'a further worker {says}'}"
            return
        best = promising[-1]
        if at.horizon * (best.speedup / here.speedup - 1) <= at.pause:
            self.reason = f"{stays}: in the time that is left {best.workers} would gain less than the change costs"
            return
        self.target = best.workers
        if best.workers in at.observed and not self._pays(best):
            self.reason = f"tries {best.workers} again: {self._each_does(best, 'did')}"
        else:
            self.reason = f"tries {best.workers}: {self._each_does(best, 'should do', wanted=True)}"

    def _is_promising(self, point: Point, here: Point, at: Situation) -> bool:
        if point.workers in at.observed:
            return self._pays(point) or self._is_due_again(point, here)
        if point.workers == here.workers + 1:  # with a probability of some 25 % at least
            return (point.speedup + point.high) / 2 >= self._least * point.workers
        return point.workers <= 2 * here.workers and self._is_certain(point)

    def _is_due_again(self, point: Point, here: Point) -> bool:
        """Rejected once, and its back-off is over: the machine may have been busy then.

        Not after a second time: a number that is always a little short of the limit would come and go.
        """
        if point.workers != here.workers + 1 or point.workers not in self._rejected:
            return False
        _, backoff = self._rejected[point.workers]
        return backoff.bound() == FIRST_BACKOFF

    def _most(self, curve: Curve, at: Situation) -> int:
        """The largest number that may be tried now."""
        most = at.limits.maximum
        for workers, (until, backoff) in self._rejected.items():
            point = curve.at(workers)
            certain = point is not None and self._is_certain(point)
            if at.now < until - (backoff.bound() * (1 - EARLY) if certain else 0.0):
                most = min(most, workers - 1)
        return most

    def _pays(self, point: Point) -> bool:
        return point.efficiency >= self._least

    def _is_certain(self, point: Point) -> bool:
        return point.low >= self._least * point.workers

    def _reject(self, workers: int, now: float) -> None:
        _, backoff = self._rejected.get(workers, (0.0, Backoff(first=FIRST_BACKOFF, longest=LONGEST_BACKOFF)))
        self._rejected[workers] = now + backoff.delay(), backoff

    def _each_does(self, point: Point, does: str, *, wanted: bool = False) -> str:
        text = f"of {point.workers} workers each {does} {point.efficiency:.2f} of what one does alone"
        return text + (
            f", at least {self._least:g} is wanted" if wanted else f", less than --min_efficiency {self._least:g}"
        )
