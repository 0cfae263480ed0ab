"""What workers print, for whoever follows their job: whole lines, of the ranks that were asked for, wherever they are read from."""

from __future__ import annotations

import itertools
import queue
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol, Self

from elasticdl.cli.screens import Screen, Stream
from elasticdl.job.journal import Entry
from elasticdl.job.log_marks import WorldMark, split_at_mark

# A line may be longer than this, or never end; then it is shown in parts.
LONGEST_LINE = 1 << 16
POLL = 0.1
# Of what was shown, for who asks whether it was.
REMEMBERED = 1 << 16
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

    def end(self, *, with_newline: bool = True) -> None:
        """There is no more of it."""
        rest, self._rest = self._rest, b""
        if rest:
            self._screen.unfinished(b"", self._stream, self._prefix)
            self._show((_still(rest) if self._is_drawn else rest) + b"\n" * with_newline)

    def has_shown(self, text: str) -> bool:
        return text.encode(errors="replace") in self._shown

    def _show(self, lines: bytes) -> None:
        self._shown = (self._shown + lines)[-REMEMBERED:]
        if self._prefix:
            each = lines.removesuffix(b"\n").split(b"\n")
            lines = b"".join(self._prefix.encode() + line + b"\n" for line in each)
        self._screen.printed(lines, self._stream)


class Source(Protocol):
    """What one worker prints on one stream."""

    def chunks(self) -> Iterator[bytes]:
        """What follows of it, as far as it is there by now."""


class Printers(Protocol):
    """Where the workers of a job print. Used in one thread, but for `hear`."""

    def hear(self, entry: Entry) -> None:
        """Each entry of the journal."""

    def known(self) -> Iterable[int]:
        """The workers whose output there is: all of those that were asked for, and others that print into the same log."""

    def sources(self, worker: int) -> Mapping[Stream, Source]: ...

    def collect(self, workers: Collection[int] | None, *, to_end: bool) -> str:
        """What these workers, or all, have printed is to be had from their sources; returns why it is not, if that is so. ``to_end``: the
        job is over, and there is time to wait for what is under way."""

    def close(self) -> None:
        """Somebody may still read."""


class _Heard(NamedTuple):
    """Of the journal: a worker has left, or a world was formed."""

    left: int | None = None
    world: int = 0
    members: tuple[int, ...] = ()


class _Output:
    """What a worker prints on a stream, shown from mark to mark."""

    def __init__(self, worker: int, source: Source, lines: PrintedLines, *, is_shown: bool) -> None:
        self.worker = worker
        self.lines = lines
        self.is_shown = is_shown
        self.world = 0  # in which what comes next was printed; 0 before the first
        self.mark: WorldMark | None = None  # at which it stands
        self._source = source
        self._rest = b""  # read, and not looked at

    def advance(self) -> None:
        """Up to the next mark, or the present end."""
        if self.mark is not None:
            return
        for chunk in itertools.chain((b"",), self._source.chunks()):
            before, self.mark, self._rest = split_at_mark(self._rest + chunk)
            if self.is_shown and before:
                self.lines.feed(before)
            if self.mark is not None:
                return

    @property
    def next_world(self) -> int:
        """That of the mark at which it stands; else the one in which it was printed so far."""
        return self.mark.world if self.mark else self.world

    def pass_mark(self, ranks: tuple[int, ...] | None) -> None:
        """From here on it is shown if it is of one of these ranks."""
        if self.mark is None:
            return
        self.world, rank, self.mark = self.mark.world, self.mark.rank, None
        if _is_among(rank, ranks):
            self.is_shown = True
        else:
            self.hide()

    def hide(self) -> None:
        if self.is_shown:
            self.lines.end()
        self.is_shown = False

    def end(self, *, with_newline: bool) -> None:
        rest, self._rest = self._rest, b""
        if self.is_shown and rest:  # no mark after all
            self.lines.feed(rest)
        self.lines.end(with_newline=with_newline)


