"""Who listens to a job: what is computed of its journal, its summary, the steps in the journal, and the curves for TensorBoard."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elasticdl.common.crc32c import masked_crc32c
from elasticdl.job.facts import Facts, PauseRecord, TimeUse, WorldSpan
from elasticdl.job.jobdir import write_aside
from elasticdl.job.journal import KINDS, STEPS, Steps, plain
from elasticdl.job.messages import Pace, StepReport
from elasticdl.master.core.events import EndJob
from elasticdl.master.core.worker_record import Training, TrainingSnapshot, UnwrittenSteps
from elasticdl.proto import elasticdl_pb2 as pb

# Observers: they are told what happens to a job, and can't change it.


MOST_IN_A_ROW = 10
_log = logging.getLogger(__name__)


class Observer:
    """Overrides what it wants to hear. Methods are called on the master's event loop, and neither wait nor raise."""

    def recorded(self, event: str, fields: Mapping[str, Any]) -> None:
        """Every entry of the journal that this master makes; `elasticdl.job.journal` names them."""

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


# `summary.json`: what became of a job, for people and programs.


def write_summary(folder: str, end: EndJob, training: Training, found: Facts, wall_time: float) -> Path:
    """Write the summary into ``folder``, whole or not at all.

    Raises:
        OSError: the folder can't be written.
    """
    path = Path(folder) / "summary.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_aside(path, json.dumps(plain(summarize(end, training, found, wall_time)), indent=1, allow_nan=False) + "\n")
    return path


def summarize(end: EndJob, training: Training, found: Facts, wall_time: float) -> dict[str, Any]:
    """``time``: where the seconds of the job (``wall``) and of all its workers went. ``remarks``: what was left out, as of
    lists that are too long, and what can't be known."""
    spent = found.spent
    return {
        "status": str(end.phase),
        **achieved(end, training),
        "worlds": [_world(world) for world in found.worlds],
        "pauses": [_pause(pause) for pause in found.pauses],
        "wall_time": round(wall_time, 3),
        "scaling": _scaling(found),
        "time": {"wall": _rounded(spent.wall), "workers": _rounded(spent.workers)},
        "remarks": list(found.remarks()),
    }


def _world(world: WorldSpan) -> dict[str, Any]:
    about = {"version": world.version, "members": list(world.members), "reason": world.reason, "step": world.step}
    return {**about, "formed_at": world.since, **({"ended_at": world.until} if world.until is not None else {})}


def _pause(pause: PauseRecord) -> dict[str, Any]:
    about = {"time": pause.time, "world": pause.world, "kind": pause.kind, "workers": pause.workers}
    return {**about, **pause.parts, "total": pause.total, "steps_torn": pause.steps_torn}


def _scaling(found: Facts) -> dict[str, Any]:
    """What is known of other numbers of workers, and what the job decided by it; empty if nothing."""
    names = ("workers", "speedup", "measured")
    curve = [dict(zip(names, row, strict=True)) for row in found.speedup]
    advice = {"advice": found.advice, "curve": curve} if found.advice else {}
    return {**advice, **({"workers": found.target, "decision": found.decision} if found.decision else {})}


def _rounded(seconds: Mapping[TimeUse, float]) -> dict[str, float]:
    return {str(doing): round(value, 3) for doing, value in seconds.items()}


def achieved(end: EndJob, training: Training) -> dict[str, Any]:
    numbers = {"steps": training.step, "epochs": training.epochs_done, "samples": training.samples}
    told = {"metrics": training.metrics, "collective": training.collective}
    compared = {"step": training.compared_step, "workers": training.compared_workers}
    return {"reason": end.reason, **numbers, **told, "compared": compared if training.compared_workers else None}


# Writes steps into the journal, many in one entry, so that the journal of a long job stays small.


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


# A job's scalars for TensorBoard, in a file of TFRecords, each of which is an ``Event`` of TensorFlow's protocol.
#
# The package tensorboardX would import PyTorch, and NumPy, for the few fields that it has here.


class TensorBoard(Observer):
    """Writes what workers report. A folder that can't be written is reported once and stops nothing."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._writer: EventFile | None = None
        self._failed = False
        self._step = 0
        self._world_size = 0

    def recorded(self, event: str, fields: Mapping[str, Any]) -> None:
        if "members" in fields:
            self._world_size = len(fields["members"])
        if (kind := KINDS.get(event)) and kind.scalars:
            self._write(kind.scalars(fields), fields.get("step", self._step))

    def trained(self, steps: Sequence[StepReport], pace: Pace) -> None:
        for report in steps:
            self._step = report.step
            scalars: dict[str, float] = {"world_size": self._world_size}
            if report.samples:
                scalars |= {"loss": report.loss, "learning_rate": report.learning_rate}
            if report.samples and report.seconds > 0:
                scalars["samples_per_second"] = report.samples / report.seconds
            if pace.busy:
                scalars |= {"seconds/busy": pace.busy, "seconds/waited": pace.waited}
            self._write(scalars, report.step)

    def close(self) -> None:
        if self._writer:
            self._writer.close()

    def _write(self, scalars: Mapping[str, Any], step: int) -> None:
        if self._failed:
            return
        try:
            self._writer = self._writer or EventFile(self._folder)
            self._writer.add(scalars, step)
        except OSError as error:
            self._failed = True
            _log.error("can't write TensorBoard scalars to %s: %s; going on without", self._folder, error)


class EventFile:
    """Made anew in the folder, beside those of earlier masters.

    Raises:
        OSError: it can't be written.
    """

    def __init__(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = Path(folder, name).open("xb")  # noqa: SIM115 - as long as the job lasts
        self._write(pb.TensorBoardEvent(file_version="brain.Event:2"))

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Raises OSError if they can't be written."""
        event = pb.TensorBoardEvent(step=step)
        for name, value in scalars.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._write(event)

    def close(self) -> None:
        self._file.close()

    def _write(self, event: pb.TensorBoardEvent) -> None:
        event.wall_time = time.time()
        record = event.SerializeToString()
        length = struct.pack("<Q", len(record))
        for part in (length, record):
            self._file.write(part + struct.pack("<I", masked_crc32c(part)))
        self._file.flush()  # whoever looks sees each step
