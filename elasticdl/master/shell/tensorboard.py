"""TensorBoard scalars of a job."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from elasticdl.job.event_catalogue import KINDS
from elasticdl.master.shell.event_file import EventFile
from elasticdl.master.shell.observer import Observer
from elasticdl.master.state.values import Pace, StepReport

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
