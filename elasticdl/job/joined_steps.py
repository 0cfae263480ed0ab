"""Steps of one world, one after the other, and what two of such make together: the one place where they are joined."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

_DIGITS = 6  # of a number: a person reads no more, and there are many entries


@dataclass(frozen=True, slots=True)
class Steps:
    """An entry ``steps`` of a journal. ``step`` is the last of them; loss and learning rate are None where they are not known."""

    step: int
    world: int
    steps: int
    samples: int
    loss: float | None
    learning_rate: float | None
    seconds: float
    again: int  # of them had been made before
    waited: float  # seconds a step that members waited for others, mean
    slowest: float  # of these, those for the slowest

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Steps | None:
        """None if the entry is not as a master writes it: it may be damaged, or of another version."""
        known = [entry.get(name) for name in _NAMES]
        sure = all(isinstance(value, int | float) or (value is None and name in _UNKNOWN) for name, value in zip(_NAMES, known, strict=True))  # fmt: skip
        return cls(*known) if sure else None  # type: ignore[arg-type]

    def __add__(self, later: Self) -> Self:
        """With those that follow, in whose place they stand. A loss that is not known counts for nothing."""
        steps, samples = self.steps + later.steps, self.samples + later.samples
        loss = later.loss if self.loss is None else self.loss
        if self.loss is not None and later.loss is not None:
            loss = (self.loss * self.samples + later.loss * later.samples) / samples if samples else later.loss
        return replace(
            later,
            steps=steps,
            samples=samples,
            loss=loss,
            seconds=self.seconds + later.seconds,
            again=self.again + later.again,
            waited=(self.waited * self.steps + later.waited * later.steps) / steps if steps else later.waited,
            slowest=(self.slowest * self.steps + later.slowest * later.steps) / steps if steps else later.slowest,
        )

    def fields(self) -> dict[str, Any]:
        """For an entry, and for a snapshot."""
        return {name: _short(getattr(self, name)) for name in _NAMES}


_NAMES = tuple(each.name for each in fields(Steps))
_UNKNOWN = ("loss", "learning_rate")


def _short(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) and math.isfinite(value) else value
