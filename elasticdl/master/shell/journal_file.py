"""The writer of the journal and of the steps in it, and what it gives to those who follow the journal over the network."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import reduce
from itertools import groupby
from operator import add, attrgetter
from pathlib import Path
from typing import Any

from elasticdl.job.journal import KINDS, STEPS, Fields, Steps, dump_entry, number_of
from elasticdl.job.messages import Pace, StepReport
from elasticdl.master.core.worker_record import TrainingSnapshot, UnwrittenSteps
from elasticdl.master.shell.observers import Observer

CHUNK_BYTES = 1 << 18
NUMBERS = 10**9  # that each master has for its entries: more than it will write
# Between two entries of steps: at least so many seconds, and so much of the job's age.
LEAST_SECONDS = 1.0
SHARE_OF_AGE = 0.001
Tell = Callable[[str, Mapping[str, Any]], None]
_log = logging.getLogger(__name__)


class Journal:
    """Appends entries to a file, each flushed. A file that can't be written is reported once and stops nothing.

    ``recorded`` is called with each entry, except steps. ``generation``: how many masters the job has had, this one included.
    """

    def __init__(
        self,
        path: Path,
        recorded: Tell = lambda event, fields: None,
        generation: int = 1,
    ) -> None:
        self._path = path
        self._recorded = recorded
        self._number = (generation - 1) * NUMBERS  # of the last entry
        self._file = path.open("a")
        self._grown = asyncio.Event()  # set with the next entry, and another then takes its place
        self._failed = False
        self._closed = False

    def append(self, event: str, fields: Mapping[str, Any]) -> None:
        self._number += 1
        line = dump_entry({"number": self._number, "time": time.time(), "event": event, **fields})
        _log.log(KINDS[event].level if event in KINDS else logging.INFO, "%s %s", event, fields)
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            self._tell(error)
        self._wake()
        if event != STEPS:  # the step log tells observers of steps sooner
            self._recorded(event, fields)

    async def entries(self, after: int = 0, *, follow: bool) -> AsyncIterator[str]:
        """The lines so far and, when following, those to come until the journal is closed; ``after``: only of greater numbers."""
        rest, is_last = b"", False
        with self._path.open("rb") as file:
            while not is_last:
                # Asked first: what came meanwhile is read once more.
                grown, is_last = self._grown, self._closed or not follow
                while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in (each.decode(errors="replace") for each in lines):
                        if not after or number_of(line) > after:
                            yield line
                if not is_last:
                    await grown.wait()

    def close(self) -> None:
        """There are no more entries: `entries` ends for all who follow."""
        self._closed = True
        try:
            self._file.close()
        except OSError as error:  # what could not be written before can't be now
            self._tell(error)
        self._wake()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()

    def _tell(self, error: OSError) -> None:
        """Say once that entries are lost."""
        if not self._failed:
            _log.error("can't write the journal %s: %s; going on without it", self._path, error.strerror)
        self._failed = True


class StepLog(Observer):
    """Writes steps into the journal, many in one entry, so that the journal of a long job stays small.

    The first step of a world is written at once, as it ends a change of workers. It counts as an ordinary step, since its
    measured time includes the pause before it.

    Args:
        append: Writes an entry.
        tell: Tells the other observers of the steps, as they come.
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
        self._joined = Steps.of(Fields.of(past.joined)) if past.joined else None  # not written yet
        self._ordinary = past.ordinary  # seconds of a step, as the last that was told has them
        self._written_at = 0.0

    @property
    def unwritten(self) -> UnwrittenSteps:
        return UnwrittenSteps(self._joined.fields() if self._joined else None, self._ordinary)

    def recorded(self, event: str, fields: Mapping[str, Any]) -> None:
        if event in KINDS and KINDS[event].ends_steps:
            self.flush()

    def trained(self, steps: Sequence[StepReport], pace: Pace) -> None:
        for world, of_world in groupby(steps, attrgetter("world_version")):
            told = list(of_world)
            if world != self._world:
                self.flush()
                self._world = world
                self._take(self._as_steps(told.pop(0), first=True, pace=pace))
                self.flush()
            if told:
                self._take(reduce(add, [self._as_steps(step, first=False, pace=pace) for step in told]))
        now = self._clock()
        if now - self._written_at >= max(LEAST_SECONDS, SHARE_OF_AGE * (now - self._started)):
            self.flush()

    def flush(self) -> None:
        """Write what has not been written."""
        joined, self._joined = self._joined, None
        if joined is not None:
            self._written_at = self._clock()
            self._append(STEPS, joined.fields())

    def _take(self, told: Steps) -> None:
        self._ordinary = told.seconds / told.steps or self._ordinary
        self._joined = self._joined + told if self._joined else told
        self._tell(STEPS, told.fields())

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
            slowest=max(pace.waited - pace.least_waited, 0.0),
        )
