"""Workers as processes of this machine: the `Starter` whose places are slots.

Each is the leader of a session of its own, so that a signal to the terminal does not reach it and its children can be
ended with it; each dies with the master. What it prints goes to its log, or what it prints on stdout to a file beside. Its temporary
files are in a folder of its own, which goes with it: a worker that is killed cannot clean up after itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from elasticdl.common.environment import STACKS
from elasticdl.common.stacks import last_words
from elasticdl.common.tether import tethered
from elasticdl.common.tracebacks import last_exception, last_line
from elasticdl.common.triton_first import why_it_crashed
from elasticdl.master.state.events import ExitCause, StacksFound, WorkerExited, WorkerPlaced
from elasticdl.places.base import FoundInPlace, Place, StarterReport
from elasticdl.places.fork_server import CannotFork, ForkServer
from elasticdl.places.hung_process import look_at
from elasticdl.places.launcher import Seconds
from elasticdl.places.memory_kills import MemoryKills
from elasticdl.places.process_group import GroupLeader

HOST = "127.0.0.1"
# A place that is idle is kept for so long: until a worker that is replaced at once has been launched, and no longer, as other jobs
# may wait for its GPU. A process that can't be killed keeps its GPU.
TIMES = Seconds(idle=1.0, kill=None)
NOT_FORKED = "workers are started without the fork server (slower): %s"
# A process that is killed goes at once, unless the kernel holds it.
CLOSE_SECONDS = 10.0
OUTPUT_CHARACTERS = 4096
OUTPUT_LINES = 40
DUMP_BYTES = 1 << 16
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SHELL_SIGNAL_BASE = 128
USAGE = 2  # a program ends with that which refuses its arguments, or what it was to do, and has said so
_log = logging.getLogger(__name__)


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """How to start a worker: its command line, its environment, and the file that takes what it prints. ``out``: that takes what
    it prints on stdout, if that is another."""

    argv: Sequence[str]
    environment: Callable[[int, Place], dict[str, str]]
    log: Callable[[int], Path]
    out: Callable[[int], Path] | None = None


class LocalStarter:
    """See `elasticdl.places.base.Starter` for the contract."""

    def __init__(self, command: WorkerCommand, report: StarterReport, server: ForkServer | None = None) -> None:
        """Without a server to fork from, each worker imports for itself."""
        self._command = command
        self._report = report
        self._server = server
        self._told: set[str] = set()  # why workers were not forked
        self._dumps: dict[int, Path] = {}  # of those that run
        self._running: dict[int, GroupLeader] = {}
        self._starting: dict[int, asyncio.Event] = {}  # which says that it was killed meanwhile
        self._places: dict[str, int] = {}  # the worker that was started there last
        self._silent: set[int] = set()  # workers whose place is gone
        self._tasks: set[asyncio.Task[Any]] = set()
        self._memory_kills = MemoryKills()
        self._closed = False

    async def found(self, places: Sequence[Place]) -> Sequence[FoundInPlace]:
        """None: workers of this machine die with their master."""
        return ()

    def start(self, worker_id: int, place: Place) -> None:
        self._places[place.id] = worker_id
        self._starting[worker_id] = asyncio.Event()
        self._track(self._run(worker_id, place))

    def end(self, worker_id: int, grace: float | None) -> None:
        if killed := self._starting.get(worker_id):
            killed.set()
        elif process := self._running.get(worker_id):
            if grace == 0:
                process.kill()
            else:
                process.signal(signal.SIGTERM)
            if grace:
                asyncio.get_running_loop().call_later(grace, process.kill)

    def lost(self, place_id: str) -> None:
        worker_id = self._places.pop(place_id, None)
        if worker_id in self._running or worker_id in self._starting:
            self._silent.add(worker_id)
            self.end(worker_id, 0)

    def read_stacks(self, worker_id: int) -> None:
        if worker_id in self._running and not self._closed:
            self._track(self._read_stacks(worker_id))

    async def _read_stacks(self, worker_id: int) -> None:
        pid, dump, log = self._running[worker_id].pid, self._dumps[worker_id], self._command.log(worker_id)
        found = await asyncio.to_thread(look_at, worker_id, pid, dump, log)
        if worker_id in self._running:
            self._tell(found)

    def read_log(self, worker_id: int) -> None:
        if worker_id in self._running and not self._closed:
            self._track(self._read_log(worker_id))

    async def _read_log(self, worker_id: int) -> None:
        text = await asyncio.to_thread(_last_of, self._command.log(worker_id))
        if worker_id in self._running:
            self._tell(StacksFound(worker_id, _end_of(text)))

    async def detach(self) -> None:
        await self.close()

    async def close(self) -> None:
        self._closed = True
        for worker_id in [*self._running, *self._starting]:
            self.end(worker_id, 0)
        if self._server is not None:
            await self._server.close()
        while self._tasks:
            _, hanging = await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
            if hanging:
                _log.error("workers %s can't be killed: leaving them behind", sorted(self._running))
                return

    def _track(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """`close` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _tell(self, report: WorkerPlaced | WorkerExited | StacksFound) -> None:
        if report.worker_id not in self._silent:
            self._report(report)

    async def _run(self, worker_id: int, place: Place) -> None:
        """Start a worker, and report what becomes of it."""
        folder, exited = None, WorkerExited(worker_id, ExitCause.KILLED, -signal.SIGKILL, "it was not started yet")
        killed = self._starting[worker_id]
        try:
            # Not below the job's folder: paths of Unix sockets, which multiprocessing makes in it, have to be short.
            folder = _temporary_folder(f"{worker_id}-")
            self._dumps[worker_id] = _dump_in(folder)
            spawning = self._track(self._spawn(worker_id, place, folder, killed))
            await self._until_started(spawning, killed)
            del self._starting[worker_id]
            if spawning.done() and not killed.is_set() and (process := spawning.result()):
                exited = await self._watch(worker_id, process)
            elif spawning.done():
                await self._end_unwanted(spawning)
            else:  # it will run nothing of its program: its place is free at once
                self._track(self._end_unwanted(spawning, folder))
                folder = None
        except OSError as error:
            exited = WorkerExited(worker_id, ExitCause.CRASHED, 1, f"can't start it: {_what_failed(error)}")
        for book in (self._starting, self._running, self._dumps):
            book.pop(worker_id, None)
        if folder is not None:
            await _remove(folder)
        self._tell(exited)
        self._silent.discard(worker_id)

    async def _until_started(self, spawning: asyncio.Task[GroupLeader | None], killed: asyncio.Event) -> None:
        """Or until the worker is killed: to start it may take long."""
        killing = asyncio.get_running_loop().create_task(killed.wait())
        await asyncio.wait({spawning, killing}, return_when=asyncio.FIRST_COMPLETED)
        killing.cancel()

    async def _end_unwanted(self, spawning: asyncio.Task[GroupLeader | None], folder: str | None = None) -> None:
        """What is being started can't be called back: it is killed as soon as it is there."""
        with contextlib.suppress(OSError):
            if process := await spawning:
                process.kill()
                await process.wait()
        if folder is not None:
            await _remove(folder)

    async def _spawn(self, worker_id: int, place: Place, folder: str, killed: asyncio.Event) -> GroupLeader | None:
        """None if it was killed before there was a process."""
        environment = {**self._command.environment(worker_id, place), "TMPDIR": folder, STACKS: str(_dump_in(folder))}

        def is_wanted() -> bool:
            return not (self._closed or killed.is_set())

        with (
            self._command.log(worker_id).open("ab") as log,
            (self._command.out or self._command.log)(worker_id).open("ab") as out,
        ):
            if self._server is not None:
                try:
                    return await self._server.fork(environment, out.fileno(), log.fileno(), is_wanted)
                except CannotFork as reason:
                    if is_wanted():
                        self._warn(str(reason))
            if not is_wanted():
                return None
            process = subprocess.Popen(
                tethered([*self._command.argv]),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
            return GroupLeader(process.pid, process.wait)

    def _warn(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            _log.warning(NOT_FORKED, reason)

    async def _watch(self, worker_id: int, process: GroupLeader) -> WorkerExited:
        self._running[worker_id] = process
        self._tell(WorkerPlaced(worker_id, HOST, process.pid))
        code = await process.wait()
        log = self._command.log(worker_id)
        text = _last_of(log)
        output = _end_of(text)
        cause, detail = self._memory_kills.explain(code, *judge_exit(code, text if code in (1, USAGE) else output))
        if cause is ExitCause.CRASHED:
            detail += f"; its log: {log}"
        return WorkerExited(worker_id, cause, code, detail, output)


def _dump_in(folder: str) -> Path:
    return Path(folder) / "elasticdl-stacks"


async def _remove(folder: str) -> None:
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _temporary_folder(prefix: str) -> str:
    try:
        return tempfile.mkdtemp(prefix=prefix)
    except FileNotFoundError:  # who tidies up /tmp takes the folder of a job that runs for weeks
        os.makedirs(tempfile.gettempdir(), mode=0o700)
        return tempfile.mkdtemp(prefix=prefix)


def _what_failed(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


def judge_exit(code: int, output: str = "") -> tuple[ExitCause, str]:
    """What an exit code says, with a word for people. A shell reports a child's signal as 128 + its number.

    ``output``: the last that the process has printed, which may tell the reason.
    """
    if code == 0:
        return ExitCause.CLEAN, "exit code 0"
    number = -code if code < 0 else code - _SHELL_SIGNAL_BASE
    try:
        name = signal.Signals(number).name
    except ValueError:
        said = last_exception(output) if code == 1 else last_line(output) if code == USAGE else ""
        return ExitCause.CRASHED, f"exit code {code}{f': {said}' if said else ''}"
    if number in _FROM_OUTSIDE:
        return ExitCause.KILLED, name
    why = why_it_crashed(output) if number in (signal.SIGSEGV, signal.SIGABRT) else ""
    return ExitCause.CRASHED, f"{name}: {why}" if why else name


def _last_of(log: Path) -> str:
    """As much of a log as may be about its end; empty if it can't be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * OUTPUT_CHARACTERS - DUMP_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _end_of(text: str) -> str:
    """The last lines, or the first that tell of the crash with which a log ends."""
    if stacks := last_words(text):
        return "\n".join(stacks[:OUTPUT_LINES])
    return "\n".join(text[-OUTPUT_CHARACTERS:].splitlines()[-OUTPUT_LINES:])
