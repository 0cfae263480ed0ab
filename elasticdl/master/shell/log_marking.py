"""Writes the marks of a job's logs (see `elasticdl.job.log_marks`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elasticdl.job.jobdir import JobDir
from elasticdl.job.log_marks import LogMark
from elasticdl.master.shell.observer import Observer

# Looks at the logs, of which there may be thousands, take at most one part in so many of the time.
PARTS_OF_TIME = 20


class LogMarker(Observer):
    """The mark of a new world is written before its members are told of the world, so before any of them prints in it."""

    def __init__(self, job: JobDir, clock: Callable[[], float] = time.time) -> None:
        self._job = job
        self._clock = clock
        self._file = job.marks.open("a")
        # By worker that is there: the size of each of its logs, -1 if never looked at.
        self._sizes: dict[int, dict[Path, int]] = {}
        self._next_look = 0.0

    def recorded(self, event: str, fields: Mapping[str, Any]) -> None:
        began = self._clock()
        members = fields["members"] if event == "world_formed" else ()
        if event == "worker_launched":
            worker = fields["worker"]
            self._sizes[worker] = dict.fromkeys((self._job.worker_log(worker), self._job.worker_out(worker)), -1)
        whole = bool(members) or began >= self._next_look
        sizes: dict[str, int] = {}
        who = fields.get("worker")
        for worker in self._sizes if whole else [who] if who in self._sizes else []:
            sizes |= self._grown(worker)
        left = fields["worker"] if event == "worker_left" else -1
        is_known = self._sizes.pop(left, None) is not None
        if sizes or whole or is_known:
            self._file.write(LogMark(began, sizes, members, whole, left).to_line() + "\n")
            self._file.flush()
        if whole:
            now = self._clock()
            self._next_look = now + PARTS_OF_TIME * (now - began)

    def close(self) -> None:
        self._file.close()

    def _grown(self, worker_id: int) -> dict[str, int]:
        known = self._sizes[worker_id]
        now = {path: _size(path) for path in known}
        grown = {path.name: size for path, size in now.items() if known[path] != size}
        known |= now
        return grown


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
