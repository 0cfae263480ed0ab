"""From the steps that are reported to one observation for each number of workers."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

from elasticdl.job.shared_values import StepReport
from elasticdl.master.state.learnt import MOST_OBSERVATIONS
from elasticdl.master.state.speedup import Observation

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
        self.dropped = False  # what was recalled was dropped: it is outdated, or of another batch

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
        if self._seen > SKIPPED and step.seconds > 0 and step.samples > 0:
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
            self._drop()
        if self._compared or self.workers not in self._known:
            return
        self._compared = True
        _, before = self._known[self.workers]
        if abs(math.log(present.seconds / before.seconds)) > CONTRADICTION:
            self._drop()

    def _drop(self) -> None:
        self._known.clear()
        self.dropped = True


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
