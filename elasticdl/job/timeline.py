"""Where the time went: every moment of a job has one label, so that the parts add up to the whole.

The label of the present is known from what has happened. A later entry may change labels of the past, as a pause is told when
it is over. Such a change reaches back to the last report of steps but one at most. Whatever lies before is final, and is
only added up, so memory is bounded. What is told without its time (an evaluation, waiting for the slowest member) is taken
out of the time in which the job trained.
"""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass, replace

from elasticdl.job.history import TimeSpent, TimeUse

MOST_SEGMENTS = 512
# Labels that a pause may replace. Waiting for workers, starting and ending stay.
_TRAINING = (TimeUse.PRODUCTIVE, TimeUse.GROW, TimeUse.SHRINK, TimeUse.FAILURE)


@dataclass(frozen=True, slots=True)
class Crew:
    """Workers that have a place, by what they do."""

    training: int = 0
    starting: int = 0
    warm: int = 0
    leaving: int = 0


@dataclass(slots=True)
class _Segment:
    since: float
    until: float
    doing: TimeUse
    crew: Crew

    @property
    def seconds(self) -> float:
        return self.until - self.since


class _Sums:
    """Seconds by label, of segments that do not change any more."""

    def __init__(self) -> None:
        self.wall: dict[TimeUse, float] = defaultdict(float)
        self.workers: dict[TimeUse, float] = defaultdict(float)
        self.owed: dict[TimeUse, float] = defaultdict(float)  # to be taken out of productive time

    def add(self, segment: _Segment) -> None:
        crew, left = segment.crew, segment.seconds
        self.workers[TimeUse.STARTING] += crew.starting * left
        self.workers[TimeUse.WAITING] += crew.warm * left
        self.workers[TimeUse.ENDING] += crew.leaving * left
        if segment.doing is TimeUse.PRODUCTIVE:
            for doing, owed in self.owed.items():
                taken = min(owed, left)
                self.owed[doing] = owed - taken
                left -= taken
                self._add(doing, taken, crew)
        self._add(segment.doing, left, crew)

    def _add(self, doing: TimeUse, seconds: float, crew: Crew) -> None:
        self.wall[doing] += seconds
        self.workers[doing] += crew.training * seconds

    def result(self) -> TimeSpent:
        return TimeSpent({each: self.wall[each] for each in TimeUse}, {each: self.workers[each] for each in TimeUse})


class Timeline:
    """Time never goes back in it: a moment before the present is the present."""

    def __init__(self, began: float, doing: TimeUse) -> None:
        self.now = self._since = began  # what it does, it does since then
        self._sums = _Sums()
        self._segments = [_Segment(began, began, doing, Crew())]

    @property
    def doing(self) -> TimeUse:
        return self._segments[-1].doing

    def advance(self, now: float) -> None:
        self.now = self._segments[-1].until = max(now, self.now)

    def change(self, doing: TimeUse | None = None, crew: Crew | None = None) -> None:
        """From now on the job does something else, or with other workers."""
        last = self._segments[-1]
        doing, crew = doing or last.doing, crew or last.crew
        if doing is not last.doing:
            self._since = self.now
        if (doing, crew) == (last.doing, last.crew):
            return
        if last.seconds == 0:
            last.doing, last.crew = doing, crew
            return
        self._segments.append(_Segment(self.now, self.now, doing, crew))
        self._shorten()

    def skip(self, now: float, doing: TimeUse) -> None:
        """The time until then is not the job's; from then on it does this. All that was before is final."""
        for segment in self._segments:
            self._sums.add(segment)
        self.now = self._since = max(now, self.now)
        self._segments = [_Segment(self.now, self.now, doing, Crew())]

    def relabel(self, doing: TimeUse, since: float, until: float) -> None:
        """Replace the label of the training in this time; what is final stays."""
        until = min(until, self.now)
        split: list[_Segment] = []
        for segment in self._segments:
            if segment.doing not in _TRAINING or segment.until <= since or segment.since >= until:
                split.append(segment)
                continue
            low, high = max(segment.since, since), min(segment.until, until)
            cuts = ((segment.since, low, segment.doing), (low, high, doing), (high, segment.until, segment.doing))
            split += [_Segment(a, b, label, segment.crew) for a, b, label in cuts if b > a]
        present = self._segments[-1]
        if split[-1].doing is not present.doing:
            split.append(_Segment(self.now, self.now, present.doing, present.crew))
        self._segments = split
        self._shorten()

    def take(self, doing: TimeUse, seconds: float) -> None:
        """So many seconds of training, up to now, were spent on this. Those since the job began to end count as its end."""
        ending = self.now - self._since if self.doing is TimeUse.ENDING else 0.0
        self._sums.owed[doing] += max(seconds - ending, 0.0)

    def settle(self, before: float) -> None:
        """Make final what lies before."""
        while len(self._segments) > 1 and self._segments[0].until <= before:
            self._sums.add(self._segments.pop(0))
        first = self._segments[0]
        cut = min(max(before, first.since), first.until)
        self._sums.add(_Segment(first.since, cut, first.doing, first.crew))
        first.since = cut

    def _shorten(self) -> None:
        while len(self._segments) > MOST_SEGMENTS:
            self._sums.add(self._segments.pop(0))

    def settled(self) -> TimeSpent:
        """What is final, and all that is no training: these numbers never fall."""
        sums = deepcopy(self._sums)
        for segment in self._segments:
            if segment.doing not in _TRAINING:
                sums.add(segment)
        return sums.result()

    def spent(self, until: float) -> TimeSpent:
        """Up to ``until``, if that is later than now, as if all stayed as it is."""
        sums = deepcopy(self._sums)
        for segment in self._segments[:-1]:
            sums.add(segment)
        last = self._segments[-1]
        sums.add(replace(last, until=max(last.until, until)))
        return sums.result()
