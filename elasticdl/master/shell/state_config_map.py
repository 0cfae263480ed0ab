"""A job's snapshot, journal and last status in its state ConfigMap, where the next master and the command line find them.

Writing is fenced: a master that finds another one's mark there has been replaced, as after its node was cut off, and
writes no more. A write that may or may not have been done is done again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from elasticdl.common.backoff import Backoff
from elasticdl.common.errors import UserError
from elasticdl.job.journal import thinned
from elasticdl.kube.api_error import CONFLICT, ApiError
from elasticdl.kube.client import Client
from elasticdl.kube.manifests.names import master_name, state_name
from elasticdl.kube.manifests.packed_state import HOLDER, JOURNAL, MEMORY, STATUS, Packer, unpack_state
from elasticdl.kube.retry import retry
from elasticdl.master.state.instructions import Phase
from elasticdl.master.state.snapshot import Snapshot

# For new entries of the journal alone it is written so often at most, and less often the longer the journal is.
NEWS_SECONDS = 1.0
BYTES_PER_SECOND = 100_000
# A ConfigMap may have 1 MiB. Of a journal that is longer when packed, the older half of what is kept goes.
MOST_BYTES = 600_000
# Long before, entries on steps are joined, so many to one, and again when it has grown by this: they push nothing out.
LONG_BYTES = 150_000
BUNCHES = (8, 64)
ATTEMPTS = 5
# For the cluster to answer at the beginning, and to take the last status at the end.
PATIENCE = 120.0

Manifest = dict[str, Any]
T = TypeVar("T")


class ReplacedError(OSError):
    """Another master has taken over."""


class ClusterState:
    """The `SnapshotStore` of a master on a cluster, and the keeper of its journal. Used on one event loop.

    ``holder``: the mark of this master; ``replaced`` is called when the job is not its any more.
    """

    def __init__(self, client: Client, job: str, holder: str, replaced: Callable[[], None], journal: Path) -> None:
        self._client = client
        self._job = job
        self._holder = holder
        self._replaced = replaced
        self._journal = journal
        self._packer = Packer()
        self._kept_from = 0  # the first byte of the journal that is packed
        self._bunch = 1  # entries on steps that are made one
        self._join_at = LONG_BYTES  # size beyond which that is done anew
        self._read = 0  # the byte behind the last one
        self._size = 0  # of what was packed last
        self._version = ""  # empty: to be asked for
        self._writing = asyncio.Lock()
        self.status: Callable[[], str] = str  # what is saved of it with each snapshot, unless it is empty

    async def claim(self) -> Manifest:
        """Make this the job's master; returns what is there the moment in which an earlier one can't write any more.

        Raises:
            UnreachableError: the cluster does not answer.
        """
        mark = {"metadata": {"annotations": {HOLDER: self._holder}}}
        async with self._writing:
            claim = partial(self._patch, mark, whoever=True)
            return await retry(claim, "read the job's state", Backoff(random.Random()), PATIENCE)

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
            whole, newline, _ = state.journal.rpartition("\n")  # so that the next entry begins a line
            self._journal.write_text(whole + newline)
        except ValueError as error:
            raise UserError(f"what an earlier master has left can't be read: {error}") from None
        return snapshot

    async def save(self, snapshot: Snapshot) -> None:
        """With the journal of the same moment. Raises OSError if it can't be done now."""
        status = {STATUS: text} if (text := self.status()) else {}
        await self._write({MEMORY: snapshot.to_json(), **status}, snapshot.journal_bytes)

    @property
    def news_seconds(self) -> float:
        return max(NEWS_SECONDS, self._size / BYTES_PER_SECOND)

    async def finish(self, status: str, phase: Phase) -> None:
        """The job is over, ``status`` is its last: unless it succeeded, have the Job start no other master.

        Raises:
            UnreachableError: the cluster does not take it.
        """
        write = partial(self._write, {STATUS: status})
        await retry(write, "write down how the job has ended", Backoff(random.Random()), PATIENCE)
        if phase is not Phase.SUCCEEDED:
            change = {"spec": {"backoffLimit": 0}}
            await request(partial(self._client.patch, "Job", master_name(self._job), change), "end the job")

    async def _write(self, data: dict[str, str], end: int | None = None) -> None:
        """With the journal up to this byte. What could not be loaded stays as it is."""
        async with self._writing:
            # In a thread, as compressing takes a tenth of a second or more.
            packed = await asyncio.to_thread(self._pack_journal, end) if self._journal.exists() else ""
            await self._patch({"data": data, **({"binaryData": {JOURNAL: packed}} if packed else {})})

    def _pack_journal(self, end: int | None = None) -> str:
        """The journal up to ``end``, less a line that is still being written, and less the oldest if it is too long."""
        packed = self._pack(self._read, end)
        if len(packed) > self._join_at:
            self._bunch = BUNCHES[self._bunch > 1]
            self._packer = Packer()
            packed = self._pack(self._kept_from, self._read)
            self._join_at = len(packed) + LONG_BYTES
        while len(packed) > MOST_BYTES:
            self._kept_from = self._middle()
            self._packer = Packer()
            packed = self._pack(self._kept_from, self._read)
        self._size = len(packed)
        return packed

    def _pack(self, start: int, end: int | None) -> str:
        """Add what stands in the journal from one byte to the other."""
        with self._journal.open("rb") as file:
            file.seek(start)
            whole, newline, _ = file.read(-1 if end is None else max(end - start, 0)).rpartition(b"\n")
        text = (whole + newline).decode(errors="replace")
        self._packer.add("".join(thinned(text.splitlines(keepends=True), self._bunch)) if self._bunch > 1 else text)
        self._read = start + len(whole + newline)
        return self._packer.packed()

    def _middle(self) -> int:
        """Where the first line begins in the newer half of what is kept; at its end if there is none."""
        with self._journal.open("rb") as file:
            file.seek((self._kept_from + self._read) // 2)
            file.readline()
            return min(file.tell(), self._read)

    async def _patch(self, change: Manifest, *, whoever: bool = False) -> Manifest:
        """Change what this master has written last; with ``whoever`` whatever is there.

        Raises:
            OSError: it could not be done, or nobody knows.
        """
        version = self._version
        for _ in range(ATTEMPTS):
            try:
                version = version or await self._ask_for_version(whoever)
                self._version = ""  # nobody knows, until there is an answer
                metadata = {**change.get("metadata", {}), "resourceVersion": version}
                change = {**change, "metadata": metadata}
                done = await asyncio.to_thread(self._client.patch, "ConfigMap", state_name(self._job), change)
            except ApiError as failure:
                if failure.status != CONFLICT:
                    raise OSError(str(failure)) from failure
                version = ""
            else:
                self._version = done["metadata"]["resourceVersion"]
                return done
        raise OSError("the job's state changes under every attempt to write it")

    async def _ask_for_version(self, whoever: bool) -> str:
        found = await asyncio.to_thread(self._client.read, "ConfigMap", state_name(self._job))
        holder = (found["metadata"].get("annotations") or {}).get(HOLDER, "")
        if not whoever and holder != self._holder:
            self._replaced()
            raise ReplacedError(f"another master has taken over: pod {holder}")
        return str(found["metadata"]["resourceVersion"])


async def request(ask: Callable[[], T], what: str) -> T:
    """Ask until there is an answer.

    Raises:
        UnreachableError: the cluster does not answer.
    """
    return await retry(lambda: asyncio.to_thread(ask), what, Backoff(random.Random()), PATIENCE)
