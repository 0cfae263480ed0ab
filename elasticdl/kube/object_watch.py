"""Following the objects of one kind: list them, watch from there, and go on through whatever interrupts it.

| what happens | what is done |
| --- | --- |
| the watch ends, the connection breaks, the server refuses or is not there | watched on from the last version seen |
| that version has expired (410), or the server does not know it, or anything else fails | listed anew; whoever is told compares |

Each is done after a delay that doubles until there is something to tell again. A version is remembered from every change and
every bookmark, so a broken connection seldom costs a list. Anything may be told twice.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import urllib3

from elasticdl.common.backoff import Backoff
from elasticdl.kube.client import ANSWER_SECONDS, GONE, ApiError, Client, Object, path_of

# A watch is begun anew after so long; the server says something each minute, or its silence is a broken connection.
WATCH_SECONDS = 240
SILENCE_SECONDS = 130.0
# After a server was restored from a backup it answers versions that it does not know with these.
_UNKNOWN_VERSION = (400, GONE, 504)
JOIN_SECONDS = 5.0
_log = logging.getLogger(__name__)


class Changes:
    """Changes as they come: ADDED, MODIFIED, DELETED or BOOKMARK, and the object. Iterating raises `ApiError`, with 410 when a new
    list is needed."""

    def __init__(self, response: urllib3.BaseHTTPResponse, client: Client) -> None:
        self._response = response
        self._client = client

    def __iter__(self) -> Iterator[tuple[str, Object]]:
        with self._client.translated("watch"), contextlib.closing(self._response):
            for line in self._response:
                if line.endswith(b"\n") and line.strip():  # else the connection broke within it
                    said = json.loads(line)
                    if said["type"] == "ERROR":  # 410, or a status of another kind after which only a new list helps
                        raise ApiError(GONE, str(said["object"].get("message", "the watch has expired")))
                    yield said["type"], said["object"]

    def stop(self) -> None:
        """End it, from any thread."""
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # it has ended by itself
            self._response.shutdown()


class Source:
    """The objects of one kind in a client's namespace; both methods block and raise `ApiError`."""

    def __init__(self, client: Client, kind: str, **selection: str) -> None:
        self._client = client
        self._kind = kind
        self._selection = selection

    def list(self) -> Object:
        """With the version from which a watch goes on."""
        return self._client.listing(self._kind, **self._selection)

    def watch(self, version: str) -> Changes:
        how = {"watch": True, "allow_watch_bookmarks": True, "timeout_seconds": WATCH_SECONDS}
        query = {**self._selection, "resource_version": version, **how}
        path, timeout = path_of(self._kind, self._client.namespace), (ANSWER_SECONDS[0], SILENCE_SECONDS)
        return Changes(self._client.open("GET", path, f"watch {self._kind}", query, timeout=timeout), self._client)


class Watch:
    def __init__(
        self,
        source: Source,
        listed: Callable[[Sequence[Object]], object],
        changed: Callable[[str, Object], object],
        backoff: Backoff,
    ) -> None:
        """``listed`` is told all objects at first, ``changed`` each change by its kind, in the watch's thread."""
        self._source = source
        self._listed = listed
        self._changed = changed
        self._backoff = backoff
        self._version = ""  # empty: to be listed
        self._stopped = threading.Event()
        self._handover = threading.Lock()
        self._stream: Changes | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, name="kubernetes watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        with self._handover:
            if self._stream:
                self._stream.stop()

    def join(self) -> None:
        """Wait until nothing more is told; after `stop`."""
        if self._thread:
            self._thread.join(JOIN_SECONDS)

    def run(self) -> None:
        while not self._stopped.is_set():
            failure = None
            try:
                self._follow()
            except ApiError as error:
                failure = error
                if error.status in _UNKNOWN_VERSION:
                    self._version = ""
            except Exception:  # noqa: BLE001 - without this thread the master sees nothing any more
                _log.exception("watching anew")
                self._version = ""
            if self._stopped.is_set():
                return
            delay = self._backoff.delay(failure.retry_after if failure else 0.0)
            _log.log(logging.DEBUG if failure is None else logging.INFO, "watching again in %.1f s: %s", delay, failure)
            self._stopped.wait(delay)

    def _follow(self) -> None:
        """List if need be, then tell changes until the watch ends."""
        if not self._version:
            listing = self._source.list()
            self._listed(listing["items"])
            self._version = listing["metadata"]["resourceVersion"]
        stream = self._source.watch(self._version)
        with self._handover:
            self._stream = stream
            if self._stopped.is_set():
                stream.stop()
        try:
            for kind, seen in stream:
                self._backoff.reset()
                self._version = seen["metadata"]["resourceVersion"]
                if kind != "BOOKMARK":
                    self._changed(kind, seen)
        finally:
            with self._handover:
                self._stream = None
