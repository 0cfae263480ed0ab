"""Steps in the journal: in bunches, so that the journal of a long job stays small."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elasticdl.job.journal import STEPS, Entry, join_steps
from elasticdl.master.shell.observer import Observer
from elasticdl.master.state.values import Pace, StepReport

# At most one entry in so many seconds, and in so much of the job's age: so the journal of a long job stays small.
LEAST_SECONDS = 1.0
SHARE_OF_AGE = 0.001
# After these the journal is complete as to steps: what they end is to be told before what follows.
_FLUSHED_BY = frozenset({"world_broken", "world_formed", "phase", "master_restarted", "steps_over"})
_DIGITS = 6


class StepLog(Observer):
    """``append`` writes an entry; ``clock``: seconds since the epoch; ``started``: when the job was, by that clock;
    ``counted``: the last step that was made before this master; ``share``: of the job's age, between two entries.

    The first step of a world is told at once: it is what ends a change of workers. As what a survivor tells of it includes
    the pause before it, it counts for no more than the ordinary step before.
    """

    def __init__(
        self,
        append: Callable[[str, Mapping[str, Any]], None],
        clock: Callable[[], float],
        started: float,
        counted: int = 0,
        share: float = SHARE_OF_AGE,
    ) -> None:
        self._append = append
        self._clock = clock
        self._started = started
        self._counted = counted
        self._share = share
        self._bunch: Entry | None = None
        self._told_at = 0.0
        self._world = 0
        self._ordinary = 0.0  # seconds of a step, as the last bunch has them

    def recorded(self, event: str, fields: Mapping[str, Any]) -> None:
        if event in _FLUSHED_BY:
            self.flush()

    def trained(self, steps: Sequence[StepReport], pace: Pace) -> None:
        for step in steps:
            first = step.world_version != self._world
            if first:
                self.flush()
                self._world = step.world_version
            one = self._entry(step, min(step.seconds, self._ordinary) if first else step.seconds, pace)
            self._bunch = join_steps(self._bunch, one) if self._bunch else one
            if first:
                self.flush()
        now = self._clock()
        if self._bunch and now - self._told_at >= max(LEAST_SECONDS, self._share * (now - self._started)):
            self.flush()

    def flush(self) -> None:
        """Write what has not been written."""
        bunch, self._bunch = self._bunch, None
        if bunch is None:
            return
        self._told_at = self._clock()
        self._ordinary = bunch["seconds"] / bunch["steps"] or self._ordinary
        self._append(STEPS, {name: _short(value) for name, value in bunch.items()})

    def _entry(self, step: StepReport, seconds: float, pace: Pace) -> Entry:
        again, self._counted = step.step <= self._counted, max(self._counted, step.step)
        return {
            "step": step.step,
            "world": step.world_version,
            "steps": 1,
            "samples": step.samples,
            "loss": step.loss if step.samples and math.isfinite(step.loss) else None,
            "learning_rate": step.learning_rate if step.samples else None,
            "seconds": seconds,
            "again": int(again),
            "waited": pace.waited,
            "slowest": max(pace.waited - pace.least_waited, 0.0),
        }


def _short(value: Any) -> Any:
    """A number needs no more digits than a person reads: there are many entries."""
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) and math.isfinite(value) else value
