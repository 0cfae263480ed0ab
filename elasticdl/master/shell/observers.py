"""Who listens to a job: what is computed of its journal, its summary, and the curves for TensorBoard."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from elasticdl.common.crc32c import masked_crc32c
from elasticdl.job.facts import Facts, PauseRecord, TimeUse, WorldSpan
from elasticdl.job.jobdir import kept_states, write_aside
from elasticdl.job.journal import KINDS, plain
from elasticdl.job.messages import Pace, StepReport
from elasticdl.proto import elasticdl_pb2 as pb

# Observers: they are told what happens to a job, and can't change it.

_log = logging.getLogger(__name__)


class Observer:
    """Overrides what it wants to hear. Methods are called on the master's event loop, and neither wait nor raise."""

    has_raised = False

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


class Observers(list[Observer], Observer):
    """Several as one, told in this order. A call in which an observer raises is lost to it, which is said once."""

    def recorded(self, event: str, fields: Mapping[str, Any]) -> None:
        self._tell(lambda observer: observer.recorded(event, fields))

    def trained(self, steps: Sequence[StepReport], pace: Pace) -> None:
        self._tell(lambda observer: observer.trained(steps, pace))

    def close(self) -> None:
        self._tell(lambda observer: observer.close())

    def _tell(self, news: Callable[[Observer], None]) -> None:
        for observer in self:
            try:
                news(observer)
            except Exception:  # noqa: BLE001 - a mistake there must not end the job
                if not observer.has_raised:
                    _log.exception("%s has raised", type(observer).__name__)
                observer.has_raised = True


# `summary.json`: what became of a job, for people and programs.


def write_summary(folder: str, found: Facts, wall_time: float) -> None:
    """Whole or not at all."""
    summary, path = plain(summarize(found, wall_time)), Path(folder, "summary.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_aside(path, json.dumps(summary, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        _log.error("can't write summary.json to %s: %s", folder, error)


def remove_parts(folder: str, *, is_done: bool) -> None:
    """Of a prediction or an evaluation from which nobody goes on, if they are in a folder of this machine."""
    if folder and "://" not in folder and (is_done or not kept_states(Path(folder))):
        shutil.rmtree(folder, ignore_errors=True)


def summarize(found: Facts, wall_time: float) -> dict[str, Any]:
    """``time``: where the seconds of the job (``wall``) and of all its workers went. ``remarks``: what was left out, as of
    lists that are too long, and what can't be known."""
    spent, (step, workers) = found.spent, found.compared
    return {
        "status": found.phase,
        "reason": found.reason,
        "steps": found.step,
        "epochs": found.epochs,
        "samples": found.samples,
        "metrics": found.metrics,
        "collective": found.collective,
        "compared": {"step": step, "workers": workers} if workers else None,
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
    curve = [row.model_dump() for row in found.speedup]
    advice = {"advice": found.advice, "curve": curve} if found.advice else {}
    return {**advice, **({"workers": found.target, "decision": found.decision} if found.decision else {})}


def _rounded(seconds: Mapping[TimeUse, float]) -> dict[str, float]:
    return {str(doing): round(value, 3) for doing, value in seconds.items()}


class TensorBoard(Observer):
    """Writes what workers report as scalars, into a file of TFRecords, each an ``Event`` of TensorFlow's protocol. The file is made anew
    in the folder, beside those of earlier masters. A folder that can't be written is reported once and stops nothing.

    The package tensorboardX would import PyTorch, and NumPy, for the few fields that it has here.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._file: BinaryIO | None = None
        self._failed = False
        self._step = 0
        self._world_size = 0

    def recorded(self, event: str, fields: Mapping[str, Any]) -> None:
        if "members" in fields:
            self._world_size = len(fields["members"])
        if (kind := KINDS.get(event)) and kind.scalars:
            self._add(kind.scalars(fields), fields.get("step", self._step))

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
            self._add(scalars, report.step)

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _add(self, scalars: Mapping[str, Any], step: int) -> None:
        if self._failed:
            return
        values = [pb.TensorBoardValue(tag=name, simple_value=value) for name, value in scalars.items()]
        event = pb.TensorBoardEvent(step=step, summary=pb.TensorBoardSummary(value=values))
        try:
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
                self._file = (self._folder / name).open("xb")
                self._write(self._file, pb.TensorBoardEvent(file_version="brain.Event:2"))
            self._write(self._file, event)
        except OSError as error:
            self._failed = True
            _log.error("can't write TensorBoard scalars to %s: %s; going on without", self._folder, error)

    @staticmethod
    def _write(file: BinaryIO, event: pb.TensorBoardEvent) -> None:
        event.wall_time = time.time()
        record = event.SerializeToString()
        length = struct.pack("<Q", len(record))
        for part in (length, record):
            file.write(part + struct.pack("<I", masked_crc32c(part)))
        file.flush()  # whoever looks sees each step
