"""The writer of the journal, and what it gives to those who follow the journal over the network."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from elasticdl.job.journal import KINDS, STEPS, dump_entry, number_of

CHUNK_BYTES = 1 << 18
NUMBERS = 10**9  # that each master has for its entries: more than it will write
_log = logging.getLogger(__name__)


class Journal:
    """Appends entries to a file, each flushed. A file that can't be written is reported once and stops nothing.

    ``recorded`` is called with each entry, except steps. ``generation``: how many masters the job has had, this one included.
    """

    def __init__(
        self,
        path: Path,
        recorded: Callable[[str, Mapping[str, Any]], None] = lambda event, fields: None,
        generation: int = 1,
    ) -> None:
        self._path = path
        self._recorded = recorded
        self._number = (generation - 1) * NUMBERS  # of the last entry
        self._file = path.open("a")
        self._grown = asyncio.Event()  # set with the next entry, and another then takes its place
        self._failed = False
        self._closed = False

    def append(self, event: str, fields: Mapping[str, Any]) -> None:
        self._number += 1
        line = dump_entry({"number": self._number, "time": time.time(), "event": event, **fields})
        _log.log(KINDS[event].level if event in KINDS else logging.INFO, "%s %s", event, fields)
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            self._tell(error)
        self._wake()
        if event != STEPS:  # the step log tells observers of steps sooner
            self._recorded(event, fields)

    async def entries(self, after: int = 0, *, follow: bool) -> AsyncIterator[str]:
        """The lines so far and, when following, those to come until the journal is closed; ``after``: only of greater numbers."""
        rest, is_last = b"", False
        with self._path.open("rb") as file:
            while not is_last:
                grown, is_last = (
                    self._grown,
                    self._closed or not follow,
                )  # asked first: what came meanwhile is read once more
                while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in (each.decode(errors="replace") for each in lines):
                        if not after or number_of(line) > after:
                            yield line
                if not is_last:
                    await grown.wait()

    def close(self) -> None:
        """There are no more entries: `entries` ends for all who follow."""
        self._closed = True
        try:
            self._file.close()
        except OSError as error:  # what could not be written before can't be now
            self._tell(error)
        self._wake()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()

    def _tell(self, error: OSError) -> None:
        """Say once that entries are lost."""
        if not self._failed:
            _log.error("can't write the journal %s: %s; going on without it", self._path, error.strerror)
        self._failed = True
