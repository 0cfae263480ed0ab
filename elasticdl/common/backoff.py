"""When something is tried again: the one back-off of the project, and a bound on requests a minute.

Neither reads a clock: whoever asks says what time it is, so that both are tried without waiting.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


def delay_after(failures: int, first: float = 0.5, longest: float = 30.0, factor: float = 2.0) -> float:
    """Seconds to wait after so many failures in a row; 0 after none."""
    if failures <= 0:
        return 0.0
    growths = min(failures - 1, 64)  # beyond that a float's range ends before the bound is looked at
    return float(min(longest, first * factor**growths))


class Backoff:
    """Delays that double up to a bound, each drawn from the upper half of its range, so that many do not come at once.

    Without ``rng`` each delay is the bound itself, so a state that is computed again gives the same delays.
    """

    def __init__(
        self, rng: random.Random | None = None, first: float = 0.5, longest: float = 30.0, factor: float = 2.0
    ) -> None:
        self._rng = rng
        self._first = first
        self._longest = longest
        self._factor = factor
        self.failures = 0

    def delay(self, at_least: float = 0.0) -> float:
        """Seconds to wait after one more failure. ``at_least``: what the other side has asked for."""
        self.failures += 1
        bound = self.bound()
        spread = 1.0 if self._rng is None else 0.5 + self._rng.random() / 2
        return max(at_least, bound * spread)

    def bound(self) -> float:
        """The longest delay after so many failures; 0 after none."""
        return delay_after(self.failures, self._first, self._longest, self._factor)

    def reset(self) -> None:
        """It has succeeded."""
        self.failures = 0


@dataclass(slots=True)
class TokenBucket:
    """Lets ``burst`` things happen at once and ``rate`` a second in the long run (token bucket, as of RFC 2697)."""

    rate: float
    burst: float
    _tokens: float = -1.0  # as of `_at`; negative: it has never been asked, and is full
    _at: float = 0.0

    def take(self, now: float) -> float:
        """Seconds until it may happen. 0: now, and a token is taken; else no token is taken, and the caller asks again."""
        if self._tokens < 0:
            self._tokens, self._at = self.burst, now
        self._tokens = min(self.burst, self._tokens + max(0.0, now - self._at) * self.rate)
        self._at = max(self._at, now)
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        return (1.0 - self._tokens) / self.rate
