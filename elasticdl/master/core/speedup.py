"""How fast a job trains with how many workers, compared with one: what was measured, and what follows for other numbers.

A number that was measured is believed as measured. For others the time of a step is

    T(N) = a + b * share + c * (N - 1)        a, b, c >= 0

by least squares over the numbers that were measured. ``share`` is the largest part of the global batch that one worker has;
it is constant where the batch follows the workers. What this form misses at the next smaller number that was measured is
corrected. As long as only one number was measured, nothing is known of others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from elasticdl.job.spec import MOST_WORKERS

Amount = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]  # it may not be known, which is 0
# Of least squares; they take a few milliseconds.
ROUNDS = 1000


@dataclass(frozen=True, slots=True)
class Observation:
    """Ordinary steps with one number of workers."""

    workers: Annotated[int, Field(ge=1, le=MOST_WORKERS)]
    samples: Annotated[int, Field(ge=1, le=2**53)]  # of a step
    seconds: Annotated[float, Field(ge=1e-9, le=1e9, allow_inf_nan=False)]  # of a step, the mean without the extremes
    age: Amount = 0.0  # seconds since the last of these steps

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


@dataclass(frozen=True)
class SpeedupCurve:
    """What is known of the speedup; nothing, if there are no observations, or of one number of workers only."""

    observations: tuple[Observation, ...] = ()  # by number of workers
    _measured: dict[int, Observation] = field(init=False, repr=False, compare=False)
    _form: _Form | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_measured", {each.workers: each for each in self.observations})
        object.__setattr__(self, "_form", _Form(self.observations) if len(self._measured) > 1 else None)

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
