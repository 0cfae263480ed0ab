"""Saves a master's state where it outlives the master."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Protocol

from elasticdl.common.errors import ReplacedError
from elasticdl.master.state.snapshot import Snapshot

RETRY_SECONDS = 1.0
CLOSE_SECONDS = 5.0
_log = logging.getLogger(__name__)


class SnapshotStore(Protocol):
    """A place for the state of one job's master. Only one master at a time can write there."""

    @property
    def news_seconds(self) -> float:
        """At least so long after the last save is the next, if only the journal has grown."""
        return math.inf

    async def load(self) -> Snapshot | None:
        """What an earlier master saved last, None if there was none.

        Raises:
            UserError: there is something that can't be read, or is no snapshot.
        """
        return None

    async def save(self, snapshot: Snapshot) -> None:
        """Replace what is there, wholly or not at all.

        Raises:
            ReplacedError: another master has the job.
            OSError: it can't be saved now; it is tried again.
        """


class NoStore(SnapshotStore):
    """For a master whose workers end with it: it can have no successor."""

    async def save(self, snapshot: Snapshot) -> None:
        """Nobody would read it."""


class StateSaver:
    """Saves the newest snapshot in the background, and tries again what has failed, until it is closed.

    A snapshot of many workers takes long to make. So it is made only when the store is ready for it: what happens
    together, and what happens while the store is busy, is in one snapshot.
    """

    def __init__(self, store: SnapshotStore, replaced: Callable[[], None] = lambda: None) -> None:
        """``replaced``: called when another master has taken the job over."""
        self._store = store
        self._replaced = replaced
        self._newest: Callable[[], Snapshot] | None = None  # makes what is not yet being saved
        self._waiting: list[asyncio.Future[None]] = []
        self._saving: asyncio.Task[None] | None = None
        self.problem = ""  # why the last attempt failed, if it did

    @property
    def news_seconds(self) -> float:
        """The store's."""
        return self._store.news_seconds

    def save(self, make: Callable[[], Snapshot]) -> asyncio.Future[None]:
        """Done once a snapshot of this moment, or of a later one, is saved. ``make`` makes one of the moment of its call.

        The future raises what the store raised, unless that was an OSError.
        """
        saved = asyncio.get_running_loop().create_future()
        self._newest = make
        self._waiting.append(saved)
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save())
        return saved

    async def close(self) -> None:
        """Wait (bounded) until the last one is saved."""
        if self._saving:
            await asyncio.wait({self._saving}, timeout=CLOSE_SECONDS)
            self._saving.cancel()
            await asyncio.wait({self._saving})
        for future in self._waiting:
            future.cancel()

    async def _save(self) -> None:
        while self._newest is not None:
            make, self._newest = self._newest, None
            waiting, self._waiting = self._waiting, []
            try:
                await self._store.save(make())
            except OSError as error:
                if not self.problem:
                    _log.error("can't save the job's state, and try again: %s", error)
                self.problem = str(error)
                self._newest, self._waiting = self._newest or make, [*waiting, *self._waiting]
                if isinstance(error, ReplacedError):
                    self._replaced()
                    return
                await asyncio.sleep(RETRY_SECONDS)
            except Exception as error:  # noqa: BLE001 - raised again where the future is waited for
                for future in waiting:
                    if not future.done():
                        future.set_exception(error)
            else:
                self.problem = ""
                for future in waiting:
                    if not future.done():
                        future.set_result(None)
