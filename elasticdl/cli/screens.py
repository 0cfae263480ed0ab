"""Where the course of a job is shown: on stderr, a live panel on a terminal, plain lines anywhere else. And what its workers print: on
this command's own stdout and stderr, which may be closed, slow or full.

Nothing that happens there may harm a job. So whoever writes much writes from a thread of its own.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from elasticdl.cli import wording
from elasticdl.proto import elasticdl_pb2 as pb

PASSING_SECONDS = 10.0
REDRAW_SECONDS = 0.25
JOIN_SECONDS = 1.0


class Stream(Enum):
    OUT = "stdout"
    ERR = "stderr"


def tell(text: str) -> None:
    """A line for a person, on stderr; if nobody can read it any more, that is no matter."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class Outlet:
    """One of this process's descriptors, for bytes as they come."""

    def __init__(self, descriptor: int, stream: Stream) -> None:
        self._descriptor = descriptor
        self.stream = stream
        self._is_broken = False  # nothing is written any more

    @property
    def is_terminal(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: bytes) -> str:
        """All of it, however long that takes; if it can't be written, returns what is to be said of that, once."""
        rest = memoryview(data)
        while rest and not self._is_broken:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # somebody else who has it, too, has set it so
                select.select([], [self._descriptor], [])
            except OSError as error:
                self._is_broken = True
                why = "its reader is gone" if error.errno == errno.EPIPE else (error.strerror or str(error))
                return f"{self.stream.value} can't be written ({why}): what workers print goes on in their logs"
        return ""

    def ends_at(self, other: Outlet) -> bool:
        """Whether both lead to the same terminal, pipe or file."""
        mine, theirs = os.fstat(self._descriptor), os.fstat(other._descriptor)
        return (mine.st_dev, mine.st_ino) == (theirs.st_dev, theirs.st_ino)


def own_outlets() -> tuple[Outlet, Outlet]:
    """This process's stdout and stderr."""
    return Outlet(_descriptor(sys.stdout, 1), Stream.OUT), Outlet(_descriptor(sys.stderr, 2), Stream.ERR)


def _descriptor(stream: TextIO, usual: int) -> int:
    try:
        return stream.fileno()
    except OSError:  # somebody has put one in its place that has none
        return usual


class Screen:
    """Shows a job while it runs, and what its workers print."""

    def __init__(self, clock: Callable[[], float], outlets: Iterable[Outlet]) -> None:
        self._clock = clock
        self._outlets = {outlet.stream: outlet for outlet in outlets}
        self._newest: dict[str, str] = {}  # of what passes, by its kind: what is not written yet

    def live(self) -> AbstractContextManager[object]:
        """Holds the terminal while its context lasts, if it is one."""
        return nullcontext()

    def show(self, status: pb.JobStatus) -> None:
        """The newest status."""
        raise NotImplementedError

    def line(self, text: str) -> None:
        """Something that happened, to stay on the screen."""
        raise NotImplementedError

    def passing(self, kind: str, text: str) -> None:
        """Something that happens again and again, of which the newest is enough."""
        self._newest[kind] = text

    def write_newest(self) -> None:
        """Of what passes, as nothing comes any more."""
        for text in self._newest.values():
            self.line(text)

    def printed(self, lines: bytes, stream: Stream) -> None:
        """Whole lines of a worker, but perhaps for the end of the last; takes as long as whoever reads them."""
        if trouble := self._outlets[stream].write(lines):
            self.line(trouble)

    def draws(self, stream: Stream) -> bool:
        """Whether it shows there what a terminal would show, itself: the terminal is not given what moves its cursor."""
        return False

    def unfinished(self, line: bytes, stream: Stream, prefix: str) -> None:
        """The line that is being printed there, which is as long as this by now, or several that are written over; empty if there
        is none.

        Where other lines may be written meanwhile it is shown when it is finished.
        """


