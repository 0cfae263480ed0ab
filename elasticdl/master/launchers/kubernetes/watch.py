"""Keeping up with one kind of objects: list them, watch from there, and go on through whatever interrupts it.

| what happens | what is done |
| --- | --- |
| the watch ends, or the connection breaks | watched on from the last version seen |
| that version has expired (410), or the server does not know it | listed anew; the receiver compares |
| the server refuses or is not there | tried again after a delay that doubles |

A version is remembered from every change and every bookmark, so a broken connection seldom costs a list. What the
receiver is told may come twice.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from elasticdl.master.launchers.kubernetes.api import GONE, ApiFailure, Listing, Source, Stream
from elasticdl.master.launchers.kubernetes.backoff import Backoff
from elasticdl.master.launchers.kubernetes.pods import Manifest

# The server knows its own versions only; after it was restored from a backup it refuses later ones so.
_UNKNOWN_VERSION = (400, GONE, 504)
# A watch that ended later than this was in order.
_SOUND_SECONDS = 5.0
JOIN_SECONDS = 5.0
_log = logging.getLogger(__name__)


class Receiver(Protocol):
    """Called in the watch's thread."""

    def listed(self, items: tuple[Manifest, ...]) -> None: ...

    def changed(self, kind: str, item: Manifest) -> None: ...


class Watch:
    def __init__(self, source: Source, receiver: Receiver, backoff: Backoff, clock: Callable[[], float]) -> None:
        self._source = source
        self._receiver = receiver
        self._backoff = backoff
        self._clock = clock
        self._version = ""  # empty: to be listed
        self._stopped = threading.Event()
        self._handover = threading.Lock()
        self._stream: Stream | None = None
        self._thread: threading.Thread | None = None

    def start(self, listing: Listing | None = None) -> None:
        """Begin; ``listing`` is what the receiver has been told already."""
        self._version = listing.version if listing else ""
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
            began, failure = self._clock(), None
            try:
                self._follow()
            except ApiFailure as error:
                failure = error
                if error.status in _UNKNOWN_VERSION:
                    self._version = ""
            if self._stopped.is_set():
                return
            if failure is None and self._clock() - began >= _SOUND_SECONDS:
                continue
            delay = self._backoff.delay(failure.retry_after if failure else 0.0)
            _log.log(logging.DEBUG if failure is None else logging.INFO, "watching again in %.1f s: %s", delay, failure)
            self._stopped.wait(delay)

    def _follow(self) -> None:
        """List if need be, then tell changes until the watch ends."""
        if not self._version:
            listing = self._source.list()
            self._receiver.listed(listing.items)
            self._version = listing.version
        stream = self._source.watch(self._version)
        with self._handover:
            self._stream = stream
            if self._stopped.is_set():
                stream.stop()
        try:
            for change in stream:
                self._backoff.reset()
                self._version = change.object["metadata"]["resourceVersion"]
                if change.kind != "BOOKMARK":
                    self._receiver.changed(change.kind, change.object)
        finally:
            with self._handover:
                self._stream = None
