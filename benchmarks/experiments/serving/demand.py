"""How many requests come when, and how many replicas that takes. Pure: the same curve and the same seed give the same.

The autoscaler's rule is that of Kubernetes' HorizontalPodAutoscaler: up at once; down only to the most that was recommended of
late, so that a short lull does not cost a replica. A rate within the tolerance of what the present replicas are for
changes nothing.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

# Of the series behind the published figure: GPUs that serving had, by seconds; the last is the end.
PUBLISHED = "0:2,63:3,162:7,230:5,330:3,400:2,460"
# A load that needs three replicas keeps them 90 % as busy as they may be.
HEADROOM = 0.3


@dataclass(frozen=True, slots=True)
class Curve:
    """From ``starts[i]`` on the load needs ``replicas[i]``, until ``end``; between two of them it changes in ``ramp``."""

    starts: tuple[float, ...]
    replicas: tuple[int, ...]
    end: float
    ramp: float

    def rate(self, time: float, per_replica: float) -> float:
        """Requests a second, where a replica takes so many."""
        index = max(bisect_right(self.starts, time) - 1, 0)
        now = self.replicas[index] - HEADROOM
        before = self.replicas[max(index - 1, 0)] - HEADROOM
        part = min((time - self.starts[index]) / self.ramp, 1.0) if self.ramp else 1.0
        return (before + (now - before) * part) * per_replica


def parse_curve(text: str, scale: float, ramp: float) -> Curve:
    """``0:2,63:3,460``: times in seconds, which are divided by ``scale``, as is ``ramp``.

    Raises:
        ValueError: it is not of that form.
    """
    *levels, end = text.split(",")
    try:
        pairs = [(float(start), int(replicas)) for start, replicas in (level.split(":") for level in levels)]
        times = [*(start for start, _ in pairs), float(end)]
    except ValueError:
        raise ValueError(f"{text}: expected SECONDS:REPLICAS,...,SECONDS, as in {PUBLISHED}") from None
    if not pairs or times[0] != 0 or not all(map(math.isfinite, times)) or times != sorted(set(times)):
        raise ValueError(f"{text}: the times must begin with 0 and grow, and the last has no replicas")
    if min(replicas for _, replicas in pairs) < 1:
        raise ValueError(f"{text}: at least one replica is needed at any time")
    return Curve(
        tuple(start / scale for start, _ in pairs), tuple(each for _, each in pairs), float(end) / scale, ramp / scale
    )


@dataclass(frozen=True, slots=True)
class Rule:
    """``per_replica``: requests a second; ``patience``: how many recommendations a step down waits for."""

    per_replica: float
    least: int
    most: int
    patience: int
    tolerance: float = 0.1


@dataclass(frozen=True, slots=True)
class Autoscaler:
    rule: Rule
    replicas: int
    recommended: tuple[int, ...] = ()  # of late, the newest last

    def look(self, rate: float) -> Autoscaler:
        """The autoscaler after a look at the rate."""
        rule = self.rule
        wanted = self._wanted(rate)
        recommended = (*self.recommended, wanted)[-rule.patience :]
        lasting = len(recommended) == rule.patience and max(recommended) < self.replicas
        settled = wanted if wanted > self.replicas else max(recommended) if lasting else self.replicas
        return replace(self, replicas=settled, recommended=recommended)

    def _wanted(self, rate: float) -> int:
        rule = self.rule
        if abs(rate / (rule.per_replica * self.replicas) - 1) <= rule.tolerance:
            return self.replicas
        return min(max(math.ceil(rate / rule.per_replica), rule.least), rule.most)


@dataclass(frozen=True, slots=True)
class Scaling:
    """The autoscaler wants another number of replicas."""

    time: float
    rate: float
    before: int
    replicas: int


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """``every``: seconds between two looks of the autoscaler, at the rate within ``window``."""

    curve: Curve
    every: float
    window: float
    seed: int


def requests_of(plan: LoadPlan, per_replica: float) -> list[float]:
    """When they are due: a Poisson process whose rate follows the curve."""
    rng, time, found = random.Random(plan.seed), 0.0, []
    most = max(plan.curve.replicas) * per_replica
    while (time := time + rng.expovariate(most)) < plan.curve.end:
        if rng.random() * most < plan.curve.rate(time, per_replica):
            found.append(time)
    return found


def scalings(plan: LoadPlan, autoscaler: Autoscaler) -> Iterator[Scaling]:
    """What the autoscaler decides, who looks at what was due: it follows from the seed, however busy the machine is."""
    due = requests_of(plan, autoscaler.rule.per_replica)
    for number in range(1, int(plan.curve.end / plan.every) + 1):
        now, before = number * plan.every, autoscaler.replicas
        span = min(plan.window, now)
        rate = (bisect_right(due, now) - bisect_right(due, now - span)) / span
        autoscaler = autoscaler.look(rate)
        if autoscaler.replicas != before:
            yield Scaling(now, rate, before, autoscaler.replicas)
