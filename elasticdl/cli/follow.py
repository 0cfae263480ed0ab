"""Following a job to its end, on a screen: what happens in it, its statuses, what its workers print, and how it ended.

Of what workers print whole lines are shown, of the ranks that were asked for, wherever they are read from.
"""

from __future__ import annotations

import itertools
import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from elasticdl.cli.job_handle import AbsentError, Following, Heard, JobHandle
from elasticdl.cli.screens import (
    Once,
    Outlet,
    Screen,
    Stream,
    is_over,
    kept_text,
    open_screen,
    own_outlets,
    reasons_of,
    summary_lines,
    tell,
)
from elasticdl.cli.signals import SignalLog, caught
from elasticdl.common.errors import JobFailedError, UnreachableError
from elasticdl.common.reason import without_ranks
from elasticdl.job.facts import Facts
from elasticdl.job.jobdir import JobDir
from elasticdl.job.journal import Entry, Seldom, WorldMark, news, parse_entry, split_at_mark
from elasticdl.job.spec import TRAIN, JobSpec
from elasticdl.proto import elasticdl_pb2 as pb

# A line may be longer than this, or never end; then it is shown in parts.
LONGEST_LINE = 1 << 16
PRINTS_POLL = 0.1
# Of what was shown, for who asks whether it was.
REMEMBERED = 1 << 16
CHUNK = 1 << 18
# What one worker prints on one stream: returns what follows of it, as far as it is there by now.
Source = Callable[[], Iterator[bytes]]
_UP = b"\x1b[A"
_MOVES = re.compile(rb"(\n|\r|\x1b\[1?A|\x1b\[[02]?K)")


def as_drawn(data: bytes) -> tuple[bytes, bytes]:
    """Whole lines as a terminal shows them in the end, and the rest, which is still written over. Of nested progress bars the rest
    has several lines, and moves the cursor back to the first."""
    rows, row, over = [b""], 0, False
    for part in _MOVES.split(data):
        if part == b"\n":
            row, over = row + 1, True
            rows += [b""] * (row == len(rows))
        elif part == b"\r":
            over = True
        elif part.startswith(b"\x1b[") and part.endswith(b"A"):
            row = max(0, row - 1)
        elif part.startswith(b"\x1b[") and part.endswith(b"K"):
            rows[row] = b""
        elif part:
            rows[row], over = part if over else rows[row] + part, False
    while len(rows) > row + 1 and not rows[-1].strip():
        rows.pop()
    rest = b"\n".join(rows[row:]) + _UP * (len(rows) - row - 1) + b"\r" * (over and bool(rows[row]))
    return b"".join(line + b"\n" for line in rows[:row]), rest


def _still(rest: bytes) -> bytes:
    """The text of such a rest."""
    return rest.replace(_UP, b"").removesuffix(b"\r")


class PrintedLines:
    """What one worker prints on one stream. ``prefix``: stands before each line."""

    def __init__(self, screen: Screen, stream: Stream, prefix: str = "") -> None:
        self._screen = screen
        self._stream = stream
        self._prefix = prefix
        # Elsewhere it is handed on as it was printed.
        self._is_drawn = bool(prefix) or screen.draws(stream)
        self._rest = b""
        self._shown = b""  # the last of it

    def feed(self, data: bytes) -> None:
        data = self._rest + data
        end = data.rfind(b"\n") + 1
        whole, rest = as_drawn(data) if self._is_drawn else (data[:end], data[end:])
        is_long = len(rest) > LONGEST_LINE
        self._rest = b"" if is_long else rest
        self._screen.unfinished(_still(self._rest), self._stream, self._prefix)
        if whole or is_long:
            self._show(whole + rest * is_long)

    def end(self) -> None:
        """There is no more of it."""
        rest, self._rest = self._rest, b""
        if rest:
            self._screen.unfinished(b"", self._stream, self._prefix)
            self._show((_still(rest) if self._is_drawn else rest) + b"\n")

    def has_shown(self, text: str) -> bool:
        return text in without_ranks(self._shown.decode(errors="replace"))

    def _show(self, lines: bytes) -> None:
        self._shown = (self._shown + lines)[-REMEMBERED:]
        if self._prefix:
            each = lines.removesuffix(b"\n").split(b"\n")
            lines = b"".join(self._prefix.encode() + line + b"\n" for line in each)
        self._screen.printed(lines, self._stream)


class Printers:
    """Where the workers of a job print. Used in one thread, but for `hear`."""

    trouble = ""  # why what they print is not to be had at the moment, if that is so

    def hear(self, entry: Entry) -> None:
        """Each entry of the journal."""

    def sources(self, worker: int) -> Mapping[Stream, Source]:
        """What it prints, by stream."""
        raise NotImplementedError

    def collect(self, workers: Collection[int] | None, *, to_end: bool) -> Iterable[int]:
        """What these workers, or all, have printed is to be had from their sources. Returns the workers that were found besides those that
        were asked for. ``to_end``: the job is over, and there is time to wait for what is under way."""
        raise NotImplementedError

    def close(self) -> None:
        """Somebody may still read."""


