"""A job's scalars for TensorBoard, in a file of TFRecords, each of which is an ``Event`` of TensorFlow's protocol.

An event has few fields, which are written here byte by byte. The package tensorboardX would import PyTorch, and NumPy, for them.
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

# Tags of fields in protocol buffers: the field's number and how its value is written.
_WALL_TIME, _STEP, _FILE_VERSION, _SUMMARY = b"\x09", b"\x10", b"\x1a", b"\x2a"  # of Event
_VALUE = b"\x0a"  # of Summary
_TAG, _SIMPLE_VALUE = b"\x0a", b"\x15"  # of Summary.Value
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
        self._write(_FILE_VERSION + _bytes(b"brain.Event:2"))

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Raises OSError if they can't be written."""
        values = (_TAG + _bytes(name.encode()) + _SIMPLE_VALUE + _float(value) for name, value in scalars.items())
        summary = b"".join(_VALUE + _bytes(value) for value in values)
        self._write(_STEP + _varint(step) + _SUMMARY + _bytes(summary))

    def close(self) -> None:
        self._file.close()

    def _write(self, fields: bytes) -> None:
        event = _WALL_TIME + struct.pack("<d", time.time()) + fields
        length = struct.pack("<Q", len(event))
        for part in (length, event):
            self._file.write(part + struct.pack("<I", masked_crc32c(part)))
        self._file.flush()  # whoever looks sees each step


def _bytes(content: bytes) -> bytes:
    return _varint(len(content)) + content


def _float(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:  # a loss may be larger than four bytes can tell
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))


def _varint(number: int) -> bytes:
    """Of a number that is not negative, seven bits a byte, the lowest first."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
