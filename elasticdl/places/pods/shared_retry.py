"""One back-off for the requests of many, as those of all workers that wait for one quota."""

from __future__ import annotations

import math

from elasticdl.common.backoff import Backoff

# How soon the others look whether one that asks again has succeeded.
POLL_SECONDS = 0.1


class SharedRetry:
    """While requests are refused, one asks again after each delay; when it succeeds, the others follow.

    Reads no clock: whoever asks says what time it is.
    """

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._until = -math.inf
        self._asking = False  # one asks again
        self.reason = ""  # for people; empty if the last was not refused

    def wait(self, now: float) -> float:
        """Seconds until it is to be called again; 0: the caller asks now, and says what came of it."""
        if not self._backoff.failures:
            return 0.0
        if self._asking or now < self._until:
            return max(self._until - now, POLL_SECONDS)
        self._asking = True
        return 0.0

    def refused(self, reason: str, now: float, at_least: float = 0.0) -> None:
        """``at_least``: seconds that the server has asked for. Those that were under way with the first count as one."""
        if self._asking or not self._backoff.failures:
            self._until = now + self._backoff.delay(at_least)
        self.reason, self._asking = reason, False

    def succeeded(self) -> None:
        self._backoff.reset()
        self.reason, self._asking = "", False
