"""A job's snapshot, journal and last status in its ConfigMap, where the next master and the command line find them.

Their format is in `elasticdl.kube.packed_state`. One write takes a snapshot and the journal, both of the same moment.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from elasticdl.common.backoff import Backoff
from elasticdl.common.errors import ReplacedError, UserError
from elasticdl.common.retry import retry
from elasticdl.kube.client import CONFLICT, ApiError, Client
from elasticdl.kube.names import master_name, state_name
from elasticdl.kube.packed_state import (
    HOLDER,
    JOURNAL,
    MEMORY,
    STATUS,
    encoded,
    head,
    pack,
    packed_piece,
    unpack_state,
    whole_pieces,
)
from elasticdl.kube.pod import Manifest
from elasticdl.master.core.values import Phase
from elasticdl.master.core.worker_record import Snapshot

# If only the journal has grown, at least so long after the last write is the next; longer, the more there is to write.
NEWS_SECONDS = 1.0
BYTES_PER_SECOND = 40_000
# A state that does not change is written so often.
IDLE_SECONDS = 60.0
# A ConfigMap may have 1 MiB. Of a journal that is longer, packed, the oldest pieces are dropped.
MOST_BYTES = 1_000_000
MOST_JOURNAL_BYTES = 400_000
# So long the cluster may take to answer at the beginning, and to take the last status at the end.
TIMEOUT = 120.0
ATTEMPTS = 5  # to write what others change at the same time

T = TypeVar("T")


class ClusterState:
    """The `SnapshotStore` of a master on a cluster, and the keeper of its journal. Used on one event loop.

    ``holder``: the mark of this master.
    """

    def __init__(
        self,
        client: Client,
        job: str,
        holder: str,
        journal: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._job = job
        self._journal = journal
        self._clock = clock
        self._state = FencedConfigMap(client, state_name(job), holder)
        self._writing = asyncio.Lock()
        self._pieces: deque[bytes] = deque()  # of the journal, packed, the oldest first
        self._packed_to = 0  # the journal's first byte that is in none of them
        self._saved: object = None
        self._saved_at = 0.0
        self._size = 0  # of what was written last
        self.next_worker = 0  # number of the first worker that no master before this one has launched
        self.status: Callable[[], str] = str  # what is saved of it with each snapshot, unless it is empty

    async def claim(self) -> Manifest:
        """Make this the job's master. Returns what is there; from then on an earlier master can't write any more.

        Raises:
            UnreachableError: the cluster does not answer.
        """
        async with self._writing:
            return await self._retried(self._state.claim, "read the job's state")

    async def _retried(self, ask: Callable[[], Awaitable[T]], what: str) -> T:
        return await retry(ask, what, Backoff(random.Random()), TIMEOUT)

    async def load(self) -> Snapshot | None:
        """Also makes this the job's master, and puts the journal so far into its file.

        Raises:
            UserError: what is there can't be read.
            UnreachableError: the cluster does not answer.
        """
        found = await self.claim()
        try:
            state = unpack_state(found)
            snapshot = Snapshot.from_json(state.memory) if state.memory else None
        except ValueError as error:
            raise UserError(f"what an earlier master has left can't be read: {error}") from None
        whole, newline, _ = state.journal.rpartition("\n")  # so that the next entry begins a line
        self._journal.write_text(whole + newline)
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
            packed = await asyncio.to_thread(self._pack, texts, end)  # in a thread, as it may take a tenth of a second
            await self._state.patch({"data": head() if JOURNAL in packed else {}, "binaryData": packed})
            self._size = sum(map(len, packed.values()))

    def _pack(self, texts: dict[str, str], end: int | None) -> dict[str, str]:
        packed = {name: pack(text) for name, text in texts.items()}
        if not self._journal.exists():
            return packed
        lines = self._lines(self._packed_to, end)
        for piece in whole_pieces(lines):
            self._pieces.append(packed_piece(piece))
            self._packed_to += len(piece)
            lines = lines[len(piece) :]
        newest = packed_piece(lines)
        room = min(MOST_JOURNAL_BYTES, MOST_BYTES - sum(map(len, packed.values())))
        while len(journal := encoded([*self._pieces, newest])) > room and self._pieces:
            self._pieces.popleft()
        return {**packed, JOURNAL: journal if len(journal) <= room else ""}

    def _lines(self, start: int, end: int | None) -> bytes:
        """The whole lines of the journal between two bytes, without one that is still being written."""
        with self._journal.open("rb") as file:
            file.seek(start)
            whole, newline, _ = file.read(-1 if end is None else max(end - start, 0)).rpartition(b"\n")
        return whole + newline


class FencedConfigMap:
    """A ConfigMap that only one master of a job may write.

    Writing is fenced: a master that finds another one's mark there has been replaced, as after its node was cut off, and
    writes no more. A write that may or may not have been done is done again.

    ``holder``: the mark of this master.
    """

    def __init__(self, client: Client, name: str, holder: str) -> None:
        self._client = client
        self._name = name
        self._holder = holder
        self._version = ""  # empty: to be asked for

    async def claim(self) -> Manifest:
        """Take over whatever is there, which is returned. From then on an earlier master can't write any more.

        Raises:
            ApiError: it could not be done, or nobody knows.
        """
        return await self._send({"metadata": {"annotations": {HOLDER: self._holder}}})

    async def patch(self, change: Manifest) -> None:
        """Change what this master has written last.

        Raises:
            ReplacedError: another master has taken it over.
            OSError: it could not be done, or nobody knows.
        """
        for _ in range(ATTEMPTS):
            try:
                version = self._version or await self._ask_for_version()
                await self._send({**change, "metadata": {"resourceVersion": version}})
            except ApiError as failure:
                if failure.status != CONFLICT:
                    raise OSError(str(failure)) from failure
            else:
                return
        raise OSError(f"the ConfigMap {self._name} changes under every attempt to write it")

    async def _send(self, change: Manifest) -> Manifest:
        self._version = ""  # nobody knows, until there is an answer
        done = await asyncio.to_thread(self._client.patch, "ConfigMap", self._name, change)
        self._version = done["metadata"]["resourceVersion"]
        return done

    async def _ask_for_version(self) -> str:
        found = await asyncio.to_thread(self._client.read, "ConfigMap", self._name)
        holder = (found["metadata"].get("annotations") or {}).get(HOLDER, "")
        if holder != self._holder:
            raise ReplacedError(f"another master has taken over: pod {holder}")
        return str(found["metadata"]["resourceVersion"])


async def request(ask: Callable[[], T], what: str) -> T:
    """Ask until there is an answer.

    Raises:
        UnreachableError: the cluster does not answer.
    """
    return await retry(lambda: asyncio.to_thread(ask), what, Backoff(random.Random()), TIMEOUT)
