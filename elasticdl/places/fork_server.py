"""The launcher's side of a template (`elasticdl.common.template`): starts it, and asks it for workers."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticdl.common.environment import SHARED_GPU, STACKS, WORKER_ID
from elasticdl.common.startup import python_path
from elasticdl.common.template import GO, MESSAGE_BYTES, TEMPLATE, Reply, Request
from elasticdl.common.tether import tethered

# In these a worker's environment may differ from the template's: nothing reads them while it is imported.
OF_A_WORKER = frozenset({WORKER_ID, SHARED_GPU, "CUDA_VISIBLE_DEVICES", "TMPDIR", STACKS})
IMPORT_SECONDS = 120.0
FORK_SECONDS = 30.0
END_SECONDS = 5.0
REAP_SECONDS = 0.01
ENDING_SECONDS = 0.2  # between the end of a process's line to here and its own
MOST_KILLED = 3  # times that one is started which somebody kills while it imports
_PR_SET_CHILD_SUBREAPER = 36


class CannotFork(Exception):
    """The worker has to be started plainly; the text says why."""


@dataclass(frozen=True, slots=True)
class ForkedWorker:
    """A child of this process that it has not started itself, and the leader of a session."""

    pid: int

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    async def wait(self) -> int:
        """Until it has ended, and the children that it left behind; returns its exit code, or minus a signal's number."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        descriptor = os.pidfd_open(self.pid)
        try:
            loop.add_reader(descriptor, ended.set_result, None)
            await ended
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        kill_group(self.pid)  # while the number can't be another's
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        await reap_group(self.pid)
        return code


class ForkServer:
    """One template, started anew when it was killed; `CannotFork` for good once one says that forks are not safe."""

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], modules: Sequence[str], log: Path | int
    ) -> None:
        """``environment``: of any worker. ``log``: a file, or its descriptor; takes what is printed while modules are imported."""
        self._argv = argv
        self._environment = {name: value for name, value in environment.items() if name not in OF_A_WORKER}
        self._hooked = {**self._environment, **python_path(self._environment)}
        self._modules = modules
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._greeted = False
        self._killed = 0  # times, before it was ready
        self._refusal = ""
        self._turn = asyncio.Lock()

    def start(self) -> None:
        """Begin to import."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        _become_subreaper()
        arguments = json.dumps([theirs.fileno(), list(self._modules)])
        with theirs, open(self._log, "ab", closefd=isinstance(self._log, Path)) as log:
            self._process = subprocess.Popen(
                tethered([*self._argv]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._hooked, TEMPLATE: arguments},
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        self._channel, self._greeted = ours, False

    async def fork(self, environment: Mapping[str, str], out: int, log: int) -> ForkedWorker:
        """A new worker, whose stdout and stderr are these descriptors.

        Raises:
            CannotFork: start it plainly.
        """
        async with self._turn:
            if self._refusal:
                raise CannotFork(self._refusal)
            try:
                return await self._ask(environment, out, log)
            except (OSError, TimeoutError) as error:
                what = "took too long" if isinstance(error, TimeoutError) else f"is gone ({error.strerror or error})"
                reason = f"the process to fork from {what}"
                was_killed = await self._end() < 0 and isinstance(error, ConnectionResetError)
                if not self._greeted:
                    self._killed += was_killed
                    if not was_killed or self._killed == MOST_KILLED:  # another would do no better
                        self._refusal = self._refusal or reason
                raise CannotFork(reason) from None

    async def close(self) -> None:
        """Whoever waits for a worker has `CannotFork`."""
        self._refusal = "the launcher is closed"
        if self._process is not None:
            self._process.kill()
        async with self._turn:
            await self._end()

    async def _ask(self, environment: Mapping[str, str], out: int, log: int) -> ForkedWorker:
        request = self._request(environment)
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
        gate, opener = os.pipe()
        try:
            socket.send_fds(self._channel, [request.encode()], [out, log, gate])
            reply = await self._reply(FORK_SECONDS)
            if reply.problem:
                raise CannotFork(reply.problem)
            os.write(opener, GO)
        finally:
            os.close(gate)
            os.close(opener)
        return ForkedWorker(reply.pid)

    def _request(self, environment: Mapping[str, str]) -> Request:
        common = {name: value for name, value in environment.items() if name not in OF_A_WORKER}
        if common != self._environment:
            names = sorted({name for name, _ in common.items() ^ self._environment.items()})
            raise CannotFork(f"its environment is of its own in {', '.join(names)}")
        changed = {name: value for name, value in environment.items() if self._hooked.get(name) != value}
        return Request(os.getpid(), changed, [name for name in self._hooked if name not in environment])

    async def _reply(self, seconds: float) -> Reply:
        assert self._channel is not None
        message = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self._channel, MESSAGE_BYTES), seconds)
        if not message:
            raise ConnectionResetError("it ended")
        return Reply(*json.loads(message))

    async def _end(self) -> int:
        """Returns the exit code that it had before, or minus the number of a signal."""
        channel, process, self._channel, self._process = self._channel, self._process, None, None
        if channel is not None:
            channel.close()
        if process is None:
            return 0
        deadline = time.monotonic() + ENDING_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(REAP_SECONDS)
        kill_group(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        await reap_group(process.pid)
        return process.returncode or 0


def _become_subreaper() -> None:
    """Children that lose their parent become this process's."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_group(pid: int) -> None:
    """End a process and its children at once."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


async def reap_group(pid: int) -> None:
    """The children of a process that has ended, and which were killed, have become this process's."""
    deadline = time.monotonic() + END_SECONDS
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-pid, os.WNOHANG) == (0, 0):
                await asyncio.sleep(REAP_SECONDS)
