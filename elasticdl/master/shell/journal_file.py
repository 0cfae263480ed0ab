"""The writer of the journal, and what it gives to those who follow the journal over the network."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from elasticdl.job.event_catalogue import KINDS
from elasticdl.job.journal import STEPS, dump_entry

CHUNK_BYTES = 1 << 18
MOST_UNREAD = 10_000  # entries of the journal that wait for one follower
_log = logging.getLogger(__name__)


class Journal:
    """Appends entries to a file, each flushed. A file that can't be written is reported once and stops nothing.

    ``recorded`` is called with each entry, except steps.
    """

    def __init__(
        self, path: Path, recorded: Callable[[str, Mapping[str, Any]], None] = lambda event, fields: None
    ) -> None:
        self._path = path
        self._recorded = recorded
        self._file = path.open("a")
        self._followers: set[asyncio.Queue[str | None]] = set()
        self._failed = False
        self._closed = False

    def append(self, event: str, fields: Mapping[str, Any]) -> None:
        line = dump_entry({"time": time.time(), "event": event, **fields})
        _log.log(KINDS[event].level if event in KINDS else logging.INFO, "%s %s", event, fields)
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            self._tell(error)
        self._hand_out(line)
        if event != STEPS:  # the step log tells observers of steps sooner
            self._recorded(event, fields)

    async def entries(self, *, follow: bool) -> AsyncIterator[str]:
        """The lines so far and, when following, those to come until the journal is closed, or too many are not read. A thread reads
        the file."""
        queue: asyncio.Queue[str | None] = asyncio.Queue(MOST_UNREAD)
        length = self._path.stat().st_size
        if follow and not self._closed:  # no await since the length was taken, so nothing falls between
            self._followers.add(queue)
        else:
            queue.put_nowait(None)
        try:
            with self._path.open("rb") as file:
                rest = b""
                while length > 0 and (chunk := await asyncio.to_thread(file.read, min(CHUNK_BYTES, length))):
                    length -= len(chunk)
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        yield line.decode(errors="replace")
            while (entry := await queue.get()) is not None:
                yield entry
        finally:
            self._followers.discard(queue)

    def close(self) -> None:
        """There are no more entries: `entries` ends for all who follow."""
        self._closed = True
        try:
            self._file.close()
        except OSError as error:  # what could not be written before can't be now
            self._tell(error)
        self._hand_out(None)

    def _hand_out(self, line: str | None) -> None:
        for queue in tuple(self._followers):
            if queue.full():  # whoever does not read is ended, asks again, and has all from the file
                self._followers.discard(queue)
                queue.get_nowait()
                queue.put_nowait(None)
            else:
                queue.put_nowait(line)

    def _tell(self, error: OSError) -> None:
        """Say once that entries are lost."""
        if not self._failed:
            _log.error("can't write the journal %s: %s; going on without it", self._path, error.strerror)
        self._failed = True