class Prints:
    """Shows what workers print, in a thread of its own: whoever reads it may be slow.

    By default that is what rank 0 prints: of each worker what it has printed after a mark with that rank, until its next mark or its end.
    Before the first world worker 0 stands for rank 0. The worker that has the rank in a new world is shown after all that
    the others have printed before.

    Args:
        ranks: To show; None for all workers.
        with_newlines: A last line that has none is ended, as something else follows it there.
    """

    def __init__(
        self, ranks: tuple[int, ...] | None, screen: Screen, printers: Printers | None, *, with_newlines: bool = True
    ) -> None:
        self._ranks = ranks
        self._screen = screen
        self._printers = None if ranks == () else printers
        self._with_newlines = with_newlines
        self._heard: queue.SimpleQueue[_Heard] = queue.SimpleQueue()
        self._world = 0  # the newest that was heard of
        self._members: set[int] = set()  # of all worlds
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
                self._thread.join(POLL)
            if self._printers:
                self._printers.close()

    def hear(self, entry: Entry) -> None:
        """Each entry of the journal. Raises anything for one that is damaged, or made up."""
        if self._printers is None:
            return
        self._printers.hear(entry)
        if entry["event"] == "worker_left":
            self._heard.put(_Heard(left=int(entry["worker"])))
        elif entry["event"] == "world_formed":
            self._heard.put(_Heard(world=int(entry["world"]), members=tuple(map(int, entry["members"]))))

    def has_shown(self, text: str) -> bool:
        """Whether this, with which the job has ended, stands on the screen, as a worker has printed it lately."""
        return any(each.lines.has_shown(text) for each in self._every())

    def look(self, *, to_end: bool = False) -> None:
        """Show what has come."""
        with suppress(queue.Empty):
            while True:
                self._take(self._heard.get_nowait())
        if self._printers is None:
            return
        self._hide_absent()
        trouble = self._printers.collect(None if self._ranks is None else self._sought, to_end=to_end)
        if trouble and trouble not in self._told:
            self._told.add(trouble)
            self._screen.line(f"what workers print can't be shown at the moment: {trouble}")
        for worker in self._printers.known():
            self._take_up(worker, is_shown=self._ranks is None)
        while found := self._advance():
            self._advance()  # all that was printed before these marks is shown now
            passing = [each for each in self._every() if self._may_pass(each, to_end=to_end)]
            if not passing:
                break
            world = min(each.next_world for each in passing)
            for output in found:
                if output in passing and output.next_world == world:
                    output.pass_mark(self._ranks)

    # -- details --

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._over.wait(POLL)
            self.look(to_end=is_last)
        for output in self._every():
            output.end(with_newline=self._with_newlines)

    def _take(self, heard: _Heard) -> None:
        self._world = max(self._world, heard.world)
        self._members.update(heard.members)
        if heard.left is not None:
            self._left.add(heard.left)
        for worker in (heard.members[rank] for rank in self._ranks or () if rank < len(heard.members)):
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
                output.end(with_newline=True)
        return [output for output in self._every() if output.mark]

    def _may_pass(self, output: _Output, *, to_end: bool) -> bool:
        """Who comes to a rank waits for the journal, which tells who has left before: their last lines are ended then."""
        if output.mark is None:
            return False
        comes_to_it = not output.is_shown and _is_among(output.mark.rank, self._ranks)
        return to_end or output.mark.world <= self._world or not comes_to_it

    def _hide_absent(self) -> None:
        """Once the job has begun, nobody stands for a rank who is not in its world."""
        for worker in self._sought - self._members if self._members else ():
            self._sought.discard(worker)
            for output in self._outputs[worker]:
                output.advance()
                output.hide()


def _is_among(rank: int, ranks: tuple[int, ...] | None) -> bool:
    return ranks is None or rank in ranks


def prefix_among(ranks: Collection[int] | None, worker: int) -> str:
    """Of this worker's lines, where those of these ranks are shown, or of all."""
    return "" if ranks is not None and len(ranks) == 1 else f"[worker {worker}] "