class _Output:
    """What a worker prints on a stream, shown from mark to mark."""

    def __init__(self, worker: int, source: Source, lines: PrintedLines, *, is_shown: bool) -> None:
        self.worker = worker
        self.lines = lines
        self.is_shown = is_shown
        self.mark: WorldMark | None = None  # at which it stands
        self._source = source
        self._rest = b""  # read, and not looked at

    def advance(self) -> None:
        """Up to the next mark, or the present end."""
        if self.mark is not None:
            return
        for chunk in itertools.chain((b"",), self._source()):
            before, self.mark, self._rest = split_at_mark(self._rest + chunk)
            if self.is_shown and before:
                self.lines.feed(before)
            if self.mark is not None:
                return

    def pass_mark(self, ranks: tuple[int, ...] | None) -> None:
        """From here on it is shown if it is of one of these ranks."""
        if self.mark is None:
            return
        rank, self.mark = self.mark.rank, None
        if _is_among(rank, ranks):
            self.is_shown = True
        elif self.is_shown:
            self.lines.end()
            self.is_shown = False

    def end(self) -> None:
        rest, self._rest = self._rest, b""
        if self.is_shown and rest:  # no mark after all
            self.lines.feed(rest)
        self.lines.end()


class Prints:
    """Shows what workers print, in a thread of its own: whoever reads it may be slow.

    By default that is what rank 0 prints: of each worker what it has printed after a mark with that rank, until its next mark or its end.
    Before the first world worker 0 stands for rank 0. The worker that has the rank in a new world is shown after all that
    the others have printed before.

    Args:
        ranks: To show; None for all workers.
    """

    def __init__(self, ranks: tuple[int, ...] | None, screen: Screen, printers: Printers | None) -> None:
        self._ranks = ranks
        self._screen = screen
        self._printers = None if ranks == () else printers
        self._heard: queue.SimpleQueue[tuple[int, tuple[int, ...]]] = queue.SimpleQueue()
        self._world = 0  # the newest that was heard of
        self._left: set[int] = set()
        self._outputs: dict[int, list[_Output]] = {}
        self._sought = set(ranks or ())  # who has, or had, one of the ranks
        self._told: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elasticdl-prints", daemon=True)
        for worker in self._sought:
            self._take_up(worker, is_shown=True)

    @contextmanager
    def shown(self, wait: Callable[[], bool]) -> Iterator[Self]:
        """It is shown meanwhile, and at the end what is left. ``wait`` is asked again and again whether that may take longer."""
        if self._printers:
            self._thread.start()
        try:
            yield self
        finally:
            self._over.set()
            while self._thread.is_alive() and wait():
                self._thread.join(PRINTS_POLL)
            if self._printers:
                self._printers.close()

    def hear(self, entry: Entry) -> None:
        """Each entry of the journal. Raises anything for one that is damaged, or made up."""
        if self._printers is None:
            return
        self._printers.hear(entry)
        if entry["event"] == "worker_left":
            self._heard.put((0, (int(entry["worker"]),)))
        elif entry["event"] == "world_formed":
            self._heard.put((int(entry["world"]), tuple(map(int, entry["members"]))))

    def has_shown(self, text: str) -> bool:
        """Whether this, with which the job has ended, stands on the screen, as a worker has printed it lately."""
        return any(each.lines.has_shown(text) for each in self._every())

    def look(self, *, to_end: bool = False) -> None:
        """Show what has come."""
        with suppress(queue.Empty):
            while True:
                self._take(*self._heard.get_nowait())
        if self._printers is None:
            return
        found = self._printers.collect(None if self._ranks is None else self._sought, to_end=to_end)
        if (trouble := self._printers.trouble) and trouble not in self._told:
            self._told.add(trouble)
            self._screen.line(f"what workers print can't be shown at the moment: {trouble}")
        for worker in found:
            self._take_up(worker, is_shown=self._ranks is None)
        while standing := self._advance():
            self._advance()  # all that was printed before these marks is shown now
            worlds = {
                each: each.mark.world
                for each in self._every()
                if each.mark and (to_end or self._may_pass(each, each.mark))
            }
            if not worlds:
                break
            for output in standing:
                if worlds.get(output) == min(worlds.values()):
                    output.pass_mark(self._ranks)

    # -- details --

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._over.wait(PRINTS_POLL)
            self.look(to_end=is_last)
        for output in self._every():
            output.end()

    def _take(self, world: int, workers: tuple[int, ...]) -> None:
        """``world``: which was formed of these workers; 0: they have left."""
        if not world:
            self._left.update(workers)
            return
        if not self._world:
            self._sought.clear()  # nobody stands for a rank any more
        self._world = max(self._world, world)
        for worker in (workers[rank] for rank in self._ranks or () if rank < len(workers)):
            self._sought.add(worker)
            self._take_up(worker, is_shown=False)

    def _take_up(self, worker: int, *, is_shown: bool) -> None:
        """``is_shown``: also what it prints before its first world."""
        if self._printers and worker not in self._outputs:
            prefix = prefix_among(self._ranks, worker)
            self._outputs[worker] = [
                _Output(worker, source, PrintedLines(self._screen, stream, prefix), is_shown=is_shown)
                for stream, source in self._printers.sources(worker).items()
            ]

    def _every(self) -> list[_Output]:
        return [output for outputs in self._outputs.values() for output in outputs]

    def _advance(self) -> list[_Output]:
        """Show all as far as it goes; returns those that stand at a mark."""
        for output in self._every():
            output.advance()
            if output.worker in self._left and output.mark is None:
                output.end()
        return [output for output in self._every() if output.mark]

    def _may_pass(self, output: _Output, mark: WorldMark) -> bool:
        """Who comes to a rank waits for the journal, which tells who has left before: their last lines are ended then."""
        return mark.world <= self._world or output.is_shown or not _is_among(mark.rank, self._ranks)


