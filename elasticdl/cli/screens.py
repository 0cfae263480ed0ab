"""Where the course of a job is shown: on stderr, a live panel on a terminal, plain lines anywhere else. And what its workers print: on
this command's own stdout and stderr, which may be closed, slow or full.

Nothing that happens there may harm a job. So whoever writes much writes from a thread of its own.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from enum import Enum
from typing import Any, TextIO, cast

from google.protobuf import json_format
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elasticdl.job.facts import Facts
from elasticdl.job.jobdir import STOPPED_STEM
from elasticdl.job.journal import Entry, metrics_text, plural
from elasticdl.proto import elasticdl_pb2 as pb

# How numbers, statuses, journal entries and logs read: pure functions that return text.


# A reason that is longer than the first is shown once; after that its beginning. So many are remembered.
LONG_REASON, BEGINNING, REASONS = 100, 60, 16
_WHOLE = ("world_version", "step", "total_steps", "samples", "compared_step")


class Once:
    """Shows a long reason once: where it comes again, with other numbers or within another, its beginning stands for it."""

    def __init__(self) -> None:
        self._told: deque[re.Pattern[str]] = deque(maxlen=REASONS)

    def __call__(self, text: str, *reasons: object) -> str:
        """``reasons``: the parts of the text that may come again; all of it, if none is given."""
        for told in self._told:
            text = told.sub(lambda found: f"{found[0][:BEGINNING]}... (as above)", text)
        for reason in map(str, reasons or (text,)):
            if len(reason) > LONG_REASON and reason in text:
                self._told.append(re.compile(re.sub(r"\d+", r"\\d+", re.escape(reason))))
        return text


def duration(seconds: float) -> str:
    """As ``1:02:03``; ``?`` when it is not known."""
    if seconds < 0 or not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"


def count_of(done: int, total: int) -> str:
    return f"{done:,}/{total:,}" if total else f"{done:,}"


def epoch_text(status: pb.JobStatus) -> str:
    """The epoch as people count, from 1; ``-`` of a job of which only the step is known."""
    if status.step and not (status.epoch or status.total_epochs or status.samples or status.total_steps):
        return "-"
    return count_of(min(status.epoch + 1, status.total_epochs or status.epoch + 1), status.total_epochs)


_STATES = {"member": "trains", "standby": "ready", "draining": "leaves"}  # other states are words that people know


def state_text(worker: pb.WorkerStatus, phase: str) -> str:
    """``phase``: of its job; members of a world that waits for others train no more."""
    is_waiting = worker.state == "member" and phase == "waiting"
    return phase if is_waiting else _STATES.get(worker.state, worker.state)


def worker_line(worker: pb.WorkerStatus, once: Once, phase: str = "running") -> str:
    """A worker, for output that is not a terminal."""
    rank = f", rank {worker.rank}" if worker.rank >= 0 else ""
    process = f", pid {worker.pid}{f' on {worker.host}' if worker.host else ''}" if worker.pid > 0 else ""
    because = once(why(worker))
    return f"worker {worker.worker_id}: {state_text(worker, phase)}{rank}{process}{f': {because}' if because else ''}"


def members(status: pb.JobStatus) -> list[pb.WorkerStatus]:
    """The workers that train, in rank order."""
    training = (worker for worker in status.workers if state_text(worker, status.phase) == _STATES["member"])
    return sorted(training, key=lambda worker: worker.rank)


def waiting_lines(status: pb.JobStatus) -> dict[str, str]:
    """What workers without a place wait for, a line for each reason, by a key that does not change with its numbers."""
    waiting: dict[str, list[pb.WorkerStatus]] = {}
    for worker in status.workers:
        if worker.state == "pending" and worker.reason:
            waiting.setdefault(re.sub(r"\d+", "#", worker.reason), []).append(worker)
    lines = {}
    for key, workers in waiting.items():
        ids = ", ".join(str(worker.worker_id) for worker in workers)
        who = f"workers {ids} wait" if workers[1:] else f"worker {ids} waits"
        lines[key] = f"{who}: {workers[0].reason}"
    return lines


def finding_lines(status: pb.JobStatus) -> list[str]:
    """How the job scales, and what follows from it; when the workers' states were last seen to be one."""
    lines = [f"scaling: {said}" for said in (status.advice, status.decision) if said]
    if workers := status.compared_workers:
        lines.append(f"all {workers} workers held the same state after step {status.compared_step:,}")
    return lines


def facts(status: pb.JobStatus) -> dict[str, str]:
    """Of a job among others, by the titles of columns."""
    goes_on = status.max_workers and not is_over(status)
    return {
        "phase": status.phase,
        "workers": f"{len(members(status))} of {wanted_workers(status)}" if goes_on else "",
        "step": count_of(status.step, status.total_steps),
        "elapsed": duration(status.elapsed),
        "reason": status.reason,
    }


