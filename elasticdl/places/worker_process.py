"""A worker's process from its start, forked where that is possible, to its end: for who starts workers on this machine, and for
the agent of a place."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from elasticdl.common.environment import STACKS, WORKER_ID
from elasticdl.common.process_group import ProcessGroup
from elasticdl.common.tether import tethered
from elasticdl.places.fork_server import CannotFork, ForkServer
from elasticdl.places.worker_output import Output

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Spawner:
    """Starts processes of one command line, each the leader of a session; they die with this process."""

    def __init__(self, argv: Sequence[str], server: ForkServer | None = None) -> None:
        """Without a server to fork from, each worker imports for itself."""
        self._argv = argv
        self._server = server
        self._told: set[str] = set()  # why workers were not forked

    @classmethod
    def begin(
        cls, argv: Sequence[str], modules: Sequence[str], reason: str, environment: Mapping[str, str], log: Path | int
    ) -> Spawner:
        """One whose server begins to import; the first three are what `elasticdl.places.preload.how_to_start` says, the others
        as of a `ForkServer`."""
        server = ForkServer(argv, environment, modules, log) if modules else None
        try:
            if server:
                server.start()
        except OSError as error:
            server, reason = None, error.strerror or str(error)
        spawner = cls(argv, server)
        if reason:
            spawner._warn(reason)
        return spawner

    async def spawn(
        self, environment: Mapping[str, str], out: int, log: int, is_wanted: Callable[[], bool]
    ) -> ProcessGroup | None:
        """None if it was not wanted any more before there was a process.

        Raises:
            OSError: it can't be started.
        """
        if self._server is not None:
            try:
                return await self._server.fork(environment, out, log, is_wanted)
            except CannotFork as reason:
                if is_wanted():
                    self._warn(str(reason))
        if not is_wanted():
            return None
        process = subprocess.Popen(
            tethered([*self._argv]),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
        return ProcessGroup(process.pid, process.wait)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()

    def _warn(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            _log.warning("workers are started without the fork server (slower): %s", reason)


class WorkerRun:
    """One worker. Its temporary files are in a folder of its own, which goes with it: a worker that is killed cannot clean up."""

    def __init__(self, worker_id: int, output: Output) -> None:
        self.worker_id = worker_id
        self.output = output
        self.process: ProcessGroup | None = None  # while it runs
        self.was_started = False
        self.dump = Path()  # takes its stacks
        # The worker is over, and its process is still being started, or its files are deleted: whoever ends waits until that is done.
        self.left: asyncio.Task[None] | None = None
        self._unwanted = asyncio.Event()  # killed before it was started
        self._killing: asyncio.TimerHandle | None = None

    def end(self, grace: float | None) -> None:
        """None: SIGTERM and no more; else SIGKILL after so many seconds, 0 for at once."""
        if self.process is None:
            self._unwanted.set()
        elif grace == 0:
            self.process.kill()
        else:
            self.process.signal(signal.SIGTERM)
            if grace is not None and self._killing is None:
                self._killing = asyncio.get_running_loop().call_later(grace, self.process.kill)

    async def look(self, how: Callable[[WorkerRun, int], T]) -> T | None:
        """What that finds, in a thread, by the id of its process; None if there is none, or it has ended meanwhile."""
        if self.process is None:
            return None
        found = await asyncio.to_thread(how, self, self.process.pid)
        return None if self.process is None else found

    async def to_its_end(
        self, spawner: Callable[[], Awaitable[Spawner]], environment: Mapping[str, str], placed: Callable[[int], None]
    ) -> int:
        """Start it; returns its exit code, or minus a signal's number, when nothing is left of it.

        ``spawner``: what starts it, once that is ready. ``placed``: is called with its process id once it runs.

        Raises:
            OSError: it can't be started.
        """
        # Not below the job's folder: paths of Unix sockets, which multiprocessing makes in it, have to be short.
        folder = _temporary_folder(f"elasticdl-{self.worker_id}-")
        self.dump = Path(folder) / "elasticdl-stacks"
        own = {WORKER_ID: str(self.worker_id), "TMPDIR": folder, STACKS: str(self.dump)}
        spawning = asyncio.ensure_future(self._spawn(spawner, {**environment, **own}))
        await self._until_started(spawning)
        if not spawning.done():  # it will run nothing of its program: its place is free at once
            self.left = asyncio.ensure_future(self._end_unwanted(spawning, folder))
            return -signal.SIGKILL
        try:
            process = spawning.result()
            if process is None or self._unwanted.is_set():
                await _end(process)
                return -signal.SIGKILL
            self.process, self.was_started = process, True
            placed(process.pid)
            try:
                return await process.wait()
            except OSError:  # as when this process has no more file descriptors: it must not run on unwatched
                await asyncio.to_thread(process.end)
                raise
        finally:
            self.process = None
            if self._killing is not None:
                self._killing.cancel()
            # It may have many files, and whoever trains on must not wait for that.
            self.left = asyncio.ensure_future(_remove(folder))

    async def _spawn(
        self, get_spawner: Callable[[], Awaitable[Spawner]], environment: Mapping[str, str]
    ) -> ProcessGroup | None:
        spawner = await get_spawner()
        with self.output.printing() as (out, log):
            return await spawner.spawn(environment, out, log, lambda: not self._unwanted.is_set())

    async def _until_started(self, spawning: asyncio.Future[ProcessGroup | None]) -> None:
        """Or until the worker is killed: to start it may take long."""
        killing = asyncio.ensure_future(self._unwanted.wait())
        awaited: set[asyncio.Future[Any]] = {spawning, killing}
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        killing.cancel()

    async def _end_unwanted(self, spawning: asyncio.Future[ProcessGroup | None], folder: str) -> None:
        """What is being started can't be called back: it is killed as soon as it is there."""
        await asyncio.wait({spawning})
        if not spawning.cancelled() and not spawning.exception():
            await _end(spawning.result())
        await _remove(folder)


async def _end(process: ProcessGroup | None) -> None:
    if process is not None:
        process.kill()
        await process.wait()


async def _remove(folder: str) -> None:
    await asyncio.to_thread(partial(shutil.rmtree, folder, ignore_errors=True))


def _temporary_folder(prefix: str) -> str:
    try:
        return tempfile.mkdtemp(prefix=prefix)
    except FileNotFoundError:  # who tidies up /tmp takes the folder of a job that runs for weeks
        os.makedirs(tempfile.gettempdir(), mode=0o700)
        return tempfile.mkdtemp(prefix=prefix)


def what_failed(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason
