"""The launcher's side of a template (`elasticdl.common.template`): starts it, and asks it for workers."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from elasticdl.common.credentials import SHARED_GPU, STACKS, WORKER_ID
from elasticdl.common.front_ends import python_path
from elasticdl.common.process_group import ProcessGroup, tethered
from elasticdl.common.template import GO, MESSAGE_BYTES, TEMPLATE, Reply, Request

# In these a worker's environment may differ from the template's: nothing reads them while it is imported.
OF_A_WORKER = frozenset({WORKER_ID, SHARED_GPU, "CUDA_VISIBLE_DEVICES", "TMPDIR", STACKS})
IMPORT_SECONDS = 120.0
FORK_SECONDS = 30.0
END_SECONDS = 5.0  # for what is killed
_PR_SET_CHILD_SUBREAPER = 36


class CannotFork(Exception):
    """The worker has to be started without the fork server; the text says why."""


class ForkServer:
    """One template, started anew when it has ended, or when workers are given another environment; `CannotFork` for good once
    one says that forks are not safe, or ends while it imports."""

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], modules: Sequence[str], log: Path | int
    ) -> None:
        """``environment``: of any worker. ``log``: a file, or its descriptor; takes what is printed while modules are imported."""
        self._argv = argv
        self._environment = _of_any_worker(environment)
        self._modules = modules
        self._log = log
        self._process: ProcessGroup | None = None
        self._channel: socket.socket | None = None
        self._greeted = False
        self._refusal = ""
        self._turn = asyncio.Lock()

    def start(self) -> None:
        """Begin to import."""
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
                env={**self._hooked, TEMPLATE: arguments},
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        self._process, self._channel, self._greeted = ProcessGroup(process.pid, process.wait), ours, False

    @property
    def _hooked(self) -> dict[str, str]:
        """The template's environment."""
        return {**self._environment, **python_path(self._environment)}

    async def fork(
        self, environment: Mapping[str, str], out: int, log: int, is_wanted: Callable[[], bool]
    ) -> ProcessGroup:
        """A new worker, whose stdout and stderr are these descriptors.

        ``is_wanted``: asked before anything of its program is run; if not, the worker ends without that.

        Raises:
            CannotFork: start it without the fork server.
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
                        self.start()
                raise CannotFork(reason) from None

    async def close(self) -> None:
        """Whoever waits for a worker has `CannotFork`."""
        self._refusal = "the launcher is closed"
        if self._process is not None:
            self._process.kill()
        async with self._turn:
            await self._end()

    async def _ask(
        self, environment: Mapping[str, str], out: int, log: int, is_wanted: Callable[[], bool]
    ) -> ProcessGroup:
        common = _of_any_worker(environment)
        if common != self._environment:  # the job was scaled: OMP_NUM_THREADS is read during imports
            await self._end()
            self._environment = common
        if self._channel is None:
            self.start()
        if not self._greeted:
            problem = (await self._reply(IMPORT_SECONDS)).problem
            self._greeted = True
            if problem:
                self._refusal = problem
                await self._end()
                raise CannotFork(problem)
        assert self._channel is not None
        inherited = self._hooked
        changed = {name: value for name, value in environment.items() if inherited.get(name) != value}
        request = Request(os.getpid(), changed, [name for name in inherited if name not in environment])
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
        channel, process, self._channel, self._process = self._channel, self._process, None, None
        if channel is not None:
            channel.close()
        if process is None:
            return
        process.kill()
        if await process.has_ended(END_SECONDS):  # one that the kernel holds is left: nobody has to wait for that
            await process.wait()


def _of_any_worker(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in OF_A_WORKER}


def _become_subreaper() -> None:
    """Children that lose their parent become this process's."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
