"""Workers as processes of this machine.

Each is the leader of a session of its own, so that a signal to the terminal does not reach it and its children can be
ended with it; each dies with the master. What it prints goes to its log, or what it prints on stdout to a file beside. Its temporary
files are in a folder of its own, which goes with it: a worker that is killed cannot clean up after itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from elasticdl.common.environment import STACKS
from elasticdl.master.state.events import ExitCause, FoundWorker, StacksFound, WorkerExited, WorkerPending, WorkerPlaced
from elasticdl.places.base import Report
from elasticdl.places.devices import Slot, Slots
from elasticdl.places.exits import end_of, judge_end
from elasticdl.places.fork_server import ForkServer, kill_group
from elasticdl.places.hung_process import look_at
from elasticdl.places.worker_output import last_of
from elasticdl.places.worker_process import Spawner, Unwanted, WorkerProcess, dump_in, temporary_folder, what_failed

HOST = "127.0.0.1"
# Another job may give a GPU back at any time, and does not tell us.
RETRY_SECONDS = 1.0
# A process that is killed goes at once, unless the kernel holds it.
CLOSE_SECONDS = 10.0
_log = logging.getLogger(__name__)


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """How to start a worker: its command line, its environment, and the file that takes what it prints. ``out``: that takes what
    it prints on stdout, if that is another."""

    argv: Sequence[str]
    environment: Callable[[int, Slot], dict[str, str]]
    log: Callable[[int], Path]
    out: Callable[[int], Path] | None = None


class LocalLauncher:
    """See `elasticdl.places.base.Launcher` for the contract."""

    def __init__(self, command: WorkerCommand, slots: Slots, report: Report, server: ForkServer | None = None) -> None:
        """Without a server to fork from, workers are started plainly."""
        self._command = command
        self._slots = slots
        self._report = report
        self._spawner = Spawner(command.argv, server)
        self._known: set[int] = set()
        self._pending: dict[int, str] = {}  # by the reason last reported
        self._dumps: dict[int, Path] = {}  # of those that run
        self._running: dict[int, WorkerProcess] = {}
        self._starting: dict[int, asyncio.Event] = {}  # which says that it was killed meanwhile
        self._watchers: set[asyncio.Task[Any]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False

    async def find(self) -> Sequence[FoundWorker]:
        """None: workers of this machine die with their master."""
        return ()

    async def launch(self, worker_id: int, away_from: str = "") -> None:
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
        text = await asyncio.to_thread(last_of, self._command.log(worker_id))
        if worker_id in self._running:
            self._report(StacksFound(worker_id, end_of(text)))

    async def detach(self) -> None:
        await self.close()

    async def close(self) -> None:
        self._closed = True
        if self._retry:
            self._retry.cancel()
        for worker_id in [*self._pending, *self._running, *self._starting]:
            self.kill(worker_id)
        await self._spawner.close()
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
            folder = temporary_folder(f"{worker_id}-")
            self._dumps[worker_id] = dump_in(folder)
            spawning = self._track(self._spawn(worker_id, slot, folder))
            if not await self._started(worker_id, spawning):
                self._report(_killed_at_start(worker_id))
                await self._end_unwanted(spawning, slot, folder)
                return
            exited = await self._watch(worker_id, await spawning)
        except Unwanted:
            exited = _killed_at_start(worker_id)
        except OSError as error:
            exited = WorkerExited(worker_id, ExitCause.CRASHED, 1, f"can't start it: {what_failed(error)}")
        finally:
            self._starting.pop(worker_id, None)
            self._dumps.pop(worker_id, None)
        await self._free(slot, folder)
        self._report(exited)
        self._place_pending()

    async def _started(self, worker_id: int, spawning: asyncio.Task[WorkerProcess]) -> bool:
        """False: the worker was killed while it is being started, which may take long."""
        killed = asyncio.get_running_loop().create_task(self._starting[worker_id].wait())
        await asyncio.wait({spawning, killed}, return_when=asyncio.FIRST_COMPLETED)
        killed.cancel()
        return spawning.done()

    async def _end_unwanted(self, spawning: asyncio.Task[WorkerProcess], slot: Slot, folder: str) -> None:
        """What is being started can't be called back: it is killed as soon as it is there."""
        with contextlib.suppress(Unwanted, OSError):
            process = await spawning
            kill_group(process.pid)
            await process.wait()
        await self._free(slot, folder)
        self._place_pending()

    async def _free(self, slot: Slot, folder: str | None) -> None:
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        self._slots.release(slot)

    async def _spawn(self, worker_id: int, slot: Slot, folder: str) -> WorkerProcess:
        environment = {**self._command.environment(worker_id, slot), "TMPDIR": folder, STACKS: str(dump_in(folder))}
        is_wanted = partial(self._is_wanted, worker_id)
        with (
            self._command.log(worker_id).open("ab") as log,
            (self._command.out or self._command.log)(worker_id).open("ab") as out,
        ):
            return await self._spawner.spawn(environment, out.fileno(), log.fileno(), is_wanted)

    def _is_wanted(self, worker_id: int) -> bool:
        killed = self._starting.get(worker_id)
        return not self._closed and killed is not None and not killed.is_set()

    async def _watch(self, worker_id: int, process: WorkerProcess) -> WorkerExited:
        self._running[worker_id] = process
        self._report(WorkerPlaced(worker_id, HOST, process.pid))
        if not self._is_wanted(worker_id):
            kill_group(process.pid)
        del self._starting[worker_id]
        code = await process.wait()
        del self._running[worker_id]
        log = self._command.log(worker_id)
        cause, detail, output = judge_end(code, last_of(log))
        if cause is ExitCause.CRASHED:
            detail += f"; its log: {log}"
        return WorkerExited(worker_id, cause, code, detail, output)


def _killed_at_start(worker_id: int) -> WorkerExited:
    return WorkerExited(worker_id, ExitCause.KILLED, -signal.SIGKILL, "it was not started yet")