def status_json(status: pb.JobStatus) -> str:
    """In one line, with every field. Protobuf's own form has large whole numbers as text."""
    found = json_format.MessageToDict(
        status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return json.dumps({name: int(value) if name in _WHOLE else value for name, value in found.items()})


def wanted_workers(status: pb.JobStatus) -> str:
    if status.min_workers == status.max_workers:
        return str(status.min_workers)
    return f"{status.min_workers}-{status.max_workers}"


def is_over(status: pb.JobStatus) -> bool:
    return status.phase in ("succeeded", "failed", "stopped")


def progress_line(status: pb.JobStatus) -> str:
    """How far a job is, for output that is not a terminal."""
    parts = [f"epoch {epoch_text(status)}", f"step {count_of(status.step, status.total_steps)}"]
    if status.samples and (status.samples_per_second or not math.isnan(status.loss)):  # else it has only been resumed
        parts += [f"loss {status.loss:.4g}", f"{status.samples_per_second:,.0f} samples/s"]
    if training := members(status):  # else they are between two worlds, or have finished
        parts.append(plural(len(training), "worker"))
    parts.append(f"elapsed {duration(status.elapsed)}")
    if not is_over(status) and status.time_left >= 0:
        parts.append(f"left {duration(status.time_left)}")
    return ", ".join(parts)


def why(worker: pb.WorkerStatus) -> str:
    """Why it is in its state; before that what is the matter with it."""
    return "; ".join(filter(None, (worker.remark, worker.reason)))


_NOT_SHOWN = ("number", "time", "event", "stack", "curve")  # the curve is long, and for programs


def event_line(entry: Entry, once: Once) -> str:
    """A journal entry for a person: time, event, fields."""
    fields = (f"{key}={_value(value)}" for key, value in entry.items() if key not in _NOT_SHOWN)
    head = f"{moment(entry['time'])}  {entry['event']:17} {'  '.join(fields)}".rstrip()
    head = once(head, *reasons_of(entry))
    stack = entry.get("stack")
    return "\n".join([head, *(f"{'':25}  {line}" for line in (stack if isinstance(stack, list) else ()))])


def reasons_of(entry: Entry) -> list[object]:
    return [entry.get("reason", ""), entry.get("message", "")]


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return str(value)


def pauses_text(found: Facts) -> str:
    """How often training paused and for how long at most; survivors of one change report one pause each."""
    count, longest = found.counts["pauses"], found.longest_pause
    if count < 2:
        return f"training paused once, {longest:.2f} s" if count else "training never paused"
    return f"training paused {count:,} times, {longest:.2f} s at most"


def kept_text(status: pb.JobStatus, found: Facts, *, on_cluster: bool) -> str:
    """What is kept of a training that has ended, and how it goes on; empty if nobody wanted that.

    In the job's own folder what was kept is found by the job's name, which may have been drawn. ``on_cluster``: there the name is taken
    until the job is deleted.
    """
    name, is_wanted = status.job_name, found.wants_checkpoint and status.step
    step, path = found.checkpoint
    if path and (is_wanted or step == status.step):
        of_step = "" if step == status.step else f" of step {step:,}"
        after = f"after `elasticdl delete {name}` " if on_cluster else ""
        named = f", with --job_name {name}," if f"/{name}/{STOPPED_STEM}" in path else ""
        return f"kept{of_step} in {path}: {after}the same command{named} goes on from there"
    failed, why = found.no_checkpoint
    because = f": {why}" if why and failed == status.step else ""
    return f"nothing is kept of it{because}" if is_wanted else ""


def summary_lines(status: pb.JobStatus, found: Facts, output: str, kept: str) -> list[str]:
    """What a finished job has to show. ``kept``: of one that was stopped."""
    epoch = f"epoch {epoch_text(status)}, " if status.total_epochs else ""
    head = f"job {status.job_name} {status.phase}: {plural(status.step, 'step')}, {epoch}{duration(status.elapsed)}"
    lines = [head]
    made_steps = status.samples and status.step != found.resumed
    if status.phase == "succeeded" and made_steps and not math.isfinite(status.loss):
        lines.append(f"  warning  training has diverged: its last loss is {status.loss}")
    if status.metrics:
        lines.append(f"  metrics  {metrics_text(status.metrics)}")
    lines.append(f"  {pauses_text(found)}")
    if status.phase == "stopped" and kept:
        lines.append(f"  {kept}")
    if output:
        lines.append(f"  output   {output}")
    return lines


def prefix(writer: str) -> str:
    return f"{writer:9} | "


def by_writer(names: Iterable[str]) -> list[str]:
    """The master, then the workers by number."""
    return sorted(names, key=lambda name: (name != "master", len(name), name))


def moment(seconds: float) -> str:
    """A time since the epoch as logs have it."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


REDRAW_SECONDS = 0.25
JOIN_SECONDS = 1.0


class Stream(Enum):
    OUT = "stdout"
    ERR = "stderr"


def tell(text: str) -> None:
    """A line for a person, on stderr; if nobody can read it any more, that is no matter."""
    with contextlib.suppress(OSError):
        # At once, with its end: another thread writes what workers print, which may lead to the same place.
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


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
    return Outlet(1, Stream.OUT), Outlet(2, Stream.ERR)


class Screen:
    """Shows a job while it runs, and what its workers print. As lines: what happened, what workers wait for, and progress each so many
    steps."""

    def __init__(self, write: Callable[[str], None], log_loss_steps: int, outlets: Iterable[Outlet] = ()) -> None:
        self._write = write
        self._every = log_loss_steps
        self._outlets = {outlet.stream: outlet for outlet in outlets}
        self._shown = 0
        self._waiting: set[str] = set()

    def show(self, status: pb.JobStatus) -> None:
        """The newest status."""
        waiting = waiting_lines(status)
        for key in waiting.keys() - self._waiting:
            self._write(waiting[key])
        self._waiting = set(waiting)
        if status.step // self._every > self._shown // self._every:
            self._shown = status.step
            self._write(progress_line(status))

    def line(self, text: str) -> None:
        """Something that happened, to stay on the screen."""
        self._write(text)

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


class LiveScreen(Screen):
    """A panel at the foot of the terminal that is redrawn; what happened scrolls by above it."""

    def __init__(
        self, console: Console, clock: Callable[[], float] = time.monotonic, outlets: Iterable[Outlet] = ()
    ) -> None:
        super().__init__(self._print, 0, outlets)
        self._console = console
        self._clock = clock
        self._unfinished: dict[tuple[Stream, str], list[str]] = {}
        # Whoever draws erases as many lines as the panel had: two at once would erase lines above a panel that has shrunk.
        self._drawing = threading.Lock()
        self._status = pb.JobStatus(phase="pending", time_left=-1)
        self._received = clock()

    @contextmanager
    def live(self) -> Iterator[None]:
        """Holds the terminal while its context lasts."""
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

    def printed(self, lines: bytes, stream: Stream) -> None:
        if not self.draws(stream):
            return super().printed(lines, stream)
        text = lines.decode(errors="replace")
        with self._drawing:
            self._console.out(text if text.endswith("\n") else text + "\n", end="", highlight=False)
        return None

    def draws(self, stream: Stream) -> bool:
        return self._outlets[stream].is_terminal

    def unfinished(self, line: bytes, stream: Stream, prefix: str) -> None:
        if line and self.draws(stream):
            self._unfinished[stream, prefix] = [prefix + each for each in line.decode(errors="replace").split("\n")]
        else:
            self._unfinished.pop((stream, prefix), None)

    def _print(self, text: str) -> None:
        with self._drawing:
            self._console.print(Text(text))

    def __rich__(self) -> RenderableType:
        """As it is at this moment, also when it is drawn again since something was printed above it."""
        panel = render(self._status, self._clock() - self._received)
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


@contextmanager
def open_screen(log_loss_steps: int, outlets: Iterable[Outlet] = ()) -> Iterator[Screen]:
    console = Console(file=cast(TextIO, _GoneOrNot(sys.stderr)), highlight=False)
    if not console.is_terminal:
        yield Screen(tell, log_loss_steps, outlets)
        return
    screen = LiveScreen(console, outlets=outlets)
    with screen.live():
        yield screen


def render(status: pb.JobStatus, age: float) -> Panel:
    """The panel of a status that came ``age`` seconds ago."""
    left = max(0.0, status.time_left - age) if status.time_left >= 0 else -1.0
    facts = Table.grid(padding=(0, 3))
    facts.add_row(
        f"epoch {epoch_text(status)}",
        f"step {count_of(status.step, status.total_steps)}",
        f"loss {status.loss:.4g}" if status.samples else "loss -",
        f"{status.samples_per_second:,.0f} samples/s",
        f"elapsed {duration(status.elapsed + age)}",
        "" if is_over(status) else f"left {duration(left)}",
    )
    bar = Table.grid(expand=True)  # a bare bar does not end its line
    bar.add_row(ProgressBar(total=status.total_steps or 1, completed=status.step))
    parts: list[RenderableType] = [facts, bar]
    once = Once()
    if not is_over(status) and status.max_workers:  # else no status has come yet
        parts.append(workers_table(status, once))
    if status.last_change:
        parts.append(Text(once(f"last change: {status.last_change}", status.last_change), style="dim"))
    parts += [Text(said, style="dim") for said in finding_lines(status)]
    if status.reason:
        parts.append(Text(once(status.reason), style="yellow"))
    return Panel(
        Group(*parts), title=Text(" · ".join(filter(None, (status.job_name, status.phase)))), title_align="left"
    )


def workers_table(status: pb.JobStatus, once: Once) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("worker", "state", "rank", "host", "pid", "why"):
        table.add_column(title)
    training = {worker.worker_id for worker in members(status)}
    for worker in sorted(status.workers, key=lambda worker: (worker.worker_id not in training, worker.worker_id)):
        rank, pid = ("" if number < low else str(number) for number, low in ((worker.rank, 0), (worker.pid, 1)))
        state = state_text(worker, status.phase)
        table.add_row(str(worker.worker_id), state, rank, Text(worker.host), pid, Text(once(why(worker))))
    by = f", gradients by {status.collective}" if status.collective else ""
    table.caption = f"{len(training)} of {wanted_workers(status)} workers train{by}"
    table.caption_justify = "left"
    return table
