"""The TCP sockets of this process; shutting those between the members of a world is the way to break it on purpose.

A process that waits in a Gloo collective for a living neighbour is not woken by the death of a third; it would wait out
Gloo's timeout of 30 s. Shutting the sockets makes every blocked collective fail within milliseconds, here and on the
other side.

Gloo publishes each address at which it listens for another member. One end of each of its connections is such an
address. No other socket of the process has one: not those of the user's own threads, nor those to store and master.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import struct
from collections.abc import Iterable, Iterator

log = logging.getLogger(__name__)

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


def break_connections(published: Iterable[bytes], *, listening: bool) -> None:
    """As `shut_published`; if it can't be done it is logged."""
    try:
        count = shut_published(b"".join(published), listening=listening)
    except OSError as error:
        log.warning("the world's sockets could not be found: %s", error)
    else:
        log.debug("shut %d sockets of the world", count)


def shut_published(published: bytes, *, listening: bool) -> int:
    """Shut this process's TCP sockets that have an end among the published addresses; returns how many.

    Those that are connecting, too: while Gloo forms a world, it may wait there for somebody who never comes.

    ``listening``: also those that listen. Horovod's Gloo waits there for a member; torch's ends the process then.
    ``published``: what the members of the world have published; an address in it is a C ``sockaddr``.
    """
    done = 0
    for handle in tcp_sockets():
        with contextlib.suppress(OSError):  # it was closed meanwhile, or has nothing to shut
            if not listening and handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            if any(end in published for end in ends(handle) if end):
                handle.shutdown(socket.SHUT_RDWR)
                done += 1
    return done
