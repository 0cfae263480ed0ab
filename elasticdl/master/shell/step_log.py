"""Writes steps into the journal, many in one entry, so that the journal of a long job stays small."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elasticdl.job.event_catalogue import KINDS
from elasticdl.job.journal import STEPS, Steps
from elasticdl.master.shell.observer import Observer
from elasticdl.master.state.snapshot import TrainingSnapshot, UnwrittenSteps
from elasticdl.master.state.values import Pace, StepReport

# Between two entries: at least so many seconds, and so much of the job's age.
LEAST_SECONDS = 1.0
SHARE_OF_AGE = 0.001
Tell = Callable[[str, Mapping[str, Any]], None]


class StepLog(Observer):
    """The first step of a world is written at once, as it ends a change of workers. It counts as an ordinary step, since its
    measured time includes the pause before it.

    Args:
        append: Writes an entry.
        tell: Tells the other observers of the steps, each second.
        clock: Seconds since the epoch.
        started: When the job was started, by that clock.
        past: Steps that an earlier master has not written.
        training: What an earlier master knew of the training.
    """

    def __init__(
        self,
        append: Tell,
        tell: Tell,
        clock: Callable[[], float],
        started: float,
        past: UnwrittenSteps | None = None,
        training: TrainingSnapshot | None = None,
    ) -> None:
        past, training = past or UnwrittenSteps(), training or TrainingSnapshot()
        self._append = append
        self._tell = tell
        self._clock = clock
        self._started = started
        self._counted = training.counted
        self._world = training.newest[0]
        self._last: Steps | None = None  # not told yet
        self._joined = Steps.of(past.joined) if past.joined else None  # told, and not written yet
        self._ordinary = past.ordinary  # seconds of a step, as the last that was told has them
        self._told_at = self._written_at = 0.0

    @property
    def unwritten(self) -> UnwrittenSteps:
        joined = self._joined + self._last if self._joined and self._last else self._joined or self._last
        return UnwrittenSteps(joined.fields() if joined else None, self._ordinary)

    def recorded(self, event: str, fields: Mapping[str, Any]) -> None:
        if event in KINDS and KINDS[event].ends_steps:
            self.flush()

    def trained(self, steps: Sequence[StepReport], pace: Pace) -> None:
        for step in steps:
            first = step.world_version != self._world
            if first:
                self.flush()
                self._world = step.world_version
            one = self._as_steps(step, first=first, pace=pace)
            self._last = self._last + one if self._last else one
            if first:
                self.flush()
        now = self._clock()
        if now - self._told_at >= LEAST_SECONDS:
            self._tell_last()
        if now - self._written_at >= max(LEAST_SECONDS, SHARE_OF_AGE * (now - self._started)):
            self.flush()

    def flush(self) -> None:
        """Write what has not been written."""
        self._tell_last()
        joined, self._joined = self._joined, None
        if joined is not None:
            self._written_at = self._clock()
            self._append(STEPS, joined.fields())

    def _tell_last(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            self._told_at = self._clock()
            self._ordinary = last.seconds / last.steps or self._ordinary
            self._joined = self._joined + last if self._joined else last
            self._tell(STEPS, last.fields())

    def _as_steps(self, step: StepReport, *, first: bool, pace: Pace) -> Steps:
        again, self._counted = step.step <= self._counted, max(self._counted, step.step)
        return Steps(
            step=step.step,
            world=step.world_version,
            steps=1,
            samples=step.samples,
            loss=step.loss if step.samples and math.isfinite(step.loss) else None,
            learning_rate=step.learning_rate if step.samples else None,
            seconds=min(step.seconds, self._ordinary) if first else step.seconds,
            again=int(again),
            waited=pace.waited,
            slowest=max(pace.waited - pace.least_waited, 0.0),
        )
