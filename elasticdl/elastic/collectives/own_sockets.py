"""The TCP sockets of this process, and what they connect."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator

SO_PEERNAME = 28  # of Linux; unlike getpeername() it also tells to whom a socket is still connecting


def tcp_sockets() -> Iterator[socket.socket]:
    """A duplicate of each, open as long as it is looked at; those that listen or are connecting, too."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:  # an OSError: it was closed meanwhile
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            handle = opened.enter_context(socket.socket(fileno=os.dup(int(name))))
            if handle.family in (socket.AF_INET, socket.AF_INET6) and handle.type == socket.SOCK_STREAM:
                yield handle


def ends(handle: socket.socket) -> tuple[bytes, bytes]:
    """Its own address and its peer's, in the form of `sockaddr`; the latter is empty if there is no peer.

    Raises:
        OSError: the socket is closed.
    """
    local = sockaddr(handle.family, *handle.getsockname()[:2])
    with contextlib.suppress(OSError):
        return local, handle.getsockopt(socket.SOL_SOCKET, SO_PEERNAME, len(local))
    return local, b""


def sockaddr(family: int, host: str, port: int) -> bytes:
    """The beginning of the C structure of this name: family, port and host."""
    flow = bytes(4) if family == socket.AF_INET6 else b""
    address = socket.inet_pton(family, host.partition("%")[0])
    return struct.pack("=H", family) + struct.pack("!H", port) + flow + address
