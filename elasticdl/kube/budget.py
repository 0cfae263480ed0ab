"""A bound on the requests of a job that change its pods: creations, deletions, patches, together.

Reading and watching are not bounded: they cost the server little, and are tried again after delays of their own. Nor are
saves of the job's state: they are few, and nothing goes on without them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

# A second in the long run. At once: so many, and a few for each worker, as all of them may come and go together.
RATE = 10.0
BURST, BURST_PER_WORKER = 20, 2


class WriteBudget:
    """Whoever is to send such a request waits here, in any thread, until it may."""

    def __init__(
        self,
        workers: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``workers``: how many there may be at present."""
        self._workers = workers
        self._most = 0  # workers so far
        self._reserved = -math.inf  # up to when turns are taken; a turn is as long as one request at that rate
        self._clock = clock
        self._sleep = sleep
        self._reserving = threading.Lock()

    def wait(self) -> None:
        """Take the next turn and sleep until it comes. Turns of the past may be taken later, up to a burst of them."""
        with self._reserving:
            if (workers := self._workers()) > self._most:  # at the start, or the job was scaled: a whole burst is free
                self._most, self._reserved = workers, -math.inf
            turn = self._clock() * RATE
            self._reserved = max(self._reserved, turn - BURST - BURST_PER_WORKER * self._most) + 1
            seconds = (self._reserved - turn) / RATE
        if seconds > 0:
            self._sleep(seconds)
