"""How many requests come when. Pure: the same curve and the same seed give the same arrivals."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

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


def arrivals(curve: Curve, per_replica: float, rng: random.Random) -> Iterator[float]:
    """When requests come: a Poisson process whose rate follows the curve."""
    most = max(curve.replicas) * per_replica
    time = 0.0
    while (time := time + rng.expovariate(most)) < curve.end:
        if rng.random() * most < curve.rate(time, per_replica):
            yield time
