"""A job's scalars for TensorBoard, in a file of TFRecords, each of which is an ``Event`` of TensorFlow's protocol.

The package tensorboardX would import PyTorch, and NumPy, for the few fields that it has here.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elasticdl.common.crc32c import masked_crc32c
from elasticdl.job.event_catalogue import KINDS
from elasticdl.master.shell.observer import Observer
from elasticdl.master.state.values import Pace, StepReport
from elasticdl.proto import elasticdl_pb2 as pb

_log = logging.getLogger(__name__)


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
