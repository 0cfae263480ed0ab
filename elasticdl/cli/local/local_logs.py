"""The logs of a job of this machine as one: its master's and its workers' lines, in the order of time.

Few of the lines that workers print begin with a time. Of the others it is known between which marks they were written
(`elasticdl.job.log_marks`), and so where they belong among the lines of the master, which makes those marks.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from elasticdl.cli.wording import LATEST, Dating, by_writer, merged, moment, prefix
from elasticdl.job.jobdir import JobDir
from elasticdl.job.log_marks import LogMark

SUFFIXES = (".out", ".log")  # of two lines that are from between the same two marks, the one on stdout first


class LocalLogs:
    """``worker``: only this one's lines, as it wrote them."""

    def __init__(self, job: JobDir, worker: int | None) -> None:
        self._job = job
        self._only = None if worker is None else job.worker_log(worker).stem
        self._marks = Marks(job)
        self._tails: dict[str, tuple[Tail, Dating]] = {}

    def exist(self) -> bool:
        return bool(self._names())

    def look(self) -> Iterator[str]:
        """Whole lines that have come since the last look."""
        found = [(name, self._of(name)[0].placed_lines()) for name in self._names()]
        self._marks.read()
        yield from merged(self._dated(name, lines) for name, lines in found)

    def rest(self) -> Iterator[str]:
        """Last lines that are not finished."""
        return (self._prefix(name) + rest for name, (tail, _) in self._tails.items() if (rest := tail.rest()))

    def _names(self) -> list[str]:
        """Of the files that there are."""
        try:
            there = set(os.listdir(self._job.logs))
        except FileNotFoundError:  # somebody has removed the folder, perhaps with the job
            return []
        logs = {name.removesuffix(".log") for name in there if name.endswith(".log")}
        writers = [self._only] if self._only else by_writer(logs)
        return [f"{writer}{suffix}" for writer in writers for suffix in SUFFIXES if f"{writer}{suffix}" in there]

    def _of(self, name: str) -> tuple[Tail, Dating]:
        return self._tails.setdefault(name, (Tail(self._job.logs / name), Dating()))

    def _dated(self, name: str, lines: list[tuple[int, str]]) -> Iterator[tuple[str, str]]:
        dating = self._of(name)[1]
        for place, line in lines:
            yield dating.of(line, *self._marks.around(name, place)), self._prefix(name) + line

    def _prefix(self, name: str) -> str:
        return "" if self._only else prefix(name[:-4])


class Marks:
    """Between what moments the lines of each log were written."""

    def __init__(self, job: JobDir) -> None:
        self._tail = Tail(job.marks)
        self._last = ""  # mark for which all logs were looked at
        self._ends: dict[str, list[int]] = {}  # of what came to a log between two looks at it
        self._between: dict[str, list[tuple[str, str]]] = {}  # when that was

    def read(self) -> None:
        for mark in filter(None, map(LogMark.from_line, self._tail.lines())):
            when = moment(mark.time)
            for name, size in mark.sizes.items():
                between = self._between.setdefault(name, [])
                between.append((max(self._last, between[-1][1] if between else ""), when))
                self._ends.setdefault(name, []).append(size)
            if mark.whole:
                self._last = when

    def around(self, name: str, place: int) -> tuple[str, str]:
        """After and before what moment the line was written that begins there."""
        between = self._between.get(name)
        if not between:  # no marks are made in it
            return "", LATEST
        number = bisect.bisect_right(self._ends[name], place)
        return between[number] if number < len(between) else (max(self._last, between[-1][1]), LATEST)


class Tail:
    """What comes to a file, which need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0  # which another file may be given once this one is gone
        self._position = 0  # up to which it has been read
        self._rest = b""
        self.begun = 0  # how often it was read from its beginning: somebody may have emptied or replaced it

    def lines(self, most: int = -1) -> list[str]:
        """Whole lines that have come since the last look, without their ends; of ``most`` bytes and what ends their last."""
        return [line for _, line in self.placed_lines(most)]

    def placed_lines(self, most: int = -1) -> list[tuple[int, str]]:
        """The same, with where each begins."""
        try:
            with self._path.open("rb") as file:
                about = os.fstat(file.fileno())
                if about.st_ino != self._inode or about.st_size < self._position:
                    self._inode, self._position, self._rest = about.st_ino, 0, b""
                    self.begun += 1
                file.seek(self._position)
                fresh = file.read(most) + file.readline()
        except FileNotFoundError:
            return []
        place = self._position - len(self._rest)
        self._position += len(fresh)
        *whole, self._rest = (self._rest + fresh).split(b"\n")
        places = accumulate((len(line) + 1 for line in whole), initial=place)
        return [(start, line.decode(errors="replace")) for start, line in zip(places, whole, strict=False)]

    def rest(self) -> str:
        """The unfinished last line."""
        return self._rest.decode(errors="replace")
