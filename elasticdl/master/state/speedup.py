"""How fast a job trains with how many workers, compared with one: what was measured, and what is believed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from elasticdl.job.spec import MOST_WORKERS

Count = Annotated[int, Field(ge=1, le=2**53)]
# Some jobs are faster with N workers than N times, as each one's part of the data fits into a cache. None is by more than this.
MOST_EFFICIENCY = 1.25
Amount = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]  # it may not be known, which is 0


@dataclass(frozen=True, slots=True)
class Observation:
    """Ordinary steps with one number of workers."""

    workers: Annotated[int, Field(ge=1, le=MOST_WORKERS)]
    samples: Count  # of a step
    seconds: Annotated[float, Field(ge=1e-9, le=1e9, allow_inf_nan=False)]  # of a step, the mean without the extremes
    steps: Count  # that were measured
    spread: Amount  # robust standard deviation of the logarithm of one step's seconds
    busy: Amount = 0.0  # seconds of a step in which the members computed, the mean over them
    age: Amount = 0.0  # seconds since the last of these steps
    noise: Amount = 0.0  # gradient noise scale in samples


@dataclass(frozen=True, slots=True)
class Point:
    """Of a curve: with so many workers the job trains ``speedup`` times as fast as with one.

    ``low`` to ``high`` holds it with a probability of 80 %. ``gain``: by how much it is more than with one worker less.
    """

    workers: int
    speedup: float
    low: float
    high: float
    gain: float
    gain_low: float
    gain_high: float

    @property
    def efficiency(self) -> float:
        """The part of one worker's work alone that each of these does."""
        return self.speedup / self.workers


@dataclass(frozen=True, slots=True)
class Curve:
    """By rising number of workers, from 1; of large numbers not all are there. Empty if nothing is known."""

    points: tuple[Point, ...] = ()
    noise: float = 0.0  # gradient noise scale in samples, if statistical efficiency is in the speedup; else 0
    _by_workers: dict[int, Point] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_workers", {point.workers: point for point in self.points})

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)

    def at(self, workers: int) -> Point | None:
        return self._by_workers.get(workers)

    def published(self) -> list[dict[str, Any]]:
        """For the journal and for other programs."""
        numbers = ("speedup", "low", "high", "gain")
        return [{"workers": each.workers, **{name: round(getattr(each, name), 3) for name in numbers}} for each in self]

    def differs(self, other: Curve, share: float) -> bool:
        """Whether the two know other numbers of workers, or one of them has another speedup by more than this share."""
        if self._by_workers.keys() != other._by_workers.keys():
            return True
        return any(abs(p.speedup - q.speedup) > share * q.speedup for p, q in zip(self, other, strict=True))

    @property
    def can_be(self) -> bool:
        """Else what was measured of some numbers of workers has other causes, as where the first epoch reads its data from afar."""
        return all(point.efficiency <= MOST_EFFICIENCY for point in self)

    def advice(self, present: int, *, compared: bool = True) -> str:
        """What so many workers bring, and one more; empty if that is not known. ``compared``: other numbers were measured, too."""
        here, more = self.at(present), self.at(present + 1)
        if here is None:
            return ""
        said = []
        if present > 1:
            interval = _interval(here.low, here.high)
            said.append(f"{present} workers do {_short(here.speedup)} times the work of one {interval}")
        if more is not None:
            said.append(f"{_article(present + 1)} {ordinal(present + 1)} {_brings(more)}")
        worth = ", counting that samples of larger batches are worth less" if self.noise else ""
        estimate = "" if compared else ", by estimate: no other number of workers was measured"
        return f"{'; '.join(said)}{worth}{estimate}" if said else ""


def _brings(more: Point) -> str:
    if round(more.gain, 1) > 0:
        return f"would add {_short(more.gain)} {_interval(more.gain_low, more.gain_high)}"
    return "would make the job slower" if round(more.gain_high, 1) < 0 else "would add nothing that can be measured"


def _interval(low: float, high: float) -> str:
    return f"(80 % interval {_short(low)} to {_short(high)})"


def _article(number: int) -> str:
    return "an" if number in (11, 18) or str(number).startswith("8") else "a"


def ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _short(number: float) -> str:
    return f"{round(number, 1) + 0.0:.1f}"  # -0.0 becomes 0.0
