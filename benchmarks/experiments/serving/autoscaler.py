"""How many replicas a rate of requests takes: the rule of Kubernetes' HorizontalPodAutoscaler. Pure.

Up at once; down only to the most that was recommended of late, so that a short lull does not cost a replica. A rate within
the tolerance of what the present replicas are for changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


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

    def look(self, rate: float) -> tuple[Autoscaler, str]:
        """The autoscaler after a look at the rate, and why its replicas are others now; empty: they are not."""
        rule = self.rule
        wanted = self._wanted(rate)
        recommended = (*self.recommended, wanted)[-rule.patience :]
        lasting = len(recommended) == rule.patience and max(recommended) < self.replicas
        settled = wanted if wanted > self.replicas else max(recommended) if lasting else self.replicas
        after = replace(self, replicas=settled, recommended=recommended)
        if settled == self.replicas:
            return after, ""
        return after, f"{rate:.1f} requests/s, {rule.per_replica:g} a replica"

    def _wanted(self, rate: float) -> int:
        rule = self.rule
        if abs(rate / (rule.per_replica * self.replicas) - 1) <= rule.tolerance:
            return self.replicas
        return min(max(math.ceil(rate / rule.per_replica), rule.least), rule.most)


def rate_before(arrivals: Sequence[float], now: float, window: float) -> float:
    """Requests a second in the window that ends now, of those that have come, in order."""
    span = min(window, now)
    return sum(1 for time in reversed(arrivals) if now - span < time <= now) / span if span > 0 else 0.0
