"""The key-value store that Gloo asks for its peers, served on this worker's loopback.

Horovod's C++ client speaks plain HTTP without authentication (``GET``/``PUT``/``DELETE`` on ``/scope/key``, 404 for
"not there yet"), opens a connection per request and polls missing keys each 10 ms. Served here on loopback it
never leaves the machine: what is put goes to the master over the worker's session, and what others put comes back
the same way. Entries belong to one world, so that a stale key of an earlier one can't be seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Key = tuple[str, str]  # scope, key

# Below the 3 s after which the C++ client gives a request up; a key that is not there by then is a 404, and it asks again.
HOLD_SECONDS = 2.0


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
        with self._changed:
            world = self._world
            self._entries.setdefault(world, {})[key] = value
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

    def _gone(self, world: int) -> bool:
        return world <= self._broken or self._world != world


class _Handler(BaseHTTPRequestHandler):
    server: KvServer
    # One write per answer, and no waiting for the client's acknowledgement between header and body.
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        try:
            value = self.server.store.get(self._key(), HOLD_SECONDS)
        except ConnectionAbortedError:
            self._answer(HTTPStatus.GONE)
            return
        if value is None:
            self._answer(HTTPStatus.NOT_FOUND)
        else:
            self._answer(HTTPStatus.OK, value)

    def do_PUT(self) -> None:
        self.server.store.put(self._key(), self.rfile.read(int(self.headers.get("Content-Length", 0))))
        self._answer(HTTPStatus.OK)

    def do_DELETE(self) -> None:
        # "I am done with this scope": nothing to do, since entries go with their world.
        self._answer(HTTPStatus.OK)

    def _key(self) -> Key:
        scope, _, key = self.path.lstrip("/").partition("/")
        return scope, key

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
        super().__init__(("127.0.0.1", 0), _Handler)
        self.store = store
        self._thread = threading.Thread(target=self.serve_forever, args=(0.2,), name="elasticdl-kv", daemon=True)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def open(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(timeout=2.0)
