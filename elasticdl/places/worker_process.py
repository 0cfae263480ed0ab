"""How a worker's process is started, forked where that is possible, and what has to be there for it: for who starts workers on
this machine, and for the agent of a place."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from elasticdl.common.tether import tethered
from elasticdl.places.fork_server import CannotFork, ForkedWorker, ForkServer, kill_group, reap_group

_log = logging.getLogger(__name__)


class Unwanted(Exception):
    """A worker was killed before it was started."""


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


WorkerProcess: TypeAlias = PlainWorker | ForkedWorker


class Spawner:
    """Starts processes of one command line, each the leader of a session; they die with this process.

    Without a server to fork from, all are started plainly.
    """

    def __init__(self, argv: Sequence[str], server: ForkServer | None) -> None:
        self._argv = argv
        self._server = server
        self._told: set[str] = set()  # why workers were started plainly

    async def spawn(
        self, environment: Mapping[str, str], out: int, log: int, is_wanted: Callable[[], bool]
    ) -> WorkerProcess:
        """``out`` and ``log``: descriptors for its stdout and stderr.

        Raises:
            OSError: it can't be started.
            Unwanted: it could not be forked, and was not wanted any more.
        """
        if self._server is not None:
            try:
                return await self._server.fork(environment, out, log)
            except CannotFork as reason:
                if not is_wanted():
                    raise Unwanted from None
                self._tell(str(reason))
        process = await asyncio.create_subprocess_exec(
            *tethered([*self._argv]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
        return PlainWorker(process)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            _log.warning("a worker is started plainly, which takes longer: %s", reason)


def temporary_folder(prefix: str) -> str:
    """A worker's own, for its temporary files: one that is killed cannot clean up after itself.

    Not below the job's folder: paths of Unix sockets, which multiprocessing makes in it, have to be short.
    """
    try:
        return tempfile.mkdtemp(prefix=prefix)
    except FileNotFoundError:  # who tidies up /tmp takes the folder of a job that runs for weeks
        os.makedirs(tempfile.gettempdir(), mode=0o700)
        return tempfile.mkdtemp(prefix=prefix)


def dump_in(folder: str) -> Path:
    """The file in a worker's folder that takes its stacks."""
    return Path(folder) / "elasticdl-stacks"


def what_failed(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason
