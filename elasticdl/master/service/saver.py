"""Keeps a master's memory where it outlives the master."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from elasticdl.master.core.snapshot import Snapshot

# Numbers that only grow are saved this often, seconds; what a successor must know, at once.
SAVE_SECONDS = 5.0
# How long the job is held up for a memory that can't be saved.
PATIENCE = 1.0
RETRY_SECONDS = 1.0
CLOSE_SECONDS = 5.0
_log = logging.getLogger(__name__)


class SnapshotStore(Protocol):
    """A place for the memory of one job's master. Only one master at a time uses it."""

    async def load(self) -> Snapshot | None:
        """What an earlier master saved last, None if there was none.

        Raises:
            UserError: there is something that can't be read, or is no memory.
        """

    async def save(self, memory: Snapshot) -> None:
        """Replace what is there, wholly or not at all.

        Raises:
            OSError: it can't be saved now; it is tried again.
        """


class Nowhere:
    """For a master that can have no successor, since its workers end with it."""

    async def load(self) -> Snapshot | None:
        return None

    async def save(self, memory: Snapshot) -> None:
        """Nobody would read it."""


class StateSaver:
    """Saves a memory when it has changed, and waits for it; but a job never stands still because that fails."""

    def __init__(self, store: SnapshotStore, recall: Callable[[], Snapshot], clock: Callable[[], float]) -> None:
        self._store = store
        self._recall = recall
        self._clock = clock
        self._kept: Snapshot | None = None  # the last that was given to be saved
        self._kept_at = 0.0
        self._wanted: Snapshot | None = None  # not yet being saved
        self._failing = False
        self._saving: asyncio.Task[None] | None = None

    async def keep(self, *, changed: bool) -> None:
        """``changed``: what a successor must know may have; else it is saved from time to time."""
        due = self._clock() - self._kept_at >= SAVE_SECONDS
        if not (changed or due):
            return
        memory = self._recall()
        if memory == self._kept and not due:
            return
        self._kept, self._kept_at, self._wanted = memory, self._clock(), memory
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save())
        if not self._failing:
            await asyncio.wait({self._saving}, timeout=PATIENCE)
            if not self._saving.done():
                self._fail("it takes long")

    async def close(self) -> None:
        """Wait (bounded) until the last one is saved."""
        if self._saving:
            await asyncio.wait({self._saving}, timeout=CLOSE_SECONDS)
            self._saving.cancel()
            await asyncio.wait({self._saving})

    async def _save(self) -> None:
        while (memory := self._wanted) is not None:
            self._wanted = None
            try:
                await self._store.save(memory)
                self._failing = False
            except OSError as error:
                self._fail(str(error))
                self._wanted = self._wanted or memory
                await asyncio.sleep(RETRY_SECONDS)

    def _fail(self, problem: str) -> None:
        if not self._failing:
            _log.error("can't save what a next master must know: %s; going on without it, and trying again", problem)
        self._failing = True
