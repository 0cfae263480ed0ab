"""What the workers of a job on this machine print, as it comes: read from their logs, beside what else is shown of the job.

By default that is what rank 0 prints. Another worker becomes rank 0 with a world; from the mark in its log that was made when this
world was formed its output goes on where that of the last rank 0 ends, or beside the last words of one that leaves. Before the first world it is the worker of that number.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elasticdl.cli.local.local_logs import Tail
from elasticdl.cli.printed import POLL, PrintedLines, Prints, prefix_among, workers_of
from elasticdl.cli.screens import Outlet, Screen, Stream
from elasticdl.job.jobdir import JobDir
from elasticdl.job.log_marks import LogMark
from elasticdl.job.spec import JobSpec

CHUNK = 1 << 18
MARKS_AT_ONCE = 1 << 20
# The files of a worker, by the streams that they are shown on.
Files = dict[Stream, Callable[[int], Path]]


@dataclass(slots=True)
class _Shown:
    """A worker's file, of which the part from ``position`` on is to be shown."""

    path: Path
    lines: PrintedLines
    position: int

    def size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def show_to(self, end: int) -> None:
        if self.position >= end:
            return
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self.position)
            while self.position < end and (data := file.read(min(CHUNK, end - self.position))):
                self.position += len(data)
                self.lines.feed(data)


class LocalPrints(Prints):
    """``files``: which of a worker's files go to which stream. ``with_newlines``: a last
    line that has none is ended, as something else follows it there."""

    def __init__(
        self, job: JobDir, files: Files, ranks: tuple[int, ...] | None, screen: Screen, *, with_newlines: bool = True
    ) -> None:
        super().__init__(ranks)
        self._job = job
        self._files = files
        self._screen = screen
        self._with_newlines = with_newlines
        self._marks = Tail(job.marks)
        self._sizes: dict[str, int] = {}  # of logs, as of the last mark
        self._shown: dict[int, list[_Shown]] = {}
        self._begun = self._formed = False  # something of a worker was shown; there was a world
        self._past: list[_Shown] = []  # of the worker that was shown before those
        for worker in ranks or ():
            self._take_up(worker, {})

    def look(self) -> None:
        """Show what has come."""
        if self._ranks is None:
            self._find_workers()
        # Before marks are read: a mark that is missed is later than all of that.
        sizes = [(each, each.size()) for each in self._every()]
        while marks := self._marks.lines(MARKS_AT_ONCE):
            for mark in filter(None, map(LogMark.from_line, marks)):
                self._pass(mark)
        present = set(map(id, self._every()))
        for each, size in sizes:
            if id(each) in present:
                each.show_to(size)

    def end(self) -> None:
        for each in self._every():
            each.lines.end(with_newline=self._with_newlines)

    # -- details --

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._over.wait(POLL)
            for _ in range(1 + is_last):  # of workers that one look has taken up, what they print is seen by the next
                self.look()
        self.end()

    def _every_lines(self) -> list[PrintedLines]:
        return [each.lines for each in (*self._past, *self._every())]

    def _every(self) -> list[_Shown]:
        return [each for shown in self._shown.values() for each in shown]

    def _pass(self, mark: LogMark) -> None:
        self._sizes.update(mark.sizes)
        if self._ranks is None:
            return
        workers = workers_of(self._ranks, mark.members)
        # Whoever is in no world any more has its rank until it has left: it may still tell of its last step.
        # Before the first world nobody has one.
        others = {mark.left, *mark.members, *(() if self._formed or not mark.members else self._shown)}
        self._formed = self._formed or bool(mark.members)
        for each in self._every():
            each.show_to(self._sizes.get(each.path.name, 0))
            self._begun = self._begun or each.position > 0
        for worker in others.difference(workers) & self._shown.keys():
            self._past = self._shown.pop(worker)
            for each in self._past:
                each.lines.end()
        for worker in workers:
            if worker not in self._shown:
                self._take_up(worker, self._sizes if self._begun else {})

    def _take_up(self, worker: int, sizes: dict[str, int]) -> None:
        """Show what this worker prints, from these sizes of its files on."""
        prefix = prefix_among(self._ranks, worker)
        self._shown[worker] = [
            _Shown(path, PrintedLines(self._screen, stream, prefix), sizes.get(path.name, 0))
            for stream, path in ((stream, path_of(worker)) for stream, path_of in self._files.items())
        ]

    def _find_workers(self) -> None:
        names = (re.fullmatch(r"worker-(\d+)\.log", path.name) for path in self._job.logs.glob("worker-*.log"))
        for worker in sorted(int(name[1]) for name in names if name):
            if worker not in self._shown:
                self._take_up(worker, {})


def apart(spec: JobSpec, out: Outlet, err: Outlet) -> bool:
    """Whether what workers print on stdout has a file of its own.

    Where both outlets are one, both streams are one file, too: so all lines keep their order. Of a module's worker the log is its own.
    """
    return not spec.command or not out.ends_at(err)


def local_prints(job: JobDir, spec: JobSpec, screen: Screen, out: Outlet, err: Outlet) -> LocalPrints:
    """What ``--log_ranks`` asks for; where it goes depends on where these outlets lead."""
    is_apart = apart(spec, out, err)
    files: Files = {Stream.OUT: job.worker_out if is_apart else job.worker_log}
    if is_apart and spec.command:
        files[Stream.ERR] = job.worker_log
    shares_place = out.is_terminal or out.ends_at(err)
    return LocalPrints(job, files, spec.shown_ranks(), screen, with_newlines=shares_place)
