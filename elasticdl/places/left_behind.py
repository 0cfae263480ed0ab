"""What a worker has started in sessions of its own, which do not end with the worker's process group."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator

END_SECONDS = 5.0


def end_left_behind(entry: str) -> None:
    """Kill all processes that were started with this entry, NAME=VALUE, in their environment; the children among them are reaped."""
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:  # they may start others meanwhile
        found = list(_started_with(entry.encode()))
        if not found:
            return
        for _, descriptor in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        for pid, descriptor in found:
            select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            os.close(descriptor)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _started_with(entry: bytes) -> Iterator[tuple[int, int]]:
    """Their numbers, with descriptors by which no other process of that number is meant; to be closed."""
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            descriptor = os.pidfd_open(int(name))
            if entry in _environment(name):
                yield int(name), descriptor
            else:
                os.close(descriptor)


def _environment(pid: str) -> list[bytes]:
    """As it was started; of one that has ended, empty."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []
