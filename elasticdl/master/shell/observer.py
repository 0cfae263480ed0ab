"""Those who are told what happens to a job, and have no say in it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elasticdl.master.state.claim import Claim
from elasticdl.master.state.learnt import Learnt
from elasticdl.master.state.values import Pace, StepReport

_log = logging.getLogger(__name__)


class Observer:
    """Hears of what it does not ignore, on the master's event loop; no method waits or raises."""

    def recorded(self, event: str, fields: Mapping[str, Any]) -> None:
        """Every entry of the journal that this master makes; `elasticdl.job.event_catalogue` names them."""

    def trained(self, steps: Sequence[StepReport], pace: Pace) -> None:
        """Steps that were not reported before, and what the members' last steps went into."""

    def recalled(self, learnt: Learnt) -> None:
        """An earlier job has learnt this of how it scales, and this one goes on from its checkpoint."""

    def claimed(self, claim: Claim) -> None:
        """What the other jobs of the queue are to know of this one."""

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

    def claimed(self, claim: Claim) -> None:
        self._tell(lambda observer: observer.claimed(claim))

    def close(self) -> None:
        self._tell(lambda observer: observer.close())

    def _tell(self, news: Callable[[Observer], None]) -> None:
        for observer in tuple(self._observers):
            try:
                news(observer)
            except Exception:  # noqa: BLE001 - a mistake there must not end the job
                _log.exception("%s is dropped, since it raised", type(observer).__name__)
                self._observers.remove(observer)
