"""Tells where this process stands, when it is asked and when it can't be.

`Witness` looks at the training thread from another one. If no thread of Python's can run, since one holds the interpreter's
lock or the process starves, nobody can be asked: so `DumpTimer` has a timer of `faulthandler`, whose thread is C's and needs
no lock, write all stacks once nobody puts it off any more.

And the stacks of this process's threads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import math
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import psutil

from elasticdl.common.credentials import STACKS
from elasticdl.common.reason import Line, Stack, describe

# Where the threads of this process stand.


def stack_of(thread: int) -> Stack:
    """The stack of a thread of this process; without lines if it has ended."""
    frame = current_frames().get(thread)
    lines = []
    while frame is not None:
        code = frame.f_code
        lines.append(Line(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return Stack(tuple(lines))


def current_frames() -> dict[int, FrameType]:
    """Frames by thread, taken without garbage collection.

    CPython holds a lock of its interpreter meanwhile. A collection may run finalizers that let other threads run, as TensorFlow's
    do. As soon as one of these threads wanted the lock, the process would stop for good.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


# Of the training thread, to see whether it moves: a loop that is always found in the same line may hang.
LOOKS = 5
BETWEEN_LOOKS = 0.1
BUSY = 0.02  # seconds of processor time meanwhile: it may be in one call of C that takes long, to write a checkpoint perhaps
# Of the master's heartbeat_timeout: it asks for the dump after 0.7 of it (`elasticdl.master.core.watching`).
DUMP_SHARE = 0.4
STDERR = 2
# In one line of the user's, before the worker is ready.
TOLD_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Operations:
    """``begun``: in the present world. ``last``: the newest last, in words."""

    begun: int = 0
    last: tuple[str, ...] = ()


class Witness:
    def __init__(self) -> None:
        self.thread = threading.main_thread().ident or 0  # that trains
        self.operations: Callable[[], Operations] = Operations
        self._looking = threading.Lock()

    def look(self, tell: Callable[[dict[str, Any]], None]) -> None:
        """Tell where training stands half a second later, and print all stacks, from a thread of its own."""
        if self._looking.acquire(blocking=False):
            try:
                threading.Thread(target=self._look, args=(tell,), name="elasticdl-witness", daemon=True).start()
            except RuntimeError:  # this process may have no more threads
                self._looking.release()

    def _look(self, tell: Callable[[dict[str, Any]], None]) -> None:
        try:
            stacks, busy = [stack_of(self.thread)], processor_seconds(self.thread)
            for _ in range(LOOKS - 1):
                time.sleep(BETWEEN_LOOKS)
                stacks.append(stack_of(self.thread))
            busy = processor_seconds(self.thread) - busy
            operations = self.operations()
            tell(
                {
                    "where": stacks[-1].where,
                    "stack": describe(stacks[-1]),
                    "moves": len({stack.lines for stack in stacks}) > 1 or busy >= BUSY,
                    "collectives": operations.begun,
                    "last_collectives": list(operations.last),
                }
            )
        finally:
            self._looking.release()
        # Last, as it may hang; and not by sys.stderr, whose lock training may hold, or which a script has replaced.
        with contextlib.suppress(OSError):  # nothing can be printed, and it is told already
            os.write(STDERR, b"elasticdl: the master asks for the stacks of all threads\n" + all_stacks())


class SlowStart:
    """What the user's code does for long before the worker is ready, such as reading data: told once."""

    def __init__(self) -> None:
        self._line = ""  # of the user's own, at which the training thread stands
        self._since = math.inf
        self._told = False

    def look(self, stack: Stack, now: float) -> str:
        """The line, if it has to be told now; empty otherwise."""
        line = next((str(each) for each in stack.lines if each.is_users), "")
        if line != self._line:
            self._line, self._since = line, now
        if self._told or not line or now - self._since < TOLD_SECONDS:
            return ""
        self._told = True
        return line


def all_stacks() -> bytes:
    """As `faulthandler` writes them. It holds Python's lock meanwhile: written straight into a pipe that nobody empties, it
    would stop the whole process."""
    with open(os.memfd_create("stacks"), "w+b") as file:
        faulthandler.dump_traceback(file=file)
        file.seek(0)
        return file.read()


def processor_seconds(thread: int) -> float:
    """That a thread of this process has had; 0 if that is not known."""
    native = next((each.native_id for each in threading.enumerate() if each.ident == thread), None)
    with contextlib.suppress(psutil.Error):
        return sum(each.user_time + each.system_time for each in psutil.Process().threads() if each.id == native)
    return 0.0


class DumpTimer:
    """Put off by each `arm`. There is one such timer in a process: a script that uses faulthandler's own loses it."""

    def __init__(self, environ: Mapping[str, str], seconds: float) -> None:
        """Into the file that the environment names, else to stderr as it is now."""
        self._seconds = seconds
        path = environ.get(STACKS)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if path else os.dup(STDERR)
            self._is_own = path is not None and stat.S_ISREG(os.fstat(self._file).st_mode)
        except OSError:
            self._file, self._is_own = -1, False
        self._lock = threading.RLock()  # else it might be armed again between `_disarm` and the fork itself
        # A fork has the timer's locks without its thread, and would wait for it at its end.
        os.register_at_fork(before=self._disarm, after_in_parent=self._lock.release, after_in_child=self._lock.release)

    def arm(self) -> None:
        """Without a timer the process does as well: what can't be had, such as a thread or a disk, is tried anew the next time."""
        if not self._lock.acquire(blocking=False):
            return  # this process is being forked
        try:
            if self._file < 0:
                return
            with contextlib.suppress(OSError, RuntimeError):
                if self._is_own:  # a dump says that the process hangs now
                    os.ftruncate(self._file, 0)
                faulthandler.dump_traceback_later(self._seconds, file=self._file)
        finally:
            self._lock.release()

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                faulthandler.cancel_dump_traceback_later()
                os.close(self._file)
                self._file = -1

    def _disarm(self) -> None:
        self._lock.acquire()
        if self._file >= 0:
            faulthandler.cancel_dump_traceback_later()
