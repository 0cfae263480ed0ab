"""A worker's process from its start, forked where that is possible, to its end: for who starts workers on this machine, and for
the agent of a place.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import psutil

from elasticdl.common.credentials import PROCESS, SHARED_GPU, STACKS, TOKEN, WORKER_ID
from elasticdl.common.process_group import ProcessGroup, tethered
from elasticdl.common.reason import last_exception, last_line, last_words
from elasticdl.common.template import GO, MESSAGE_BYTES, TEMPLATE, CannotFork, Reply, Request
from elasticdl.job.jobdir import tail
from elasticdl.job.journal import without_marks
from elasticdl.master.core.events import ExitCause, StacksFound, WorkerExited
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.triton_first import why_it_crashed

_log = logging.getLogger(__name__)

# What the end of a worker's process says: by its exit code, and by the last that it has printed.


OUTPUT_CHARACTERS = 4096
OUTPUT_LINES = 40
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SHELL_SIGNAL_BASE = 128
USAGE = 2  # a program ends with that which refuses its arguments, or what it was to do, and has said so


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


def judge_process(ended: pb.Ended) -> WorkerExited:
    if ended.problem:
        return WorkerExited(ended.worker_id, ExitCause.CRASHED, ended.code, f"can't start it: {ended.problem}")
    text = without_marks(ended.output)
    output = end_of(text)
    cause, detail = judge_exit(ended.code, text if ended.code in (1, USAGE) else output)
    if ended.out_of_memory and ended.code in (-signal.SIGKILL, _SHELL_SIGNAL_BASE + signal.SIGKILL):
        cause, detail = ExitCause.OUT_OF_MEMORY, "the kernel has killed it, as memory was short"
    return WorkerExited(ended.worker_id, cause, ended.code, detail, output)


def end_of(text: str) -> str:
    """The last lines, or the first that tell of the crash with which a log ends."""
    if stacks := last_words(text):
        return "\n".join(stacks[:OUTPUT_LINES])
    return "\n".join(text[-OUTPUT_CHARACTERS:].splitlines()[-OUTPUT_LINES:])


# Whether the kernel ended a worker because memory was short: its exit code does not say so.


_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class MemoryKills:
    """Those in this process's control group: a container's, a batch job's or a session's. Its workers are in it."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._seen = self._count()

    def happened(self) -> bool:
        """Since that was asked last, which it is at each end: a kill is that of the next end that is seen."""
        before, self._seen = self._seen, self._count()
        return self._seen > before

    def _count(self) -> int:
        """0 where the kernel does not say."""
        for file in self._files():
            try:
                found = _KILLS.search(file.read_text())
            except OSError:
                continue
            return int(found[1]) if found else 0
        return 0

    def _files(self) -> Iterator[Path]:
        try:
            groups = (self._root / "proc/self/cgroup").read_text().splitlines()
        except OSError:
            return
        mounted = self._root / "sys/fs/cgroup"
        for line in groups:
            _, controllers, group = line.split(":", 2)
            # In a container the group's own folder is what is mounted, under whatever path the host has it. The topmost group of a
            # machine has no such file.
            if not controllers:  # of the second version
                yield from (mounted / group.strip("/") / "memory.events", mounted / "memory.events")
            elif "memory" in controllers.split(","):
                folder = mounted / "memory"
                yield from (folder / group.strip("/") / "memory.oom_control", folder / "memory.oom_control")


# Where a worker's output goes: into files, or through to this process's own stdout and stderr; and what it has printed last.


READ_BYTES = 1 << 16
# So much of what a worker prints may be about its end: a dump of its stacks, and lines after it.
LAST_BYTES = 80 << 10
# For what is still in the pipes of a worker that has ended; a process that has left its group may keep them open.
DRAIN_SECONDS = 1.0


class InFile:
    """Of one worker."""

    def __init__(self, log: Path, out: Path | None = None) -> None:
        """``out``: takes what it prints on stdout, if that is another."""
        self._log, self._out = log, out or log

    @contextmanager
    def printing(self) -> Iterator[tuple[int, int]]:
        """Entered once, while the worker is given the descriptors for its stdout and stderr."""
        with self._log.open("ab") as log, self._out.open("ab") as out:
            yield out.fileno(), log.fileno()

    def all(self) -> str:
        """As much of what it has printed as may be about its end; empty if it can't be read."""
        return tail(self._log, LAST_BYTES)


