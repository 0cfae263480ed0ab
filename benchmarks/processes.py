"""Processes that a benchmark starts: logged to files, ended with all their children, whatever happens."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

import psutil

from elasticdl.common.process_group import tethered

ROOT = Path(__file__).parent.parent
POLL = 0.01
Result = TypeVar("Result")


class Failed(RuntimeError):
    """What is measured went wrong, so there is no number; the text says what and shows the end of a log.

    Whatever starts, waits for or reads something here may raise it, and does not say so.
    """


def wait_until(
    condition: Callable[[], Result], seconds: float, what: str, alive: Callable[[], object] = lambda: None
) -> Result:
    """Until the condition returns something true; returns that. ``alive`` raises if that is not to be expected any more."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        try:
            alive()
        except Failed:
            if found := condition():  # by what was said last
                return found
            raise
        if time.monotonic() > deadline:
            raise Failed(f"{what}: not within {seconds:g} s")
        time.sleep(POLL)
    return found


class Growing:
    """A text file that somebody else appends to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_lines(self) -> list[str]:
        """Those that have become whole since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines()


class Processes:
    """Leaving the context ends everything that was started in it. What is killed so has its temporary files, such as a job's
    key, in a folder that goes with it.
    """

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        """``env``: added to this process's environment for each."""
        self.folder = folder
        self._temporary = folder / "temporary"
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self.env = {**os.environ, **threads, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
        self.env |= {"TMPDIR": str(self._temporary), **(env or {})}
        self._started: list[tuple[str, subprocess.Popen[bytes]]] = []

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        with self.log_of(name).open("ab") as log:
            process = subprocess.Popen(
                tethered([*command]),  # a benchmark that is killed leaves nothing running
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self.env, **(env or {})},
                start_new_session=True,
            )
        self._started.append((name, process))
        return process

    def start_module(self, name: str, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        return self.start(name, [sys.executable, "-m", module, *arguments])

    @property
    def pids(self) -> list[int]:
        return [process.pid for _, process in self._started]

    def log_of(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def wait_all(self, seconds: float) -> None:
        """Wait for each to end with 0."""

        def running() -> list[str]:
            return [name for name, process in self._started if process.poll() is None]

        try:
            wait_until(lambda: not running(), seconds, "the end of all", self.raise_if_any_failed)
        except Failed as failure:
            raise Failed("\n".join([str(failure), *map(self.tail, running())])) from None
        self.raise_if_any_failed()

    def raise_if_any_failed(self) -> None:
        for name, process in self._started:
            if process.poll():
                raise Failed(f"{name} ended with {process.returncode}\n{self.tail(name)}")

    def tail(self, name: str, lines: int = 15) -> str:
        return "\n".join(self.log_of(name).read_text(errors="replace").splitlines()[-lines:])

    def __enter__(self) -> Self:
        self._temporary.mkdir(exist_ok=True)
        return self

    def __exit__(self, *exception: object) -> None:
        for _, process in self._started:
            end_tree(process)
        shutil.rmtree(self._temporary, ignore_errors=True)


@contextlib.contextmanager
def scratch(keep: Path | None = None, env: Mapping[str, str] | None = None) -> Iterator[Processes]:
    """Processes with a folder of their own, which is copied to ``keep``, if given, if what runs in it fails."""
    folder = Path(tempfile.mkdtemp(prefix="elasticdl-bench-"))
    try:
        with Processes(folder, env) as processes:
            yield processes
    except Failed:
        if keep:
            shutil.copytree(folder, keep)
            print(f"logs kept: {keep}", flush=True)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that was started in its own session, and everything below it."""
    below: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait(10)
    psutil.wait_procs(below, timeout=10)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
