"""Finding the sockets that a library opened, and shutting them: the way to break a world on purpose.

A process that waits in a Gloo collective for a living neighbour is not woken by the death of a third; it would wait
out Gloo's timeout of 30 s. Shutting the sockets makes every blocked collective fail within milliseconds, here and on
the other side.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SocketId:
    """A socket of this process; the inode tells a re-used file descriptor from the one that was meant."""

    fd: int
    inode: str


def open_sockets() -> frozenset[SocketId]:
    """All sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found.add(SocketId(int(name), target))
    return frozenset(found)


def shut(sockets: frozenset[SocketId], *, spare_ports: frozenset[int]) -> int:
    """Shut those TCP sockets that are still open; returns how many.

    Those that listen too, and those that are connecting: while Gloo forms a world, somebody waits at the other end of
    them who may never come. ``spare_ports``: local or remote ports whose connections are not the collective's (the
    store, the master).
    """
    done = 0
    for candidate in sockets & open_sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(candidate.fd)) as handle:
            # An OSError here says that it was closed meanwhile, or has nothing to shut.
            if handle.family not in (socket.AF_INET, socket.AF_INET6) or handle.type != socket.SOCK_STREAM:
                continue
            if {handle.getsockname()[1], _remote_port(handle)} & spare_ports:
                continue
            handle.shutdown(socket.SHUT_RDWR)
            done += 1
    return done


def _remote_port(handle: socket.socket) -> int | None:
    try:
        port: int = handle.getpeername()[1]
    except OSError:  # not connected (yet)
        return None
    return port
