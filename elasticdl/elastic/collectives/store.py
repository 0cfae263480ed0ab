"""The key-value store that Gloo asks for its peers, served on this worker's loopback.

Horovod's C++ client speaks plain HTTP (``GET``/``PUT``/``DELETE`` on ``/scope/key``, 404 for "not there yet"), opens a
connection per request and polls missing keys each 10 ms. The server listens on loopback only: what is put goes to the
master over the worker's session, and what others put comes back the same way. Entries belong to one world, so that a
stale key of an earlier one can't be seen.

The client can't authenticate itself, but it is Horovod in this very process. So the server refuses connections whose other
end is not a socket of the process: those of other users of the machine, and of any other program.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from elasticdl.elastic.collectives.sockets import tcp_sockets

Key = tuple[str, str]  # scope, key

LOOPBACK = "127.0.0.1"
# Below the 3 s after which the C++ client gives a request up; a key that is not there by then is a 404, and it asks again.
HOLD_SECONDS = 2.0
REQUEST_SECONDS = 10.0  # until the next bytes of a request that has begun

# A member publishes some 140 bytes for each other member, under a few keys.
MOST_KEY_LENGTH = 1024
MOST_VALUE_BYTES = 4 << 20
MOST_ENTRIES = 1 << 16


class KvStore:
    """Entries of the current world; waits for keys instead of letting the client poll."""

    def __init__(self, publish: Callable[[int, Key, bytes], None]) -> None:
        self._publish = publish
        self._changed = threading.Condition()
        self._world = 0
        self._broken = 0  # newest world known to be broken
        self._entries: dict[int, dict[Key, bytes]] = {}

    def open_world(self, version: int, entries: dict[Key, bytes]) -> None:
        """Serve this world from now on; ``entries`` are known from the start (ranks)."""
        with self._changed:
            self._world = version
            self._entries = {world: kept for world, kept in self._entries.items() if world >= version}
            self._entries.setdefault(version, {}).update(entries)
            self._changed.notify_all()

    def break_world(self, version: int) -> None:
        """Answer its waiting requests with an error: the keys they wait for will never come."""
        with self._changed:
            self._broken = max(self._broken, version)
            self._changed.notify_all()

    def put(self, key: Key, value: bytes) -> None:
        """Raises:
        OverflowError: the world has too many entries.
        """
        with self._changed:
            world = self._world
            entries = self._entries.setdefault(world, {})
            if key not in entries and len(entries) >= MOST_ENTRIES:
                raise OverflowError(f"world {world} has {len(entries)} entries already")
            entries[key] = value
            self._changed.notify_all()
        self._publish(world, key, value)

    def receive(self, version: int, key: Key, value: bytes) -> None:
        """An entry from another worker; it may come before this worker has opened that world."""
        with self._changed:
            if version >= self._world:
                self._entries.setdefault(version, {})[key] = value
                self._changed.notify_all()

    def get(self, key: Key, timeout: float) -> bytes | None:
        """The value, or None if it has not come in time.

        Raises:
            ConnectionAbortedError: the world is broken.
        """
        with self._changed:
            world = self._world
            entries = self._entries.setdefault(world, {})
            self._changed.wait_for(lambda: key in entries or self._gone(world), timeout)
            if self._gone(world):
                raise ConnectionAbortedError(f"world {world} is broken")
            return entries.get(key)

    def values(self) -> list[bytes]:
        """All values that the members of the present world have published so far."""
        with self._changed:
            return list(self._entries.get(self._world, {}).values())

    def _gone(self, world: int) -> bool:
        return world <= self._broken or self._world != world


class _Handler(BaseHTTPRequestHandler):
    server: KvServer
    timeout = REQUEST_SECONDS
    # One write per answer, and no waiting for the client's acknowledgement between header and body.
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self.path == "/":
            self._answer(HTTPStatus.OK, b"".join(self.server.store.values()))
            return
        key = self._key()
        if key is None:
            return
        try:
            value = self.server.store.get(key, HOLD_SECONDS)
        except ConnectionAbortedError:
            self._answer(HTTPStatus.GONE)
            return
        if value is None:
            self._answer(HTTPStatus.NOT_FOUND)
        else:
            self._answer(HTTPStatus.OK, value)

    def do_PUT(self) -> None:
        key = self._key()
        if key is None:
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self._answer(HTTPStatus.LENGTH_REQUIRED)
        elif len(length) > len(str(MOST_VALUE_BYTES)) or int(length) > MOST_VALUE_BYTES:
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        else:
            self._put(key, self.rfile.read(int(length)), int(length))

    def do_DELETE(self) -> None:
        # "I am done with this scope": nothing to do, since entries go with their world.
        self._answer(HTTPStatus.OK)

    def _put(self, key: Key, value: bytes, length: int) -> None:
        if len(value) < length:
            self._answer(HTTPStatus.BAD_REQUEST)
            return
        try:
            self.server.store.put(key, value)
        except OverflowError:
            self._answer(HTTPStatus.INSUFFICIENT_STORAGE)
        else:
            self._answer(HTTPStatus.OK)

    def _key(self) -> Key | None:
        """None if there is none, which the client has been told."""
        scope, _, key = self.path.removeprefix("/").partition("/")
        if not (scope and key):
            self._answer(HTTPStatus.BAD_REQUEST)
        elif len(self.path) > MOST_KEY_LENGTH:
            self._answer(HTTPStatus.REQUEST_URI_TOO_LONG)
        else:
            return scope, key
        return None

    def _answer(self, status: HTTPStatus, body: bytes = b"") -> None:
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

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def open(self) -> None:
        self._thread.start()

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


def published_values(port: int) -> bytes:
    """What the members of the present world have published in the store of this process, one after the other.

    Raises:
        OSError: the store is closed.
    """
    connection = HTTPConnection(LOOPBACK, port, timeout=HOLD_SECONDS)
    try:
        connection.request("GET", "/")
        return connection.getresponse().read()
    finally:
        connection.close()
