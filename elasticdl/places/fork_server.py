"""The launcher's side of a template (`elasticdl.common.template`): starts it, and asks it for workers."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticdl.common.credentials import SHARED_GPU, STACKS, WORKER_ID
from elasticdl.common.front_ends import python_path
from elasticdl.common.process_group import ProcessGroup, tethered
from elasticdl.common.template import GO, MESSAGE_BYTES, TEMPLATE, Reply, Request

# A command line that runs Python, taken apart.


_FLAGS = frozenset("bBdOPqRsuv")  # of the interpreter, without an argument, that mean nothing for what is run
_WITH_ARGUMENT = frozenset("WX")


class UnclearCommand(Exception):
    """The command runs another Python, or has options that do more than name the program."""


class NoSuchProgram(UnclearCommand):
    """The script does not exist."""


@dataclass(frozen=True, slots=True)
class Program:
    """``kind``: how Python is given the program: "file", "module" (-m) or "code" (-c)."""

    kind: str
    target: str


def program_of(argv: Sequence[str]) -> Program:
    """The program that a command runs.

    Raises:
        UnclearCommand: that can't be told.
    """
    if not _is_this_python(argv[0]):
        raise UnclearCommand(f"{argv[0]} is not {sys.executable}")
    words = iter(argv[1:])
    for word in words:
        if word in ("-", "--") or not word.startswith("-"):
            break
        if word.startswith("--"):
            raise UnclearCommand(f"option {word} of Python")
        for place, letter in enumerate(word[1:], 2):
            if letter in "mc":
                return Program("module" if letter == "m" else "code", word[place:] or next(words, ""))
            if letter in _WITH_ARGUMENT:
                if not word[place:]:
                    next(words, "")
                break
            if letter not in _FLAGS:
                raise UnclearCommand(f"option -{letter} of Python")
    else:
        raise UnclearCommand("Python is given no program")
    if word != "-" and not Path(word).exists():
        raise NoSuchProgram(f"there is no {Path(word).absolute()}")
    if not Path(word).is_file():
        raise UnclearCommand(f"{word} is no file")
    return Program("file", word)


def _is_this_python(name: str) -> bool:
    """Whether it is this file in this folder: the Python of an environment is a link to another Python."""
    path, other = os.path.abspath(shutil.which(name) or name), os.path.abspath(sys.executable)
    return os.path.dirname(path) == os.path.dirname(other) and os.path.realpath(path) == os.path.realpath(other)


# In these a worker's environment may differ from the template's: nothing reads them while it is imported.
OF_A_WORKER = frozenset({WORKER_ID, SHARED_GPU, "CUDA_VISIBLE_DEVICES", "TMPDIR", STACKS})
IMPORT_SECONDS = 120.0
FORK_SECONDS = 30.0
END_SECONDS = 5.0  # for what is killed
ENDING_SECONDS = 0.2  # between the end of a process's line to here and its own
MOST_KILLED = 3  # times that one is started which somebody kills while it imports
_PR_SET_CHILD_SUBREAPER = 36


class CannotFork(Exception):
    """The worker has to be started without the fork server; the text says why."""


class ForkServer:
    """One template, started anew when it was killed, or when workers are given another environment; `CannotFork` for good once
    one says that forks are not safe."""

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
                was_killed = await self._end() < 0 and isinstance(error, ConnectionResetError)
                if not self._greeted:
                    self._killed += was_killed
                    if not was_killed or self._killed == MOST_KILLED:  # another would do no better
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

    async def _end(self) -> int:
        """Returns the exit code that it had before, or minus the number of a signal."""
        channel, process, self._channel, self._process = self._channel, self._process, None, None
        if channel is not None:
            channel.close()
        if process is None:
            return 0
        await process.has_ended(ENDING_SECONDS)
        process.kill()
        # One that the kernel holds is left: nobody has to wait for that.
        return await process.wait() if await process.has_ended(END_SECONDS) else 0


def _of_any_worker(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in OF_A_WORKER}


def _become_subreaper() -> None:
    """Children that lose their parent become this process's."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
