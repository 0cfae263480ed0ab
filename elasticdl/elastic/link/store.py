"""The key-value store that Gloo asks for its peers, served on this worker's loopback.

Horovod's C++ client speaks plain HTTP (``GET``/``PUT``/``DELETE`` on ``/scope/key``, 404 for "not there yet"), opens a
connection per request and polls missing keys each 10 ms. The server listens on loopback only: what is put goes to the
master over the worker's session, and what others put comes back the same way. Entries belong to one world, so that a
stale key of an earlier one can't be seen.

The client can't authenticate itself, but it is Horovod in this very process. So the server refuses connections whose other
end is not a socket of the process: those of other users of the machine, and of any other program.

And how connections between workers are broken, so that whoever waits at one goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from elasticdl.common.credentials import Processes

# The TCP sockets of this process; shutting those between the members of a world is the way to break it on purpose.
#
# A process that waits in a Gloo collective for a living neighbour is not woken by the death of a third; it would wait out
# Gloo's timeout of 30 s. Shutting the sockets makes every blocked collective fail within milliseconds, here and on the
# other side.
#
# Gloo publishes each address at which it listens for another member. One end of each of its connections is such an
# address. No other socket of the process has one: not those of the user's own threads, nor those to store and master.

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


def shut_published(published: Iterable[bytes], *, listening: bool) -> int:
    """Shut this process's TCP sockets that have an end among the published addresses; returns how many.

    Those that are connecting, too: while Gloo forms a world, it may wait there for somebody who never comes.

    ``listening``: also those that listen. Horovod's Gloo waits there for a member; torch's ends the process then.
    ``published``: what the members of the world have published; an address in it is a C ``sockaddr``.
    """
    done, addresses = 0, b"".join(published)
    for handle in tcp_sockets():
        with contextlib.suppress(OSError):  # it was closed meanwhile, or has nothing to shut
            if not listening and handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            if any(end in addresses for end in ends(handle) if end):
                handle.shutdown(socket.SHUT_RDWR)
                done += 1
    return done


Key = tuple[str, str]  # scope, key

LOOPBACK = "127.0.0.1"
# Below the 3 s after which the C++ client gives a request up; a key that is not there by then is a 404, and it asks again.
HOLD_SECONDS = 2.0
REQUEST_SECONDS = 10.0  # until the next bytes of a request that has begun


class Refusal(Exception):
    """The status that the client is answered; its only argument."""


class KvStore:
    """Entries of the current world; waits for keys instead of letting the client poll."""

    def __init__(self, publish: Callable[[int, Key, bytes], None]) -> None:
        self._publish = publish
        self._changed = threading.Condition()
        self._world = 0
        self._broken = 0  # newest world known to be broken
        self._entries: dict[int, dict[Key, bytes]] = {}

    def open_world(self, version: int) -> None:
        """Serve this world from now on."""
        with self._changed:
            self._world = version
            self._entries = {world: kept for world, kept in self._entries.items() if world >= version}
            self._changed.notify_all()

    def break_world(self, version: int) -> None:
        """Answer its waiting requests with an error: the keys they wait for will never come."""
        with self._changed:
            self._broken = max(self._broken, version)
            self._changed.notify_all()

    def put(self, key: Key, value: bytes, world: int | None = None) -> None:
        """For the members of a world, the present one if none is given."""
        with self._changed:
            world = self._world if world is None else world
            self._entries.setdefault(world, {})[key] = value
            self._changed.notify_all()
        self._publish(world, key, value)

    def receive(self, version: int, key: Key, value: bytes) -> None:
        """An entry that need not be published, as it comes from another worker; it may come before this worker has opened that world."""
        with self._changed:
            if version >= self._world:
                self._entries.setdefault(version, {})[key] = value
                self._changed.notify_all()

    def get(self, key: Key, timeout: float, world: int | None = None) -> bytes | None:
        """The value in a world, the present one if none is given, or None if it has not come in time.

        Raises:
            Refusal: the world is broken, or no longer the present one.
        """
        with self._changed:
            world = self._world if world is None else world
            entries = self._entries.setdefault(world, {})
            self._changed.wait_for(lambda: key in entries or self._gone(world), timeout)
            if self._gone(world):
                raise Refusal(HTTPStatus.GONE)
            return entries.get(key)

    def values(self, world: int) -> list[bytes]:
        """All values that the members of a world have published so far."""
        with self._changed:
            return list(self._entries.get(world, {}).values())

    def _gone(self, world: int) -> bool:
        return world <= self._broken or self._world != world


class _Handler(BaseHTTPRequestHandler):
    server: KvServer
    timeout = REQUEST_SECONDS
    # One write per answer, and no waiting for the client's acknowledgement between header and body.
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def do_DELETE(self) -> None:
        self._answer(bytes)  # "I am done with this scope": nothing to do, since entries go with their world

    def _get(self) -> bytes:
        value = self.server.store.get(self._key(), HOLD_SECONDS)
        if value is None:
            raise Refusal(HTTPStatus.NOT_FOUND)
        return value

    def _put(self) -> bytes:
        key, length = self._key(), int(self.headers["Content-Length"])
        value = self.rfile.read(length)
        if len(value) < length:
            raise Refusal(HTTPStatus.BAD_REQUEST)
        self.server.store.put(key, value)
        return b""

    def _key(self) -> Key:
        scope, _, key = self.path.removeprefix("/").partition("/")
        if not (scope and key):
            raise Refusal(HTTPStatus.BAD_REQUEST)
        return scope, key

    def _answer(self, work: Callable[[], bytes]) -> None:
        status, body = HTTPStatus.OK, b""
        try:
            body = work()
        except Refusal as refusal:
            (status,) = refusal.args
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silent: a line per request of the C++ client would drown the log."""


class KvServer(ThreadingHTTPServer):
    """Serves a store on a free port of the loopback until `close`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, store: KvStore) -> None:
        super().__init__((LOOPBACK, 0), _Handler)
        self.store = store
        self._thread = threading.Thread(target=self.serve_forever, args=(0.2,), name="elasticdl-kv", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether the client is this process."""
        for handle in tcp_sockets():
            with contextlib.suppress(OSError):  # closed meanwhile, or one that listens
                if handle.getsockname() == client_address and handle.getpeername() == (LOOPBACK, self.port):
                    return True
        return False

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(timeout=2.0)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """By which interface this worker talks to the others, and where members publish how they can be reached."""

    store: KvStore
    interface: str
    processes: Processes | None = None  # of this worker, if it has several