class PassedOn:
    """As `InFile`, to this process's own stdout and stderr: by a thread for each of the two, as these may be slow."""

    def __init__(self) -> None:
        self._last = bytearray()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    @contextmanager
    def printing(self) -> Iterator[tuple[int, int]]:
        theirs = []
        for target in (1, 2):
            ours, end = os.pipe()
            theirs.append(end)
            thread = threading.Thread(target=self._pass_on, args=(ours, target), daemon=True)
            thread.start()
            self._threads.append(thread)
        try:
            yield theirs[0], theirs[1]
        finally:
            for end in theirs:
                os.close(end)

    def all(self) -> str:
        """Of a worker that has ended: waits a short time for what is under way."""
        for thread in self._threads:
            thread.join(DRAIN_SECONDS)
        with self._lock:
            return self._last.decode(errors="replace")

    def _pass_on(self, ours: int, target: int) -> None:
        with open(ours, "rb", buffering=0) as pipe:
            while chunk := pipe.read(READ_BYTES):
                with self._lock:
                    self._last += chunk
                    del self._last[:-LAST_BYTES]
                with contextlib.suppress(OSError):  # nobody reads it any more
                    _write(target, chunk)


Output: TypeAlias = InFile | PassedOn


def _write(target: int, chunk: bytes) -> None:
    while chunk:
        chunk = chunk[os.write(target, chunk) :]


# Where a process of this machine stands that can't tell it by itself: what it has left, and the state the kernel has it in.


MOST_BYTES = 1 << 18
# In these a process can't run, whatever Python does in it.
_HELD = {
    psutil.STATUS_STOPPED: "does not run: it is stopped (state T)",
    psutil.STATUS_TRACING_STOP: "does not run: a debugger holds it (state t)",
    psutil.STATUS_DISK_SLEEP: "does not run: the kernel waits for a disk or a network file system (state D)",
    psutil.STATUS_ZOMBIE: "does not run: it has ended (state Z)",
}
RUNS = "its process runs"


def look_at(worker_id: int, pid: int, dump: Path, log: Path) -> StacksFound:
    """``pid`` leads the worker's processes. ``dump``: those of a worker of several processes have one each, whose names begin so.
    ``log``: takes what is found, too."""
    text = "\n".join(filter(None, map(_read, sorted(dump.parent.glob(f"{dump.name}*")))))
    pids = _with_children(pid)
    # The worker has the file open as long as it has a session: what it has started may have ended, or be stopped, without harm.
    opened = {file: each for each in reversed(pids) if (file := _opened(each, os.path.realpath(dump)))}
    workers = list(opened.values())
    # Where there are several, the process that leads them speaks for them.
    state = _state([pid, *workers] if len(workers) > 1 else workers or pids)
    if not text and not state:
        state = RUNS
    if text:
        with contextlib.suppress(OSError), log.open("a") as lines:  # on a full disk it is told all the same
            lines.write(f"elasticdl: worker {worker_id} does not answer; its stacks:\n{text}\n")
    return StacksFound(worker_id, text, state, has_session=state == RUNS and bool(workers))


