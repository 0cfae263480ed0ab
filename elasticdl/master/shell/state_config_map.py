"""A job's snapshot, journal and last status in its two ConfigMaps, where the next master and the command line find them.

Their format is in `elasticdl.kube.manifests.packed_state`. One write takes a snapshot and the newest part of the journal, both of
the same moment. When that part has grown, it moves to the other ConfigMap, of the journal's older part.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from elasticdl.common.backoff import Backoff
from elasticdl.common.errors import UserError
from elasticdl.common.retry import retry
from elasticdl.kube.api_error import ABSENT, FORBIDDEN
from elasticdl.kube.client import Client
from elasticdl.kube.fenced import FencedConfigMap, Manifest, NotWrittenError
from elasticdl.kube.manifests.names import journal_name, master_name, state_name
from elasticdl.kube.manifests.packed_state import (
    JOURNAL,
    MEMORY,
    STATUS,
    head,
    pack,
    pack_journal,
    unpack_state,
)
from elasticdl.master.state.instructions import Phase
from elasticdl.master.state.snapshot import Snapshot

# If only the journal has grown, at least so long after the last write is the next; longer, the more there is to write.
NEWS_SECONDS = 1.0
BYTES_PER_SECOND = 10_000
# A state that does not change is written so often.
IDLE_SECONDS = 60.0
# The newest part of the journal moves to the older one when it has so many bytes, packed.
PART_BYTES = 16_000
# A ConfigMap may have 1 MiB. Of a longer journal, packed, the oldest entries are dropped.
MOST_BYTES = 600_000
MOST_STATE_BYTES = 1_000_000
# So long the cluster may take to answer at the beginning, and to take the last status at the end.
TIMEOUT = 120.0

T = TypeVar("T")
_log = logging.getLogger(__name__)


class ClusterState:
    """The `SnapshotStore` of a master on a cluster, and the keeper of its journal. Used on one event loop.

    ``holder``: the mark of this master; ``replaced`` is called when the job is not its any more.
    """

    def __init__(
        self,
        client: Client,
        job: str,
        holder: str,
        replaced: Callable[[], None],
        journal: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._job = job
        self._journal = journal
        self._clock = clock
        self._state = FencedConfigMap(client, state_name(job), holder, replaced)
        self._older = FencedConfigMap(client, journal_name(job), holder, replaced)
        self._writing = asyncio.Lock()
        self._number = 0  # of the older part
        self._newest_from = 0  # the journal's first byte that is not in the older part
        self._part_bytes = PART_BYTES
        self._unsure_to: int | None = None  # up to there the older part may have been written, without an answer
        self._saved: object = None
        self._saved_at = 0.0
        self._size = 0  # of what was written last
        self.next_worker = 0  # number of the first worker that no master before this one has launched
        self.status: Callable[[], str] = str  # what is saved of it with each snapshot, unless it is empty

    async def claim(self) -> tuple[Manifest, Manifest]:
        """Make this the job's master. Returns what is there; from then on an earlier master can't write any more.

        Raises:
            UnreachableError: the cluster does not answer.
        """
        async with self._writing:
            return await self._retried(self._state.claim), await self._retried(self._claim_older)

    async def _claim_older(self) -> Manifest:
        try:
            return await self._older.claim()
        except NotWrittenError as error:
            if error.status not in (ABSENT, FORBIDDEN):
                raise
            _log.warning("of a long journal only the end will be kept: %s", error)
            return {}

    async def _retried(self, ask: Callable[[], Awaitable[T]], what: str = "read the job's state") -> T:
        return await retry(ask, what, Backoff(random.Random()), TIMEOUT)

    async def load(self) -> Snapshot | None:
        """Also makes this the job's master, and puts the journal so far into its file.

        Raises:
            UserError: what is there can't be read.
            UnreachableError: the cluster does not answer.
        """
        found = await self.claim()
        try:
            state = unpack_state(*found)
            snapshot = Snapshot.from_json(state.memory) if state.memory else None
        except ValueError as error:
            raise UserError(f"what an earlier master has left can't be read: {error}") from None
        whole, newline, _ = state.journal.rpartition("\n")  # so that the next entry begins a line
        self._journal.write_text(whole + newline)
        self._number, self._newest_from = state.number, state.older_bytes
        self.next_worker = snapshot.job.next_id if snapshot else 0
        return snapshot

    @property
    def news_seconds(self) -> float:
        return max(NEWS_SECONDS, self._size / BYTES_PER_SECOND)

    async def save(self, snapshot: Snapshot) -> None:
        """With the journal of the same moment. Raises OSError if it can't be done now."""
        end = snapshot.journal_bytes
        content = (snapshot, snapshot.job.workers, end)
        if content == self._saved and self._clock() - self._saved_at < IDLE_SECONDS:
            return
        status = {STATUS: text} if (text := self.status()) else {}
        await self._write({MEMORY: snapshot.to_json(), **status}, end)
        self._saved, self._saved_at = content, self._clock()

    async def finish(self, status: str, phase: Phase) -> None:
        """The job is over, ``status`` is its last: if it failed, have the Job start no other master.

        Raises:
            UnreachableError: the cluster does not take it.
        """
        await self._retried(partial(self._write, {STATUS: status}), "write down how the job has ended")
        if phase is Phase.FAILED:
            change = {"spec": {"backoffLimit": 0}}
            await request(partial(self._client.patch, "Job", master_name(self._job), change), "end the job")

    async def _write(self, texts: dict[str, str], end: int | None = None) -> None:
        """Write these with the journal up to this byte. Whatever else is there stays."""
        async with self._writing:
            if self._unsure_to is not None:
                await self._move_to_older(self._unsure_to)
            # In a thread, as compressing takes a tenth of a second or more.
            packed, reached = await asyncio.to_thread(self._pack, texts, end)
            await self._state.patch({"data": head(self._number) if JOURNAL in packed else {}, "binaryData": packed})
            self._size = sum(map(len, packed.values()))
            if len(packed.get(JOURNAL, "")) > self._part_bytes:
                await self._move_to_older(reached)

    def _pack(self, texts: dict[str, str], end: int | None) -> tuple[dict[str, str], int]:
        """Also returns the byte up to which the journal is packed."""
        packed = {name: pack(text) for name, text in texts.items()}
        if not self._journal.exists():
            return packed, 0
        lines = self._lines(self._newest_from, end)
        room = MOST_STATE_BYTES - sum(map(len, packed.values()))
        return {**packed, JOURNAL: _packed_lines(lines, max(room, 0))}, self._newest_from + len(lines)

    async def _move_to_older(self, end: int) -> None:
        """Make the journal up to this byte, which is written, its older part.

        Raises:
            NotWrittenError: for the second time it is unknown whether it was written.
        """
        packed = await asyncio.to_thread(lambda: _packed_lines(self._lines(0, end), MOST_BYTES))
        again, self._unsure_to = self._unsure_to is not None, None
        try:
            await self._older.patch({"data": head(self._number + 1), "binaryData": {JOURNAL: packed}})
        except NotWrittenError as error:
            if error.uncertain:
                self._unsure_to = end
                if again:
                    raise
            self._part_bytes += PART_BYTES
            return
        self._number, self._newest_from, self._part_bytes = self._number + 1, end, PART_BYTES

    def _lines(self, start: int, end: int | None) -> bytes:
        """The whole lines of the journal between two bytes, without one that is still being written."""
        with self._journal.open("rb") as file:
            file.seek(start)
            whole, newline, _ = file.read(-1 if end is None else max(end - start, 0)).rpartition(b"\n")
        return whole + newline


def _packed_lines(lines: bytes, most: int) -> str:
    return pack_journal(lines.decode(errors="replace"), most)


async def request(ask: Callable[[], T], what: str) -> T:
    """Ask until there is an answer.

    Raises:
        UnreachableError: the cluster does not answer.
    """
    return await retry(lambda: asyncio.to_thread(ask), what, Backoff(random.Random()), TIMEOUT)
