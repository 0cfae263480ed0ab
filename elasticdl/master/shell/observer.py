"""Observers: they are told what happens to a job, and can't change it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elasticdl.master.state.learnt import Learnt
from elasticdl.master.state.values import Pace, StepReport

_log = logging.getLogger(__name__)


class Observer:
    """Overrides what it wants to hear. Methods are called on the master's event loop, and neither wait nor raise."""

    def recorded(self, event: str, fields: Mapping[str, Any]) -> None:
        """Every entry of the journal that this master makes; `elasticdl.job.event_catalogue` names them."""

    def trained(self, steps: Sequence[StepReport], pace: Pace) -> None:
        """Steps that were not reported before. ``pace``: what the members' last steps took."""

    def recalled(self, learnt: Learnt) -> None:
        """The job goes on from a checkpoint, in which an earlier job left what it had learnt of its scaling."""

    def close(self) -> None:
        """Nothing more happens."""


class Observers(Observer):
    """Several as one. An observer that raises is dropped, and the job goes on without it."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = list(observers)

    def recorded(self, event: str, fields: Mapping[str, Any]) -> None:
        self._tell(lambda observer: observer.recorded(event, fields))

    def trained(self, steps: Sequence[StepReport], pace: Pace) -> None:
        self._tell(lambda observer: observer.trained(steps, pace))

    def recalled(self, learnt: Learnt) -> None:
        self._tell(lambda observer: observer.recalled(learnt))

    def close(self) -> None:
        self._tell(lambda observer: observer.close())

    def _tell(self, news: Callable[[Observer], None]) -> None:
        for observer in tuple(self._observers):
            try:
                news(observer)
            except Exception:  # noqa: BLE001 - a mistake there must not end the job
                _log.exception("%s is dropped, since it raised", type(observer).__name__)
                self._observers.remove(observer)
