"""A child of this process that leads a session and a process group of its own: how it ends, with all its children.

The number of a process is free for another as soon as the process has been waited for (reaped). So nothing here, and nobody
else, sends a signal to a number after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from functools import partial

REAP_SECONDS = 0.01
GROUP_SECONDS = 5.0


class GroupLeader:
    """A process whose id is that of its group."""

    def __init__(self, pid: int, reap: Callable[[], int] | None = None) -> None:
        """``reap``: waits for it and returns its exit code, or minus a signal's number."""
        self.pid = pid
        self._reap = reap or partial(_reap, pid)
        self._reaped = False

    def signal(self, number: signal.Signals) -> None:
        """Of the process alone; nothing happens once it has ended."""
        if not self._reaped:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it and its children at once."""
        if not self._reaped:
            kill_group(self.pid)

    async def wait(self) -> int:
        """Until it has ended, and the children that it left behind; returns its exit code, or minus a signal's number."""
        await has_ended(self.pid)
        self.kill()  # its children, while the number can't be another's
        self._reaped = True
        code = self._reap()
        await reap_group(self.pid)
        return code


def _reap(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


async def has_ended(pid: int, seconds: float | None = None) -> bool:
    """Wait until a child has ended, at most so long, and do not reap it. Returns whether it has ended."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:  # it was reaped
        return True
    try:
        loop.add_reader(descriptor, lambda: None if ended.done() else ended.set_result(None))
        done, _ = await asyncio.wait({ended}, timeout=seconds)
        return bool(done)
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def kill_group(pid: int) -> None:
    """End a process that was not reaped, and its children, at once."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


async def reap_group(pid: int) -> None:
    """The children of a process that has ended, and which were killed, have become this process's."""
    deadline = time.monotonic() + GROUP_SECONDS
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-pid, os.WNOHANG) == (0, 0):
                await asyncio.sleep(REAP_SECONDS)
