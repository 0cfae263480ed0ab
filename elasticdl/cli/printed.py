"""What workers print, for whoever follows their job: whole lines, of the ranks that were asked for."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from elasticdl.cli.screens import Screen, Stream
from elasticdl.job.journal import Entry

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


class Prints:
    """Shows what workers print, in a thread of its own: whoever reads it may be slow. ``ranks``: to show; None for all workers."""

    def __init__(self, ranks: tuple[int, ...] | None) -> None:
        self._ranks = ranks
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elasticdl-prints", daemon=True)

    @contextmanager
    def shown(self, wait: Callable[[], bool]) -> Iterator[Self]:
        """It is shown meanwhile, and at the end what is left. ``wait`` is asked again and again whether that may take longer."""
        if self._ranks != ():
            self._thread.start()
        try:
            yield self
        finally:
            self._over.set()
            while self._thread.is_alive() and wait():
                self._thread.join(POLL)
            self._close()

    def has_shown(self, text: str) -> bool:
        """Whether this, with which the job has ended, stands on the screen, as a worker has printed it lately."""
        return any(each.has_shown(text) for each in self._every_lines())

    # -- of this machine, or of a cluster --

    def hear(self, entry: Entry) -> None:
        """Each entry of the journal."""

    def _run(self) -> None:
        """Show what comes until `_over`, and then what is left."""

    def _every_lines(self) -> list[PrintedLines]:
        return []

    def _close(self) -> None:
        """Somebody may still read."""


def prefix_among(ranks: Collection[int] | None, worker: int) -> str:
    """Of this worker's lines, where those of these ranks are shown, or of all."""
    return "" if ranks is not None and len(ranks) == 1 else f"[worker {worker}] "


def workers_of(ranks: Iterable[int], members: Sequence[int]) -> list[int]:
    """Who has these ranks. ``members``: of a world, in the order of ranks."""
    return [members[rank] for rank in ranks if rank < len(members)]
