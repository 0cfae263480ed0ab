"""A bound on the requests of a job that change something in the cluster: creations, deletions, patches, together.

Reading and watching are not bounded: they cost the server little, and are tried again after delays of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from elasticdl.common.backoff import TokenBucket

# A second in the long run. At once: so many, and a few for each worker, as all of them may come and go together.
RATE = 10.0
BURST, BURST_PER_WORKER = 20, 2
SHORTEST_SLEEP = 0.001  # a clock may not show less


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
        self._most = -1  # workers for which the bucket is
        self._bucket = TokenBucket(RATE, BURST)
        self._clock = clock
        self._sleep = sleep
        self._turn = threading.Lock()

    def wait(self) -> None:
        """One after another, so that nobody waits for long: a save comes after the requests that are under way."""
        with self._turn:
            if (workers := self._workers()) > self._most:  # at the start, or the job was scaled
                self._most, self._bucket = workers, TokenBucket(RATE, BURST + BURST_PER_WORKER * workers)
            while seconds := self._bucket.take(self._clock()):
                self._sleep(max(seconds, SHORTEST_SLEEP))
