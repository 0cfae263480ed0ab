"""Waiting for what can only be looked at."""

from __future__ import annotations

import time
from collections.abc import Iterator

# Between two looks: a small part of the time waited so far, within bounds in seconds.
SLEEP_PART = 1 / 16
SHORTEST_SLEEP = 50e-6
LONGEST_SLEEP = 1e-3


def naps() -> Iterator[float]:
    """The seconds waited so far, again and again, with a sleep in between."""
    began = time.monotonic()
    while True:
        waited = time.monotonic() - began
        yield waited
        time.sleep(min(max(waited * SLEEP_PART, SHORTEST_SLEEP), LONGEST_SLEEP))
