"""A cluster's journal as it grows: a thread follows the master, through any change of masters."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress

from elasticdl.cli.master_client import MasterClient
from elasticdl.common.errors import ElasticDLError

AGAIN_SECONDS = 2.0  # before a master is asked once more
JOIN_SECONDS = 5.0
MOST_LINES = 20_000  # that are taken at once
_BEGIN = None  # in the queue: what follows is the journal from its first line


class StreamFeed:
    """See `elasticdl.cli.job_handle.JournalFeed`. Each master tells all of the journal, so each begins it anew.

    ``master``: a client of it; ``kept``: the journal that an ended job has left.
    """

    def __init__(
        self,
        master: Callable[[], AbstractContextManager[MasterClient]],
        has_ended: Callable[[], bool],
        kept: Callable[[], Iterable[str]],
    ) -> None:
        self._open = master
        self._has_ended = has_ended
        self._kept = kept
        self._told: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._master: MasterClient | None = None
        self._thread = threading.Thread(target=self._follow, name="journal", daemon=True)
        self._thread.start()

    def read(self) -> tuple[bool, list[str]]:
        anew = False
        lines: list[str] = []
        while len(lines) < MOST_LINES:
            try:
                line = self._told.get_nowait()
            except queue.Empty:
                break
            if line is _BEGIN:
                anew, lines = True, []
            else:
                lines.append(line)
        return anew, lines

    def close(self) -> None:
        """What the master was asked over is closed by the time this returns, unless the network hangs."""
        self._over.set()
        if master := self._master:
            master.close()
        self._thread.join(JOIN_SECONDS)

    def _follow(self) -> None:
        while not self._over.is_set():
            # ValueError is gRPC's, of a client that has just been closed.
            with suppress(ElasticDLError, OSError, ValueError):
                self._follow_master()
            with suppress(ElasticDLError, OSError):
                if not self._over.is_set() and self._has_ended():
                    self._tell(self._kept())
                    return
            self._over.wait(AGAIN_SECONDS)

    def _follow_master(self) -> None:
        with self._open() as master:
            self._master = master
            try:
                if not self._over.is_set():
                    self._tell(master.events(follow=True))
            finally:
                self._master = None

    def _tell(self, lines: Iterable[str]) -> None:
        for place, line in enumerate(lines):
            if place == 0:  # not before, as a master that does not answer tells none
                self._told.put(_BEGIN)
            self._told.put(line)
