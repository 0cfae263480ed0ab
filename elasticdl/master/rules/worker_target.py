"""How many workers pay: the policy of ``--scale_policy efficiency``.

The job wants the largest number of workers N within its range for which each does at least ``--min_efficiency`` of what one
does alone: speedup(N) / N. It

- starts with the fewest, and tries more: up to twice as many if they pay even where the estimate is wrong by `DOUBT`, else one
  more if it may pay, or if nothing is known of it;
- stays until it has measured, and gives up a number that does not pay. That one, and any above it, is tried again after a
  back-off that doubles each time, or after an eighth of it if by then it surely pays;
- changes only if what is gained within the horizon is more than what a pause costs.

So in a time t there are at most about 2 log2(t / FIRST_BACKOFF) changes over each number of workers, however noisy the speed is.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    measured: bool  # they have made enough steps, and what is known of other numbers does not contradict
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

    def _give_up(self, curve: Curve, at: Situation) -> bool:
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

    def _try_more(self, curve: Curve, at: Situation) -> None:
        if at.present != self.target or at.incomplete:
            return  # what it has asked for is on its way
        if at.present == at.limits.maximum:
            self._stay("--num_workers allows no more")
            return
        most, here, more = self._most(curve, at), curve.at(at.present), curve.at(at.present + 1)
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

    def _is_promising(self, point: Point, at: Situation) -> bool:
        if point.measured:
            return self._pays(point) or self._is_due_again(point, at)
        if point.workers == at.present + 1:
            return self._may_pay(point, self._least)
        return point.workers <= 2 * at.present and self._surely_pays(point)

    def _is_due_again(self, point: Point, at: Situation) -> bool:
        """Rejected once, and its back-off is over: the machine may have been busy then.

        Not after a second time: a number that is always a little short of the limit would come and go.
        """
        if point.workers != at.present + 1 or point.workers not in self._rejected:
            return False
        _, backoff = self._rejected[point.workers]
        return backoff.bound() == FIRST_BACKOFF

    def _most(self, curve: Curve, at: Situation) -> int:
        """The largest number that may be tried now."""
        most = at.limits.maximum
        for workers, (until, backoff) in self._rejected.items():
            point = curve.at(workers)
            pays = point is not None and self._surely_pays(point)
            if at.now < until - (backoff.bound() * (1 - EARLY) if pays else 0.0):
                most = min(most, workers - 1)
        return most

    def _pays(self, point: Point) -> bool:
        return point.efficiency >= self._least

    def _surely_pays(self, point: Point) -> bool:
        return point.efficiency * (1 - DOUBT) >= self._least

    def _may_pay(self, point: Point, least: float) -> bool:
        return point.efficiency * (1 if point.measured else 1 + DOUBT) >= least

    def _reject(self, workers: int, now: float) -> None:
        _, backoff = self._rejected.get(workers, (0.0, Backoff(first=FIRST_BACKOFF, longest=LONGEST_BACKOFF)))
        self._rejected[workers] = now + backoff.delay(), backoff

    def _each_does(self, point: Point, does: str, *, wanted: bool = False) -> str:
        text = f"of {point.workers} workers each {does} {point.efficiency:.2f} of what one does alone"
        return text + (
            f", at least {self._least:g} is wanted" if wanted else f", less than --min_efficiency {self._least:g}"
        )