def _read(dump: Path) -> str:
    try:
        with dump.open("rb") as file:
            return file.read(MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _with_children(pid: int) -> list[int]:
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return [pid]


def _opened(pid: int, path: str) -> str:
    """The file that it has open whose path begins so; empty if there is none."""
    # By the names of the links: to look at the files themselves may hang, as at those of a server that is gone.
    with contextlib.suppress(OSError):
        links = map(os.readlink, Path(f"/proc/{pid}/fd").iterdir())
        return next((file for file in links if file.startswith(path)), "")
    return ""


def _state(pids: Sequence[int]) -> str:
    """Why the first of these can't run that can't; empty if all can."""
    for pid in pids:
        try:
            status = psutil.Process(pid).status()
        except psutil.Error:
            continue
        if words := _HELD.get(status):
            return words
    return ""


# How workers' processes are started: forked from a template (`elasticdl.common.template`) where that is possible.


# In these a worker's environment may differ from the template's: nothing reads them while it is imported.
OF_A_WORKER = frozenset(
    {WORKER_ID, SHARED_GPU, "CUDA_VISIBLE_DEVICES", "TMPDIR", STACKS, PROCESS, TOKEN, "RANK", "LOCAL_RANK"}
)
IMPORT_SECONDS = 120.0
FORK_SECONDS = 30.0
END_SECONDS = 5.0  # for what is killed
_PR_SET_CHILD_SUBREAPER = 36


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
        return self._popen(environment, out, log)

    def _popen(self, environment: Mapping[str, str], out: int, log: int, passed: Sequence[int] = ()) -> ProcessGroup:
        process = subprocess.Popen(
            tethered([*self._argv]),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
            env=environment,
            start_new_session=True,
            pass_fds=passed,
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
            environment, printed = {**self._environment, TEMPLATE: arguments}, log.fileno()
            self._template = self._popen(environment, printed, printed, [theirs.fileno()])
        self._channel, self._greeted = ours, False

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


# One worker, from its start to its end.


LEFT_BEHIND_SECONDS = 5.0


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

    async def look(self, log: Path) -> StacksFound | None:
        """Where it stands; None if it does not run, or has ended meanwhile. ``log``: takes what is found, too."""
        if self.process is None:
            return None
        found = await asyncio.to_thread(look_at, self.worker_id, self.process.pid, self.dump, log)
        return None if self.process is None else found

    async def ended(
        self,
        spawner: Awaitable[Spawner],
        environment: Mapping[str, str],
        placed: Callable[[int], None],
        memory_kills: MemoryKills,
        *,
        with_sessions: bool = False,
    ) -> pb.Ended:
        """Start it; returns how it has ended, when nothing is left of it.

        Args:
            spawner: What starts it, once that is ready.
            placed: Is called with its process id once it runs.
            with_sessions: Kill also what it has started in sessions of their own.
        """
        ended = pb.Ended(worker_id=self.worker_id)
        try:
            ended.code = await self._to_its_end(spawner, environment, placed)
            if with_sessions:
                await asyncio.to_thread(_end_left_behind, str(self.dump))
            ended.output = await asyncio.to_thread(self.output.all) if self.was_started else ""
            ended.out_of_memory = self.was_started and memory_kills.happened()
        except OSError as error:
            reason = error.strerror or str(error)
            ended.code, ended.problem = 1, f"{error.filename}: {reason}" if error.filename else reason
        return ended

    async def _to_its_end(
        self, spawner: Awaitable[Spawner], environment: Mapping[str, str], placed: Callable[[int], None]
    ) -> int:
        """Its exit code, or minus a signal's number."""
        # Not below the job's folder: paths of Unix sockets, which multiprocessing makes in it, have to be short.
        folder = tempfile.mkdtemp(prefix=f"elasticdl-{self.worker_id}-")
        self.dump = Path(folder) / "elasticdl-stacks"
        own = {WORKER_ID: str(self.worker_id), "TMPDIR": folder, STACKS: str(self.dump)}
        spawning = asyncio.ensure_future(self._spawn(spawner, {**environment, **own}))
        try:
            await self._until_started(spawning)
            process = spawning.result() if spawning.done() else None
            if process is None:  # it will run nothing of its program: its place is free at once
                return -signal.SIGKILL
            if self._unwanted.is_set():
                process.kill()
            else:
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
            self.left = asyncio.ensure_future(_clean_up(spawning, folder))

    async def _spawn(self, spawner: Awaitable[Spawner], environment: Mapping[str, str]) -> ProcessGroup | None:
        started_by = await spawner
        with self.output.printing() as (out, log):
            return await started_by.spawn(environment, out, log, lambda: not self._unwanted.is_set())

    async def _until_started(self, spawning: asyncio.Future[ProcessGroup | None]) -> None:
        """Or until the worker is killed: to start it may take long."""
        killing = asyncio.ensure_future(self._unwanted.wait())
        awaited: set[asyncio.Future[Any]] = {spawning, killing}
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        killing.cancel()


async def _clean_up(spawning: asyncio.Future[ProcessGroup | None], folder: str) -> None:
    """What is being started can't be called back: it is killed as soon as it is there."""
    await asyncio.wait({spawning})
    process = None if spawning.cancelled() or spawning.exception() else spawning.result()
    if process is not None:
        process.kill()
        await process.wait()
    # It may have many files, and whoever trains on must not wait for that.
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _end_left_behind(dump: str) -> None:
    """Kill what a worker has started in sessions of their own, which do not end with its process group: all that were started with its
    file for stacks in their environment."""
    deadline = time.monotonic() + LEFT_BEHIND_SECONDS
    while time.monotonic() < deadline:  # they may start others meanwhile
        found = [each for each in psutil.process_iter() if _environment(each).get(STACKS, "").startswith(dump)]
        if not found:
            return
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=max(0.0, deadline - time.monotonic()))  # reaps the children among them


def _environment(process: psutil.Process) -> dict[str, str]:
    """As it was started; empty of one that has ended, or is another user's."""
    with contextlib.suppress(psutil.Error, OSError):
        return process.environ()
    return {}
