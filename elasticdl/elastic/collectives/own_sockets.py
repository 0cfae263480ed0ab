"""The TCP sockets of this process, and what they connect."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator

SO_PEERNAME = 28  # of Linux; unlike getpeername() it also tells to whom a socket is still connecting


def tcp_sockets() -> Iterator[socket.socket]:
    """A duplicate of each, open as long as it is looked at; those that listen or are connecting, too."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as handle:
                    if handle.family in (socket.AF_INET, socket.AF_INET6) and handle.type == socket.SOCK_STREAM:
                        yield handle


def ends(handle: socket.socket) -> tuple[bytes, bytes]:
    """Its own address and its peer's, each as the C structure ``sockaddr`` begins; the latter is empty if there is no peer.

    Raises:
        OSError: the socket is closed.
    """
    local = _sockaddr(handle.family, *handle.getsockname()[:2])
    with contextlib.suppress(OSError):
        return local, handle.getsockopt(socket.SOL_SOCKET, SO_PEERNAME, len(local))
    return local, b""


def _sockaddr(family: int, host: str, port: int) -> bytes:
    flow = bytes(4) if family == socket.AF_INET6 else b""
    address = socket.inet_pton(family, host.partition("%")[0])
    return struct.pack("=H", family) + struct.pack("!H", port) + flow + address
