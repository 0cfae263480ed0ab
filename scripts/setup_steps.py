"""Runs the programs of a set-up one after another, shows how far they are, and ends them with all that they have started."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

LONGEST_SECONDS = 3600.0  # of one step, or of somebody else's set-up here


class SetupError(Exception):
    """What is wrong, where, and what would be right; with a program's last lines where they are the reason."""


class Board:
    """A line for each step with its time. On a terminal the last one changes while it lasts; elsewhere news are lines, too."""

    def __init__(self, out: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._live = out.isatty()
        self._number = 0
        self._began = 0.0
        self._line = self._told = ""

    def begin(self, title: str) -> None:
        self._number += 1
        self._began, self._told = self._clock(), ""
        self._line = f"setup: {self._number}. {title}"
        self.show("...")

    def show(self, news: str) -> None:
        """How far it is, or what is done beside."""
        text = f"{self._line} {self._time()} {news}".rstrip()
        if self._live:
            self._write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
        elif news and news != self._told:
            self._told = news
            self._write(f"{text}\n")

    def end(self, how: str) -> None:
        self._write(f"{chr(13) + chr(27) + '[K' if self._live else ''}{self._line} {self._time()} {how}\n")

    def _time(self) -> str:
        return duration(self._clock() - self._began)

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class Beside:
    """A program that runs while others do; the last line that it has said tells how far it is."""

    def __init__(self, title: str, process: subprocess.Popen[str], steps: Steps) -> None:
        self._title, self._process, self._steps = title, process, steps
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.said.append(line.rstrip())

    @property
    def news(self) -> str:
        return f"({self.said[-1]})" if self.said and self._process.poll() is None else ""

    def check(self) -> None:
        """Raises SetupError if it has failed."""
        if self._process.poll():
            self._reader.join(10.0)
            raise SetupError("\n".join(self.said[-30:]) or f"{self._title} ended with {self._process.returncode}")

    def result(self) -> str:
        """What it has printed, once it has ended; in a step of its own if it has not yet."""
        if self._process.poll() is None:
            self._steps.wait(self._title, self._process, self)
        self.check()
        assert self._process.stdout is not None
        return self._process.stdout.read().strip()


class Steps:
    """Runs programs one after another, each a step on the board; whatever ends this, they end too."""

    def __init__(self, lock: int, board: Board, log: Path) -> None:
        self._lock = lock
        self._board = board
        self._log = log
        self._beside: Beside | None = None

    def run(self, title: str, command: Sequence[str]) -> None:
        self._log.parent.mkdir(exist_ok=True)
        with self._log.open("a") as log:
            began = log.tell()
            with self._running(command, {}, log, subprocess.STDOUT) as process:
                self.wait(title, process, self._beside)
        if process.returncode != 0:
            reason = _why(self._log, began)
            raise SetupError(f"{title}: `{' '.join(command[1:])}` ended with {process.returncode}{reason}")

    @contextmanager
    def beside(self, title: str, command: Sequence[str], variables: dict[str, str]) -> Iterator[Beside]:
        """If it fails, the step that runs then ends at once, and raises what it has said."""
        with self._running(command, variables, subprocess.PIPE, subprocess.PIPE) as process:
            self._beside = Beside(title, process, self)
            try:
                yield self._beside
            finally:
                self._beside = None

    def wait(self, title: str, process: subprocess.Popen[str], beside: Beside | None) -> None:
        self._board.begin(title)
        deadline = time.monotonic() + LONGEST_SECONDS
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
                    break
                if beside:
                    beside.check()
                self._board.show(beside.news if beside else "")
                if time.monotonic() > deadline:
                    raise SetupError(f"{title}: not done after {LONGEST_SECONDS:.0f} s")
        except BaseException:
            self._board.end("broken off")
            raise
        self._board.end("failed" if process.returncode else "done")

    @contextmanager
    def _running(
        self, command: Sequence[str], variables: dict[str, str], out: IO[str] | int, errors: int
    ) -> Iterator[subprocess.Popen[str]]:
        process = None
        try:
            with signals_held_back():
                process = subprocess.Popen(
                    command,
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=errors,
                    text=True,
                    errors="replace",
                    start_new_session=True,  # to be ended with all that it has started
                    pass_fds=(self._lock,),
                )
            yield process
        finally:
            if process is not None:
                _end(process)


@contextmanager
def signals_held_back() -> Iterator[None]:
    """A signal that comes while a program is started is acted upon when it is known what to end. The handlers change, not the
    mask of signals: a program inherits that one."""
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in (number for number, handler in before.items() if handler is not signal.SIG_IGN):
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def _end(process: subprocess.Popen[str]) -> None:
    """With all that it has started: asked first, so that it tidies up, then made to; at once if whoever waits loses patience."""
    for number, patience in ((signal.SIGINT, 20.0), (signal.SIGKILL, 10.0)):
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                process.wait(patience)


def end_by_signals() -> None:
    """Who is told to end goes by way of what tidies up, as with Ctrl-C; what `nohup` keeps away stays away."""

    def interrupted(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupted)


def _why(log: Path, began: int) -> str:
    """pip's own reason, of what the log has got since then; where to read on, and what helps."""
    with log.open(errors="replace") as text:
        text.seek(began)
        reasons = [line.strip() for line in text if line.startswith("ERROR:") or "No space left" in line]
    found = f": {reasons[-1]}" if reasons else ""
    return f"{found}\nwhat it said is in {log}; run the same again: what is installed is kept"


def duration(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)
