"""Shutting the connections between the members of a world: the way to break it on purpose.

A process that waits in a Gloo collective for a living neighbour is not woken by the death of a third; it would wait out
Gloo's timeout of 30 s. Shutting the sockets makes every blocked collective fail within milliseconds, here and on the
other side.

Gloo publishes each address at which it listens for another member. One end of each of its connections is such an
address. No other socket of the process has one: not those of the user's own threads, nor those to store and master.
"""

from __future__ import annotations

import contextlib
import os
import socket

from elasticdl.elastic.collectives.socket_table import tcp_sockets


def shut_published(published: bytes) -> int:
    """Shut this process's TCP sockets that have an end among the published addresses; returns how many.

    Those that listen or are connecting, too: while Gloo forms a world, it may wait there for somebody who never comes.

    ``published``: what the members of the world have published; an address in it is a C ``sockaddr``.
    """
    wanted = {f"socket:[{each.inode}]" for each in tcp_sockets() if any(end in published for end in each.ends)}
    done = 0
    for name in os.listdir("/proc/self/fd"):
        # An OSError says that it was closed meanwhile, or has nothing to shut.
        with contextlib.suppress(OSError):
            done += os.readlink(f"/proc/self/fd/{name}") in wanted and _shut(int(name), wanted)
    return done


def _shut(descriptor: int, wanted: set[str]) -> bool:
    """Unless the number is another socket's by now."""
    with socket.socket(fileno=os.dup(descriptor)) as handle:
        if os.readlink(f"/proc/self/fd/{handle.fileno()}") not in wanted:
            return False
        handle.shutdown(socket.SHUT_RDWR)
        return True
