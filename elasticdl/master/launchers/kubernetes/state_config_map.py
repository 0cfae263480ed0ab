"""A job's memory, journal and last status in its state ConfigMap, where the next master and the command line find them.

Writing is fenced: a master that finds another one's mark there has been replaced, as after its node was cut off, and
writes no more. A write that may or may not have been done is done again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.common.journal import read_journal
from elasticdl.kubernetes.api_error import ApiError
from elasticdl.kubernetes.manifests.packed_state import HOLDER, JOURNAL, MEMORY, STATUS, Packer, State, unpack_state
from elasticdl.kubernetes.retry import Backoff
from elasticdl.master.core.snapshot import Snapshot

# The journal alone is written so often at most, and less often the longer it is.
JOURNAL_SECONDS = 1.0
BYTES_PER_SECOND = 100_000
# A ConfigMap may have 1 MiB; of a journal that is longer the older half goes.
MOST_BYTES = 600_000
ATTEMPTS = 5
CLAIM_SECONDS = 120.0  # for the cluster to answer a master that starts
_CONFLICT = 409

Manifest = dict[str, Any]


class StateApi(Protocol):
    """One ConfigMap. Both methods raise `ApiError`."""

    def read_state(self) -> Manifest: ...

    def patch_state(self, change: Manifest) -> Manifest:
        """Merge; with a ``resourceVersion`` only into that version, else 409."""


class ReplacedError(OSError):
    """Another master has taken over."""


@dataclass(frozen=True, slots=True)
class Mark:
    """``holder``: who this master is; ``replaced`` is called when it is not the job's any more."""

    holder: str
    replaced: Callable[[], None]


class ClusterState:
    """The `SnapshotStore` of a master on a cluster, and the keeper of its journal. Used on one event loop."""

    def __init__(self, api: StateApi, mark: Mark, journal: Path) -> None:
        self._api = api
        self._mark = mark
        self._journal = journal
        self._packer = Packer()
        self._read = 0  # bytes of the journal that are packed
        self._version = ""  # empty: to be asked for
        self._writing = asyncio.Lock()
        self._status: Callable[[], str] = str

    def show(self, status: Callable[[], str]) -> None:
        """From now on the status is saved with each memory, unless it is empty."""
        self._status = status

    async def claim(self) -> Manifest:
        """Make this the job's master; returns what is there the moment in which an earlier one can't write any more.

        Raises:
            UnreachableError: the cluster does not answer.
        """
        async with self._writing:
            return await self._claim()

    async def load(self) -> Snapshot | None:
        """Also makes this the job's master, and puts the journal so far into its file.

        Raises:
            UserError: what is there can't be read.
            UnreachableError: the cluster does not answer.
        """
        found = await self.claim()
        try:
            state = unpack_state(found)
            memory = Snapshot.from_json(state.memory) if state.memory else None
            self._journal.write_text(_repaired(state))
            # The journal may be newer than the memory; whose end it has told is not to be missed once more.
            gone = {entry["worker"] for entry in read_journal(self._journal) if entry["event"] == "worker_left"}
        except ValueError as error:
            raise UserError(f"what an earlier master has left can't be read: {error}") from None
        return memory.without_workers(gone) if memory else None

    async def save(self, memory: Snapshot) -> None:
        """With the journal so far, which explains it. Raises OSError if it can't be done now."""
        status = {STATUS: text} if (text := self._status()) else {}
        await self._write({MEMORY: memory.to_json(), **status})

    async def finish(self, status: str) -> None:
        """The job is over: ``status`` is its last. Raises OSError if it can't be done now."""
        await self._write({STATUS: status})

    @asynccontextmanager
    async def keeping_journal(self) -> AsyncIterator[None]:
        """While it is open, what is added to the journal's file is written soon."""
        task = asyncio.create_task(self._keep_journal())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _keep_journal(self) -> None:
        size = 0
        while True:
            await asyncio.sleep(max(JOURNAL_SECONDS, size / BYTES_PER_SECOND))
            if self._has_grown():
                with contextlib.suppress(OSError):  # the next time, then
                    await self._write({})
            size = len(self._packer.packed())

    def _has_grown(self) -> bool:
        return self._journal.stat().st_size > self._read

    async def _write(self, data: dict[str, str]) -> None:
        """What could not be loaded stays as it is."""
        async with self._writing:
            journal = {"binaryData": {JOURNAL: self._packed()}} if self._journal.exists() else {}
            await self._patch({"data": data, **journal})

    def _packed(self) -> str:
        """The journal so far, less a line that is still being written, and less the oldest if it is too long."""
        with self._journal.open("rb") as file:
            file.seek(self._read)
            whole, _, _ = file.read().rpartition(b"\n")
        if whole:
            self._packer.add(whole.decode() + "\n")
            self._read += len(whole) + 1
        if len(packed := self._packer.packed()) <= MOST_BYTES:
            return packed
        lines = self._journal.read_bytes()[: self._read].decode().splitlines(keepends=True)
        self._packer = Packer()
        self._packer.add("".join(lines[len(lines) // 2 :]))
        return self._packer.packed()

    async def _claim(self) -> Manifest:
        deadline, backoff = time.monotonic() + CLAIM_SECONDS, Backoff(random.Random())
        while True:
            try:
                return await self._patch({"metadata": {"annotations": {HOLDER: self._mark.holder}}}, whoever=True)
            except OSError as error:
                delay = backoff.delay()
                if time.monotonic() + delay > deadline:
                    raise UnreachableError(f"can't read the job's state: {error}") from error
            await asyncio.sleep(delay)

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
                done = await asyncio.to_thread(self._api.patch_state, {**change, "metadata": metadata})
            except ApiError as failure:
                if failure.status != _CONFLICT:
                    raise OSError(str(failure)) from failure
                version = ""
            else:
                self._version = done["metadata"]["resourceVersion"]
                return done
        raise OSError("the job's state changes under every attempt to write it")

    async def _ask_for_version(self, whoever: bool) -> str:
        found = await asyncio.to_thread(self._api.read_state)
        holder = (found["metadata"].get("annotations") or {}).get(HOLDER, "")
        if not whoever and holder != self._mark.holder:
            self._mark.replaced()
            raise ReplacedError(f"another master has taken over: pod {holder}")
        return str(found["metadata"]["resourceVersion"])


def _repaired(state: State) -> str:
    """Only whole lines, so that the next entry begins one."""
    whole, newline, _ = state.journal.rpartition("\n")
    return whole + newline