def _is_among(rank: int, ranks: tuple[int, ...] | None) -> bool:
    return ranks is None or rank in ranks


def prefix_among(ranks: Collection[int] | None, worker: int) -> str:
    """Of this worker's lines, where those of these ranks are shown, or of all."""
    return "" if ranks is not None and len(ranks) == 1 else f"[worker {worker}] "


class Tail:
    """What comes to a file, which need not be there yet. It is not kept in memory: there may be much of it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0  # which another file may be given once this one is gone
        self._position = 0  # up to which it has been read
        self._rest = b""

    def chunks(self) -> Iterator[bytes]:
        """What has come since the last look."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            about = os.fstat(file.fileno())
            if about.st_ino != self._inode or about.st_size < self._position:  # it was emptied or replaced
                self._inode, self._position, self._rest = about.st_ino, 0, b""
            file.seek(self._position)
            while data := file.read(min(CHUNK, about.st_size - self._position)):
                self._position += len(data)
                yield data

    def lines(self) -> Iterator[str]:
        """Of that the whole lines, without their ends."""
        for chunk in self.chunks():
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)

    def rest(self) -> str:
        """The unfinished last line."""
        return self._rest.decode(errors="replace")


# The files of a worker, by the streams that they are shown on.
Files = Mapping[Stream, Callable[[int], Path]]


class FilePrinters(Printers):
    def __init__(self, job: JobDir, files: Files) -> None:
        self._job = job
        self._files = files

    def sources(self, worker: int) -> Mapping[Stream, Source]:
        return {stream: Tail(path_of(worker)).chunks for stream, path_of in self._files.items()}

    def collect(self, workers: Collection[int] | None, *, to_end: bool) -> Iterable[int]:
        if workers is not None:
            return ()
        names = (re.fullmatch(r"worker-(\d+)\.log", path.name) for path in self._job.logs.glob("worker-*.log"))
        return sorted(int(name[1]) for name in names if name)


def apart(spec: JobSpec, out: Outlet, err: Outlet) -> bool:
    """Whether what workers print on stdout has a file of its own.

    Where both outlets are one, both streams are one file, too: so all lines keep their order. Of a module's worker the log is its own.
    """
    return not spec.command or not out.ends_at(err)


def local_prints(job: JobDir, spec: JobSpec, screen: Screen, out: Outlet, err: Outlet) -> Prints:
    """What ``--log_ranks`` asks for; where it goes depends on where these outlets lead."""
    is_apart = apart(spec, out, err)
    files = {Stream.OUT: job.worker_out if is_apart else job.worker_log}
    if is_apart and spec.command:
        files[Stream.ERR] = job.worker_log
    return Prints(spec.shown_ranks(), screen, FilePrinters(job, files))


# The course of a job.


Watch = Callable[[Heard | None], object]
UNREACHED_SECONDS = 10.0  # a master that has just been started takes some of them to listen


@dataclass(frozen=True, slots=True)
class Follower:
    """Who follows a job, and what they do about it: by default nothing, as somebody who looks at a job that others have started.

    Attributes:
        prints: Shows what the workers print.
        watch: Makes what looks after the master. That is called with each thing that has come and, whenever nothing has come for a
            moment, with None.
        farewell: What is said when a signal ends the following, as the job goes on. None: a signal does not end the following.
        at_end: Called when nothing more comes, while it is still shown what the workers print.
        lost: Called if the job is lost.
    """

    prints: Callable[[Screen], Prints] = lambda screen: Prints((), screen, None)
    watch: Callable[[Screen, Following], Watch] = lambda screen, following: lambda heard: None
    farewell: str | None = ""
    at_end: Callable[[], object] = lambda: None
    lost: Callable[[], None] = lambda: None