class PlainScreen(Screen):
    """Lines: what happened, what workers wait for, and progress each so many steps.

    Of what happens again and again there is one line in `PASSING_SECONDS`: epochs of a second do not hide the rest.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        log_loss_steps: int,
        clock: Callable[[], float] = time.monotonic,
        outlets: Iterable[Outlet] = (),
    ) -> None:
        super().__init__(clock, outlets)
        self._write = write
        self._every = log_loss_steps
        self._shown = 0
        self._waiting: set[str] = set()
        self._written: dict[str, float] = {}  # when each kind of what passes was

    def show(self, status: pb.JobStatus) -> None:
        self._write_due(self._clock() - PASSING_SECONDS)
        waiting = wording.waiting_lines(status)
        for key in waiting.keys() - self._waiting:
            self._write(waiting[key])
        self._waiting = set(waiting)
        if status.step // self._every > self._shown // self._every:
            self._shown = status.step
            self._write(wording.progress_line(status))

    def line(self, text: str) -> None:
        self.write_newest()
        self._write(text)

    def passing(self, kind: str, text: str) -> None:
        super().passing(kind, text)
        self._write_due(self._clock() - PASSING_SECONDS)

    def write_newest(self) -> None:
        """What was held back must not come after what happened later."""
        self._write_due(math.inf)

    def _write_due(self, before: float) -> None:
        """Those kinds of which nothing was written since."""
        for kind in [kind for kind in self._newest if self._written.get(kind, -math.inf) <= before]:
            self._write(self._newest.pop(kind))
            self._written[kind] = self._clock()


class LiveScreen(Screen):
    """A panel at the foot of the terminal that is redrawn; what happened scrolls by above it."""

    def __init__(
        self, console: Console, clock: Callable[[], float] = time.monotonic, outlets: Iterable[Outlet] = ()
    ) -> None:
        super().__init__(clock, outlets)
        self._console = console
        self._unfinished: dict[tuple[Stream, str], list[str]] = {}
        # Whoever draws erases as many lines as the panel had: two at once would erase lines above a panel that has shrunk.
        self._drawing = threading.Lock()
        self._status = pb.JobStatus(phase="pending", time_left=-1)
        self._received = clock()

    @contextmanager
    def live(self) -> Iterator[None]:
        over = threading.Event()
        # What is written on stdout may lead elsewhere.
        with Live(self, console=self._console, auto_refresh=False, transient=True, redirect_stdout=False) as live:

            def redraw() -> None:
                while not over.wait(REDRAW_SECONDS):
                    with self._drawing:
                        live.refresh()

            thread = threading.Thread(target=redraw, name="elasticdl-panel", daemon=True)
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join(JOIN_SECONDS)

    def show(self, status: pb.JobStatus) -> None:
        self._status, self._received = status, self._clock()

    def line(self, text: str) -> None:
        with self._drawing:
            self._console.print(Text(text))

    def printed(self, lines: bytes, stream: Stream) -> None:
        if not self.draws(stream):
            return super().printed(lines, stream)
        text = lines.decode(errors="replace")
        with self._drawing:
            self._console.print(_AsItIs(text if text.endswith("\n") else text + "\n"), end="", soft_wrap=True)
        return None

    def draws(self, stream: Stream) -> bool:
        return self._outlets[stream].is_terminal

    def unfinished(self, line: bytes, stream: Stream, prefix: str) -> None:
        if line and self.draws(stream):
            self._unfinished[stream, prefix] = [prefix + each for each in line.decode(errors="replace").split("\n")]
        else:
            self._unfinished.pop((stream, prefix), None)

    def __rich__(self) -> RenderableType:
        """As it is at this moment, also when it is drawn again since something was printed above it."""
        panel = render(self._status, self._clock() - self._received, tuple(self._newest.values()))
        unfinished = [line for lines in tuple(self._unfinished.values()) for line in lines]
        lines = [Text.from_ansi(line, no_wrap=True, overflow="crop") for line in unfinished]
        return Group(*lines, panel) if lines else panel


class _GoneOrNot:
    """The terminal of this process, which may go while the job goes on: what can't be written then is no matter."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            return self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()


class _AsItIs:
    """Text whose colours, and whatever else it has for the terminal, are its own."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, *_: Any) -> Iterator[Segment]:
        yield Segment(self._text)


@contextmanager
def open_screen(log_loss_steps: int, outlets: Iterable[Outlet] = ()) -> Iterator[Screen]:
    console = Console(file=cast(TextIO, _GoneOrNot(sys.stderr)), highlight=False)
    is_live = console.is_terminal
    screen = LiveScreen(console, outlets=outlets) if is_live else PlainScreen(tell, log_loss_steps, outlets=outlets)
    try:
        with screen.live():
            yield screen
    finally:
        screen.write_newest()


def render(status: pb.JobStatus, age: float, newest: Sequence[str] = ()) -> Panel:
    """The panel of a status that came ``age`` seconds ago. ``newest``: the last of what comes by each epoch."""
    left = max(0.0, status.time_left - age) if status.time_left >= 0 else -1.0
    facts = Table.grid(padding=(0, 3))
    facts.add_row(
        f"epoch {wording.epoch_text(status)}",
        f"step {wording.count_of(status.step, status.total_steps)}",
        f"loss {status.loss:.4g}" if status.samples else "loss -",
        f"{status.samples_per_second:,.0f} samples/s",
        f"elapsed {wording.duration(status.elapsed + age)}",
        "" if wording.is_over(status) else f"left {wording.duration(left)}",
    )
    bar = Table.grid(expand=True)  # a bare bar does not end its line
    bar.add_row(ProgressBar(total=status.total_steps or 1, completed=status.step))
    parts: list[RenderableType] = [facts, bar, *map(Text, newest)]
    once = wording.Once()
    if not wording.is_over(status) and status.max_workers:  # else no status has come yet
        parts.append(workers_table(status, once))
    if status.last_change:
        parts.append(Text(once(f"last change: {status.last_change}", status.last_change), style="dim"))
    parts += [Text(said, style="dim") for said in wording.finding_lines(status)]
    if status.reason:
        parts.append(Text(once(status.reason), style="yellow"))
    return Panel(
        Group(*parts), title=Text(" · ".join(filter(None, (status.job_name, status.phase)))), title_align="left"
    )


def workers_table(status: pb.JobStatus, once: wording.Once) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("worker", "state", "rank", "host", "pid", "why"):
        table.add_column(title)
    training = {worker.worker_id for worker in wording.members(status)}
    for worker in sorted(status.workers, key=lambda worker: (worker.worker_id not in training, worker.worker_id)):
        rank, pid = ("" if number < low else str(number) for number, low in ((worker.rank, 0), (worker.pid, 1)))
        state = wording.state_text(worker, status.phase)
        table.add_row(str(worker.worker_id), state, rank, Text(worker.host), pid, Text(once(wording.why(worker))))
    by = f", gradients by {status.collective}" if status.collective else ""
    table.caption = f"{len(training)} of {wording.wanted_workers(status)} workers train{by}"
    table.caption_justify = "left"
    return table
