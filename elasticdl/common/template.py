"""A template of workers: a process that has imported what they need and waits; each worker is a fork of it.

The template is started with the worker's own command line. Python's hook at start-up (`sitecustomize`) calls `serve`,
which returns in workers only. So it is Python itself that then runs the command, and a worker differs from a process that
was started without it in nothing but what it has imported already.

A worker becomes a child of the launcher, which has to be a subreaper: the process between them ends at once. So workers
outlive the template, and the launcher reaps them as it reaps any child. Imports the standard library only.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.machinery
import json
import os
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticdl.common.process_group import die_with_parent

# For the template alone: the arguments of `serve`, as JSON.
TEMPLATE = "ELASTICDL_TEMPLATE"
MESSAGE_BYTES = 1 << 16
GO = b"1"
THREAD_ENDS_SECONDS = 1.0
ORPHAN_SECONDS = 0.0005
_GPU_DEVICES = "/dev/nvidia"
_STOPPED_BY_FORKS = ("jemalloc_bg_thd",)  # jemalloc, as in pyarrow, knows of forks


class CannotFork(Exception):
    """The worker has to be started without a template; the text says why."""


@dataclass(frozen=True, slots=True)
class Request:
    """Asks for one worker. With it come three file descriptors: its stdout, its stderr, and the gate.

    A worker that exists waits at its gate, a pipe, until the launcher writes `GO`; at its end instead, the worker ends.
    """

    launcher: int  # process id
    own: dict[str, str]  # environment variables that only this worker has so

    def encode(self) -> bytes:
        return json.dumps([self.launcher, self.own]).encode()


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a request. One comes unasked before: it says whether workers can be forked at all."""

    pid: int = 0
    problem: str = ""

    def encode(self) -> bytes:
        return json.dumps([self.pid, self.problem]).encode()


def serve(arguments: str) -> None:
    """Import what is asked for, then fork a worker for each request; returns in each worker.

    The template itself ends here, when the other end of its socket is closed.

    ``arguments``: the descriptor of a socket that keeps messages apart, and names of modules, as JSON.
    """
    try:
        del os.environ[TEMPLATE]
        descriptor, modules = json.loads(arguments)
        environment = dict(os.environ)
        with socket.socket(fileno=descriptor) as channel:
            problem = _prepare(modules)
            channel.send(Reply(problem=problem).encode())
            while True:
                message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 3)
                if not message:
                    os._exit(0)
                request = Request(*json.loads(message))
                if _is_worker(channel, request, descriptors[2]):
                    break
                for each in descriptors:
                    os.close(each)
        _become_ordinary(environment, request, descriptors[:2])
    except BaseException:  # noqa: BLE001 - Python would go on and run the command
        traceback.print_exc()
        os._exit(1)


def _prepare(modules: list[str]) -> str:
    """Import these, as far as they are installed; returns why workers can't be forked, empty if they can."""
    for name in modules:
        with contextlib.suppress(ModuleNotFoundError):
            module, _, function = name.partition(":")
            imported = importlib.import_module(module)
            if function:
                getattr(imported, function)()
    if name := _hidden_module():
        return f"{name} beside the program has the name of a module that would be imported already"
    # What was imported stays to the end: workers needn't look through it for garbage, again and again and half a second long
    # when they end, nor copy the memory that looking writes to.
    gc.freeze()
    if _counts_leaks():
        atexit.register(gc.unfreeze)
    # OpenBLAS ends its threads before a fork, and starts them where they are used.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return _unsafe()


def _counts_leaks() -> bool:
    """Whether a library complains, in fifty lines, about what is still there when a worker ends: nanobind, of triton since 3.9."""
    return any(each.__module__ == "nanobind" for each in type.__subclasses__(type))


def _unsafe() -> str:
    """Why this process must not be forked; empty if it may be."""
    deadline = time.monotonic() + THREAD_ENDS_SECONDS
    while len(threads := _threads()) > 1:
        if time.monotonic() > deadline:
            return f"importing has started threads ({', '.join(sorted(threads))})"
        time.sleep(0.01)  # a thread that was waited for is still listed for a moment
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself is closed by now
            if os.readlink(f"/proc/self/fd/{each}").startswith(_GPU_DEVICES):
                return "importing has opened a GPU"
    return ""


def _threads() -> list[str]:
    """The names of the main thread and of other threads that a fork would lose."""
    names = []
    for each in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has just ended
            names.append(Path(f"/proc/self/task/{each}/comm").read_text().strip())
    return [name for name in names if name not in _STOPPED_BY_FORKS]


def _hidden_module() -> str:
    """A module of the user's that a worker could not import, as another of the same name is imported already."""
    if sys.flags.safe_path:
        return ""
    program = sys.argv[0]
    folder = os.getcwd() if program in ("-c", "-m") else os.path.dirname(os.path.realpath(program))
    for name in {entry.partition(".")[0] for entry in os.listdir(folder)}:
        module = sys.modules.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, [folder]) if module is not None else None
        if spec is not None and spec.origin and not _same(module, spec.origin):
            return spec.origin
    return ""


def _same(module: Any, origin: str) -> bool:
    path = getattr(module, "__file__", None) or ""
    return os.path.exists(path) and os.path.samefile(path, origin)


def _is_worker(channel: socket.socket, request: Request, gate: int) -> bool:
    """Fork a worker, which answers; True in the worker, once the launcher knows it.

    The launcher has its answer, or the end of the socket, also if this process is killed meanwhile.
    """
    if problem := _unsafe():
        channel.send(Reply(problem=problem).encode())
        return False
    told, tell = os.pipe()
    try:
        between = os.fork()
    except OSError as error:
        os.close(told)
        os.close(tell)
        channel.send(Reply(problem=f"can't fork: {error.strerror}").encode())
        return False
    if between == 0:
        between = os.getpid()
        if os.fork() > 0:
            os._exit(0)
        while os.getppid() == between:  # then it is the launcher's child
            time.sleep(ORPHAN_SECONDS)
        os.setsid()
        os.write(tell, GO)  # first: a request must never have two replies
        os.close(told)
        os.close(tell)
        channel.send(Reply(os.getpid()).encode())
        channel.close()
        if os.read(gate, len(GO)) != GO:
            os._exit(1)
        os.close(gate)
        return True
    os.close(tell)
    os.waitpid(between, 0)
    if not os.read(told, len(GO)):
        channel.send(Reply(problem="can't fork: it was killed").encode())
    os.close(told)
    return False


def _become_ordinary(environment: dict[str, str], request: Request, output: list[int]) -> None:
    """Give the worker what a process that was started without the template would have of its own."""
    die_with_parent()
    if os.getppid() != request.launcher:  # it has ended meanwhile
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in enumerate([nothing, *output]):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(request.own)
    if "tempfile" in sys.modules:
        vars(sys.modules["tempfile"])["tempdir"] = None  # TMPDIR is another
    if numpy := sys.modules.get("numpy"):  # Python's own generator sees to itself
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    if process := sys.modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)