def follow(job: JobHandle, spec: JobSpec, follower: Follower = Follower(), signals: SignalLog | None = None) -> int:
    """Until the job is over; returns the exit code. ``signals``: what the caller notes, in the main thread.

    Raises:
        JobFailedError: it failed, was stopped or is lost.
        Interrupted: a signal has ended the following, or the job.
    """
    noted, last = signals or SignalLog(), pb.JobStatus()
    with (
        caught(noted.add) if signals is None else nullcontext(),
        open_screen(spec.log_loss_steps, own_outlets()) as screen,
        follower.prints(screen).shown(wait=lambda: not noted.take()) as prints,
        job.following(statuses=True) as following,
    ):
        silence, watch = Silence(job, screen), follower.watch(screen, following)
        once, seldom = Once(), Seldom()
        for heard in following:
            if isinstance(heard, pb.JobStatus):
                last = heard
                screen.show(heard)
            elif heard:
                show_entry(heard, screen, once, seldom, prints.hear)
            silence.hear(heard, following.failure, time.monotonic())
            watch(heard)
            if follower.farewell is not None and noted.first is not None:
                break
        follower.at_end()
    if follower.farewell is not None and noted.first is not None:
        if follower.farewell:
            tell(follower.farewell)
        noted.raise_first()
    status = job.status()
    if status.phase == "lost" and is_over(last):
        status = last  # its master told the end and could not write it down, as on a full disk
    if status.phase == "lost":
        follower.lost()
    # The user's traceback, if that was the cause, and a worker has not just printed it.
    if status.phase == "failed" and status.traceback and not prints.has_shown(status.traceback.strip()):
        tell(status.traceback.rstrip())
    facts = Facts().read(job.journal()).conclude()
    kept = kept_text(status, facts, on_cluster=bool(job.namespace))
    if status.phase in ("succeeded", "stopped"):
        is_there = spec.task == TRAIN or status.phase == "succeeded"  # of a pass that was stopped only parts are
        tell("\n".join(summary_lines(status, facts, spec.output if is_there else "", kept)))
    if status.phase == "stopped":
        noted.raise_first()
        raise JobFailedError(f"job {job.name} was stopped{f' ({status.reason})' if status.reason else ''}")
    if status.phase != "succeeded":
        if kept:
            tell(kept)
        where = job.where_logs()
        raise JobFailedError(f"job {job.name} {status.phase}: {status.reason}{where and f'; all logs: {where}'}")
    return 0


class Silence:
    """Tells why nothing is heard of a job's master, each reason once, and that it is heard again."""

    def __init__(self, job: JobHandle, screen: Screen) -> None:
        self._job = job
        self._screen = screen
        self._told: set[str] = set()
        self._unreached = math.inf  # since when it runs and does not answer
        self._is_unreached = False  # and that was told

    def hear(self, heard: Heard | None, failure: Exception | None, now: float) -> None:
        """``failure``: why no status is heard at the moment."""
        if isinstance(heard, pb.JobStatus):
            if self._is_unreached:
                self._screen.line("its master is reached again")
            self._told, self._unreached, self._is_unreached = set(), math.inf, False
        elif heard is None and isinstance(failure, AbsentError):
            self._unreached = math.inf
            self._tell(str(failure))
        elif heard is None and failure is not None:
            self._unreached = min(self._unreached, now)
            if now - self._unreached >= UNREACHED_SECONDS:
                self._tell(f"its master can't be reached: {failure}; it is tried again")

    def _tell(self, why: str) -> None:
        if why in self._told:
            return
        self._told.add(why)
        over = ""
        with suppress(UnreachableError):  # that the cluster does not answer may be the very thing to tell
            over = self._job.over()
        if not over:  # else how it ended is told at the end
            self._is_unreached = self._is_unreached or self._unreached < math.inf
            self._screen.line(why)


def show_entry(line: str, screen: Screen, once: Once, seldom: Seldom, hear: Callable[[Entry], object]) -> None:
    """``hear``: is told the entry.

    Who follows a job of this machine keeps it alive: an entry that is damaged, or made up, must not end the training.
    """
    entry = parse_entry(line)
    if entry is None:
        return
    with suppress(Exception):
        text = news(entry)
        if text is not None and not seldom.leaves_out(entry):
            screen.line(once(text, *reasons_of(entry)))
    with suppress(Exception):
        hear(entry)
