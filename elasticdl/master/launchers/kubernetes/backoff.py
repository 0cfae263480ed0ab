"""How long to wait before something is tried again."""

from __future__ import annotations

import random


class Backoff:
    """Delays that double up to a bound, each drawn from the upper half of its range, so that many do not come at once."""

    def __init__(self, rng: random.Random, first: float = 0.5, longest: float = 30.0) -> None:
        self._rng = rng
        self._first = first
        self._longest = longest
        self._next = first

    def delay(self, at_least: float = 0.0) -> float:
        bound, self._next = self._next, min(self._longest, self._next * 2)
        return max(at_least, bound * (0.5 + self._rng.random() / 2))

    def reset(self) -> None:
        self._next = self._first
