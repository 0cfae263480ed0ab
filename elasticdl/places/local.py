"""Workers as processes of this machine.

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
from elasticdl.master.state.events import ExitCause, FoundWorker, StacksFound, WorkerExited, WorkerPending, WorkerPlaced
from elasticdl.places.base import Report
from elasticdl.places.devices import Slot, Slots
from elasticdl.places.fork_server import CannotFork, ForkedWorker, ForkServer, kill_group, reap_group
from elasticdl.places.hung_process import look_at
from elasticdl.places.memory_kills import MemoryKills

HOST = "127.0.0.1"
# Another job may give a GPU back at any time, and does not tell us.
RETRY_SECONDS = 1.0
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


class _Unwanted(Exception):
    """A worker was killed before it was started."""


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """How to start a worker: its command line, its environment, and the file that takes what it prints. ``out``: that takes what
    it prints on stdout, if that is another."""

    argv: Sequence[str]
    environment: Callable[[int, Slot], dict[str, str]]
    log: Callable[[int], Path]
    out: Callable[[int], Path] | None = None


@dataclass(frozen=True, slots=True)
class PlainWorker:
    """As `ForkedWorker`, of a process that was started as any other."""

    process: asyncio.subprocess.Process

    @property
    def pid(self) -> int:
        return self.process.pid

    def terminate(self) -> None:
        self.process.terminate()

    async def wait(self) -> int:
        code = await self.process.wait()
        kill_group(self.pid)
        await reap_group(self.pid)
        return code


class LocalLauncher:
    """See `elasticdl.places.base.Launcher` for the contract."""

    def __init__(self, command: WorkerCommand, slots: Slots, report: Report, server: ForkServer | None = None) -> None:
        """Without a server to fork from, workers are started plainly."""
        self._command = command
        self._slots = slots
        self._report = report
        self._server = server
        self._told: set[str] = set()  # why workers were started plainly
        self._known: set[int] = set()
        self._pending: dict[int, str] = {}  # by the reason last reported
        self._dumps: dict[int, Path] = {}  # of those that run
        self._running: dict[int, PlainWorker | ForkedWorker] = {}
        self._starting: dict[int, asyncio.Event] = {}  # which says that it was killed meanwhile
        self._watchers: set[asyncio.Task[Any]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._memory_kills = MemoryKills()
        self._closed = False

    async def find(self) -> Sequence[FoundWorker]:
        """None: workers of this machine die with their master."""
        return ()

    async def launch(self, worker_id: int, away_from: Sequence[str] = ()) -> None:
        if worker_id in self._known:
            raise ValueError(f"worker {worker_id} was launched before")
        self._known.add(worker_id)
        self._pending[worker_id] = ""
        self._place(worker_id)

    def terminate(self, worker_id: int) -> None:
        if process := self._running.get(worker_id):
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        else:
            self.kill(worker_id)

    def kill(self, worker_id: int) -> None:
        if self._pending.pop(worker_id, None) is not None:
            self._report(WorkerExited(worker_id, ExitCause.KILLED, -signal.SIGKILL, "it had no place yet"))
        elif process := self._running.get(worker_id):
            kill_group(process.pid)
        elif killed := self._starting.get(worker_id):
            killed.set()

    def read_stacks(self, worker_id: int) -> None:
        if worker_id in self._running and not self._closed:
            self._track(self._read_stacks(worker_id))

    async def _read_stacks(self, worker_id: int) -> None:
        pid, dump, log = self._running[worker_id].pid, self._dumps[worker_id], self._command.log(worker_id)
        found = await asyncio.to_thread(look_at, worker_id, pid, dump, log)
        if worker_id in self._running:
            self._report(found)

    def read_log(self, worker_id: int) -> None:
        if worker_id in self._running and not self._closed:
            self._track(self._read_log(worker_id))

    async def _read_log(self, worker_id: int) -> None:
        text = await asyncio.to_thread(_last_of, self._command.log(worker_id))
        if worker_id in self._running:
            self._report(StacksFound(worker_id, _end_of(text)))

    async def detach(self) -> None:
        await self.close()

    async def close(self) -> None:
        self._closed = True
        if self._retry:
            self._retry.cancel()
        for worker_id in [*self._pending, *self._running, *self._starting]:
            self.kill(worker_id)
        if self._server is not None:
            await self._server.close()
        while self._watchers:
            _, hanging = await asyncio.wait(self._watchers, timeout=CLOSE_SECONDS)
            if hanging:
                _log.error("workers %s can't be killed: leaving them behind", sorted(self._running))
                return

    def _place(self, worker_id: int) -> None:
        """Begin to start a pending worker if there is a slot for it."""
        slot = self._slots.acquire()
        if isinstance(slot, str):
            if self._pending[worker_id] != slot:
                self._pending[worker_id] = slot
                self._report(WorkerPending(worker_id, slot))
            if self._retry is None:
                self._retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._place_pending)
            return
        del self._pending[worker_id]
        self._starting[worker_id] = asyncio.Event()
        self._track(self._run(worker_id, slot))

    def _track(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """`close` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)
        return task

    def _place_pending(self) -> None:
        self._retry = None
        for worker_id in [] if self._closed else list(self._pending):
            self._place(worker_id)

    async def _run(self, worker_id: int, slot: Slot) -> None:
        """Start a worker, and report what becomes of it."""
        folder = None
        try:
            # Not below the job's folder: paths of Unix sockets, which multiprocessing makes in it, have to be short.
            folder = _temporary_folder(f"{worker_id}-")
            self._dumps[worker_id] = _dump_in(folder)
            spawning = self._track(self._spawn(worker_id, slot, folder))
            if not await self._started(worker_id, spawning):
                self._report(_killed_at_start(worker_id))
                await self._end_unwanted(spawning, slot, folder)
                return
            exited = await self._watch(worker_id, await spawning)
        except _Unwanted:
            exited = _killed_at_start(worker_id)
        except OSError as error:
            exited = WorkerExited(worker_id, ExitCause.CRASHED, 1, f"can't start it: {_what_failed(error)}")
        finally:
            self._starting.pop(worker_id, None)
            self._dumps.pop(worker_id, None)
        await self._free(slot, folder)
        self._report(exited)
        self._place_pending()

    async def _started(self, worker_id: int, spawning: asyncio.Task[PlainWorker | ForkedWorker]) -> bool:
        """False: the worker was killed while it is being started, which may take long."""
        killed = asyncio.get_running_loop().create_task(self._starting[worker_id].wait())
        await asyncio.wait({spawning, killed}, return_when=asyncio.FIRST_COMPLETED)
        killed.cancel()
        return spawning.done()

    async def _end_unwanted(self, spawning: asyncio.Task[PlainWorker | ForkedWorker], slot: Slot, folder: str) -> None:
        """What is being started can't be called back: it is killed as soon as it is there."""
        with contextlib.suppress(_Unwanted, OSError):
            process = await spawning
            kill_group(process.pid)
            await process.wait()
        await self._free(slot, folder)
        self._place_pending()

    async def _free(self, slot: Slot, folder: str | None) -> None:
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        self._slots.release(slot)

    async def _spawn(self, worker_id: int, slot: Slot, folder: str) -> PlainWorker | ForkedWorker:
        environment = {**self._command.environment(worker_id, slot), "TMPDIR": folder, STACKS: str(_dump_in(folder))}
        with (
            self._command.log(worker_id).open("ab") as log,
            (self._command.out or self._command.log)(worker_id).open("ab") as out,
        ):
            if self._server is not None:
                try:
                    return await self._server.fork(environment, out.fileno(), log.fileno())
                except CannotFork as reason:
                    if not self._is_wanted(worker_id):
                        raise _Unwanted from None
                    self._tell(str(reason))
            process = await asyncio.create_subprocess_exec(
                *tethered([*self._command.argv]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
            return PlainWorker(process)

    def _is_wanted(self, worker_id: int) -> bool:
        killed = self._starting.get(worker_id)
        return not self._closed and killed is not None and not killed.is_set()

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            _log.warning("a worker is started plainly, which takes longer: %s", reason)

    async def _watch(self, worker_id: int, process: PlainWorker | ForkedWorker) -> WorkerExited:
        self._running[worker_id] = process
        self._report(WorkerPlaced(worker_id, HOST, process.pid))
        if not self._is_wanted(worker_id):
            kill_group(process.pid)
        del self._starting[worker_id]
        code = await process.wait()
        del self._running[worker_id]
        log = self._command.log(worker_id)
        text = _last_of(log)
        output = _end_of(text)
        cause, detail = self._memory_kills.explain(code, *judge_exit(code, text if code in (1, USAGE) else output))
        if cause is ExitCause.CRASHED:
            detail += f"; its log: {log}"
        return WorkerExited(worker_id, cause, code, detail, output)


def _dump_in(folder: str) -> Path:
    return Path(folder) / "elasticdl-stacks"


def _temporary_folder(prefix: str) -> str:
    try:
        return tempfile.mkdtemp(prefix=prefix)
    except FileNotFoundError:  # who tidies up /tmp takes the folder of a job that runs for weeks
        os.makedirs(tempfile.gettempdir(), mode=0o700)
        return tempfile.mkdtemp(prefix=prefix)


def _what_failed(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


def _killed_at_start(worker_id: int) -> WorkerExited:
    return WorkerExited(worker_id, ExitCause.KILLED, -signal.SIGKILL, "it was not started yet")


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
