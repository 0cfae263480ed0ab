"""How workers' processes are started: forked from a template (`elasticdl.common.template`) where that is possible."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from elasticdl.common.credentials import SHARED_GPU, STACKS, WORKER_ID
from elasticdl.common.process_group import ProcessGroup, tethered
from elasticdl.common.template import GO, MESSAGE_BYTES, TEMPLATE, Reply, Request

# In these a worker's environment may differ from the template's: nothing reads them while it is imported.
OF_A_WORKER = frozenset({WORKER_ID, SHARED_GPU, "CUDA_VISIBLE_DEVICES", "TMPDIR", STACKS})
IMPORT_SECONDS = 120.0
FORK_SECONDS = 30.0
END_SECONDS = 5.0  # for what is killed
_PR_SET_CHILD_SUBREAPER = 36
_log = logging.getLogger(__name__)


class CannotFork(Exception):
    """The worker has to be started without the fork server; the text says why."""


class Spawner:
    """Starts processes of one command line, each the leader of a session; they die with this process.

    They are forked from a template, which is started anew when it has ended, or when workers are given another environment. Each imports
    for itself where there is nothing to import beforehand, once a template says that forks are not safe, and if one ends while it imports.
    """

    def __init__(
        self,
        argv: Sequence[str],
        modules: Sequence[str] = (),
        reason: str = "",
        environment: Mapping[str, str] = MappingProxyType({}),
        log: Path | int = subprocess.DEVNULL,
    ) -> None:
        """The first three are what `elasticdl.places.preload.how_to_start` says.

        Args:
            environment: Of any worker (`elasticdl.common.front_ends.environment_of_workers`).
            log: A file, or its descriptor; takes what is printed while modules are imported.
        """
        self._argv = argv
        self._modules = modules
        self._environment = _of_any_worker(environment)
        self._log = log
        self._template: ProcessGroup | None = None
        self._channel: socket.socket | None = None
        self._greeted = False
        self._refusal = reason  # why no worker is forked any more
        self._told = set[str]()  # why workers were not forked
        self._turn = asyncio.Lock()
        try:
            if modules:
                self._import()
        except OSError as error:
            self._refusal = error.strerror or str(error)
        if self._refusal:
            self._warn(self._refusal)

    async def spawn(
        self, environment: Mapping[str, str], out: int, log: int, is_wanted: Callable[[], bool]
    ) -> ProcessGroup | None:
        """A process whose stdout and stderr are these descriptors.

        ``is_wanted``: asked before anything of its program is run. Returns None if it was not wanted any more before there was a
        process.

        Raises:
            OSError: it can't be started.
        """
        if self._modules:
            try:
                return await self._fork(environment, out, log, is_wanted)
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

    def _warn(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            _log.warning("workers are started without the fork server (slower): %s", reason)

    async def close(self) -> None:
        """Whoever waits for a worker has `CannotFork`."""
        self._refusal = "the launcher is closed"
        if self._template is not None:
            self._template.kill()
        async with self._turn:
            await self._end()

    def _import(self) -> None:
        """Start the template."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        _become_subreaper()
        arguments = json.dumps([theirs.fileno(), list(self._modules)])
        with theirs, open(self._log, "ab", closefd=isinstance(self._log, Path)) as log:
            process = subprocess.Popen(
                tethered([*self._argv]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._environment, TEMPLATE: arguments},
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        self._template, self._channel, self._greeted = ProcessGroup(process.pid, process.wait), ours, False

    async def _fork(
        self, environment: Mapping[str, str], out: int, log: int, is_wanted: Callable[[], bool]
    ) -> ProcessGroup:
        """
        Raises:
            CannotFork: start it without the template.
        """
        async with self._turn:
            if self._refusal:
                raise CannotFork(self._refusal)
            try:
                return await self._ask(environment, out, log, is_wanted)
            except (OSError, TimeoutError) as error:
                what = "took too long" if isinstance(error, TimeoutError) else f"is gone ({error.strerror or error})"
                reason = f"the process to fork from {what}"
                await self._end()
                if not self._greeted:  # another would do no better
                    self._refusal = self._refusal or reason
                elif not self._refusal:  # the next worker need not wait for all of its imports
                    with contextlib.suppress(OSError):
                        self._import()
                raise CannotFork(reason) from None

    async def _ask(
        self, environment: Mapping[str, str], out: int, log: int, is_wanted: Callable[[], bool]
    ) -> ProcessGroup:
        common = _of_any_worker(environment)
        if common != self._environment:  # the job was scaled: OMP_NUM_THREADS is read during imports
            await self._end()
            self._environment = common
        if self._channel is None:
            self._import()
        if not self._greeted:
            problem = (await self._reply(IMPORT_SECONDS)).problem
            self._greeted = True
            if problem:
                self._refusal = problem
                await self._end()
                raise CannotFork(problem)
        assert self._channel is not None
        own = {name: value for name, value in environment.items() if name in OF_A_WORKER}
        request = Request(os.getpid(), own)
        gate, opener = os.pipe()
        try:
            socket.send_fds(self._channel, [request.encode()], [out, log, gate])
            reply = await self._reply(FORK_SECONDS)
            if reply.problem:
                raise CannotFork(reply.problem)
            if is_wanted():
                os.write(opener, GO)
        finally:
            os.close(gate)
            os.close(opener)
        return ProcessGroup(reply.pid)

    async def _reply(self, seconds: float) -> Reply:
        assert self._channel is not None
        message = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self._channel, MESSAGE_BYTES), seconds)
        if not message:
            raise ConnectionResetError("it ended")
        return Reply(*json.loads(message))

    async def _end(self) -> None:
        channel, template, self._channel, self._template = self._channel, self._template, None, None
        if channel is not None:
            channel.close()
        if template is None:
            return
        template.kill()
        if await template.has_ended(END_SECONDS):  # one that the kernel holds is left: nobody has to wait for that
            await template.wait()


def _of_any_worker(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in OF_A_WORKER}


def _become_subreaper() -> None:
    """Children that lose their parent become this process's."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
