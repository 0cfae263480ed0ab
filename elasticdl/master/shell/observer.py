"""Observers: they are told what happens to a job, and can't change it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elasticdl.job.facts import Facts
from elasticdl.job.journal import plain
from elasticdl.master.state.values import Pace, StepReport

MOST_IN_A_ROW = 10
_log = logging.getLogger(__name__)


class Observer:
    """Overrides what it wants to hear. Methods are called on the master's event loop, and neither wait nor raise."""

    def recorded(self, event: str, fields: Mapping[str, Any]) -> None:
        """Every entry of the journal that this master makes; `elasticdl.job.event_catalogue` names them."""

    def trained(self, steps: Sequence[StepReport], pace: Pace) -> None:
        """Steps that were not reported before. ``pace``: what the members' last steps took."""

    def close(self) -> None:
        """Nothing more happens."""


class LiveFacts(Facts, Observer):
    """What the journal has told, kept up to date while the master runs.

    ``clock``: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__()
        self._clock = clock

    def recorded(self, event: str, fields: Mapping[str, Any]) -> None:
        self.take(plain({"time": self._clock(), **fields, "event": event}))


class Observers(Observer):
    """Several as one. A call in which an observer raises is dropped, and so is one that has raised `MOST_IN_A_ROW` times in a row."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._raised = dict.fromkeys(observers, 0)  # how often, since a call that did not

    def add(self, observer: Observer) -> None:
        """It is told after the others."""
        self._raised[observer] = 0

    def recorded(self, event: str, fields: Mapping[str, Any]) -> None:
        self._tell(lambda observer: observer.recorded(event, fields))

    def trained(self, steps: Sequence[StepReport], pace: Pace) -> None:
        self._tell(lambda observer: observer.trained(steps, pace))

    def close(self) -> None:
        self._tell(lambda observer: observer.close())

    def _tell(self, news: Callable[[Observer], None]) -> None:
        for observer in tuple(self._raised):
            try:
                news(observer)
                self._raised[observer] = 0
            except Exception:  # noqa: BLE001 - a mistake there must not end the job
                self._raised[observer] += 1
                _log.exception("%s has raised", type(observer).__name__)
                if self._raised[observer] == MOST_IN_A_ROW:
                    _log.error("%s is dropped, since it has raised %d times", type(observer).__name__, MOST_IN_A_ROW)
                    del self._raised[observer]
