"""The logs of a job of this machine as one: its master's and its workers' lines, in the order of time.

Few of the lines that workers print begin with a time. Of the others it is known after which mark they were written
(`elasticdl.job.log_marks`), or that their worker had been started.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from elasticdl.cli.wording import Dating, by_writer, merged, moment, prefix
from elasticdl.job.jobdir import JobDir
from elasticdl.job.journal import parse_entry
from elasticdl.job.log_marks import unmarked

SUFFIXES = (".out", ".log")  # of two lines of the same time the one on stdout first
STARTED = "worker_started"


class LocalLogs:
    """``worker``: only this one's lines, as it wrote them."""

    def __init__(self, job: JobDir, worker: int | None) -> None:
        self._job = job
        self._only = None if worker is None else job.worker_log(worker).stem
        self._journal = Tail(job.journal)
        self._started: dict[str, str] = {}  # when, by the name of the worker's log
        self._files: dict[str, _LogFile] = {}

    def exist(self) -> bool:
        return bool(self._names())

    def look(self) -> Iterator[str]:
        """Whole lines that have come since the last look."""
        for entry in (parse_entry(line) for line in self._journal.lines() if STARTED in line):
            if entry and entry["event"] == STARTED:
                self._started[f"worker-{entry['worker']}"] = moment(entry["time"])
        yield from merged([*self._dated(name)] for name in self._names())

    def rest(self) -> Iterator[str]:
        """Last lines that are not finished."""
        return (self._prefix(name) + rest for name, file in self._files.items() if (rest := file.tail.rest()))

    def _names(self) -> list[str]:
        """Of the files that there are."""
        try:
            there = set(os.listdir(self._job.logs))
        except FileNotFoundError:  # somebody has removed the folder, perhaps with the job
            return []
        logs = {name.removesuffix(".log") for name in there if name.endswith(".log")}
        writers = [self._only] if self._only else by_writer(logs)
        return [f"{writer}{suffix}" for writer in writers for suffix in SUFFIXES if f"{writer}{suffix}" in there]

    def _dated(self, name: str) -> Iterator[tuple[str, str]]:
        file = self._files.setdefault(name, _LogFile(self._job.logs / name))
        for when, line in file.dated_lines(self._started.get(name[:-4], "")):
            yield when, self._prefix(name) + line

    def _prefix(self, name: str) -> str:
        return "" if self._only else prefix(name[:-4])


class _LogFile:
    def __init__(self, path: Path) -> None:
        self.tail = Tail(path)
        self._dating = Dating()
        self._entered = ""  # when its worker entered the newest world

    def dated_lines(self, started: str) -> Iterator[tuple[str, str]]:
        now = moment(time.time())
        for text, mark in map(unmarked, self.tail.lines()):
            if text is not None:
                yield self._dating.of(text, self._entered or started, now), text
            self._entered = mark.when if mark else self._entered


class Tail:
    """What comes to a file, which need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0  # which another file may be given once this one is gone
        self._position = 0  # up to which it has been read
        self._rest = b""

    def lines(self, most: int = -1) -> list[str]:
        """Whole lines that have come since the last look, without their ends; of ``most`` bytes and what ends their last."""
        try:
            with self._path.open("rb") as file:
                about = os.fstat(file.fileno())
                if about.st_ino != self._inode or about.st_size < self._position:  # it was emptied or replaced
                    self._inode, self._position, self._rest = about.st_ino, 0, b""
                file.seek(self._position)
                fresh = file.read(most) + file.readline()
        except FileNotFoundError:
            return []
        self._position += len(fresh)
        *whole, self._rest = (self._rest + fresh).split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def rest(self) -> str:
        """The unfinished last line."""
        return self._rest.decode(errors="replace")
