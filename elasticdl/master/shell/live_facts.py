"""The facts of a job's journal, kept up to date while the master runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from elasticdl.job.facts import Facts
from elasticdl.job.journal import plain
from elasticdl.master.shell.observer import Observer


class LiveFacts(Observer):
    """What the journal has told, entries of earlier masters included. Any thread may ask.

    ``clock``: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._facts = Facts()
        self._clock = clock
        self._taking = threading.Lock()

    def read(self, lines: Iterable[str]) -> None:
        with self._taking:
            self._facts.read(lines)

    def recorded(self, event: str, fields: Mapping[str, Any]) -> None:
        with self._taking:
            self._facts.take(plain({"time": self._clock(), **fields, "event": event}))

    @contextmanager
    def now(self) -> Iterator[tuple[Facts, float]]:
        """The facts, which do not change while this is open, and the present time."""
        with self._taking:
            yield self._facts, self._clock()
