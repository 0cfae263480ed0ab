"""A job's snapshot, journal and last status in its ConfigMap, where the next master and the command line find them.

It is all that is left of a job's course when its master is gone. One write takes a snapshot and the journal, both of the same
moment.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import gzip
import json
import random
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from elasticdl.common.backoff import Backoff
from elasticdl.common.errors import ReplacedError, UserError
from elasticdl.common.retry import retry
from elasticdl.kube.client import CONFLICT, ApiError, Client, NotDoneError
from elasticdl.kube.manifests import Manifest
from elasticdl.kube.names import master_name, state_name
from elasticdl.master.core.values import Phase
from elasticdl.master.core.worker_record import Snapshot

# Raised only if older readers would misunderstand what is written; they ignore what they do not know. Format 1 had the older
# part of a long journal in a ConfigMap of its own: such a journal is taken to begin later.
FORMAT = 2
HEAD = "head.json"
MEMORY = "memory.json.gz"
STATUS = "status.json.gz"
JOURNAL = "journal.jsonl.gz"
# Which master wrote it last, a pod's uid: whoever finds another one's has been replaced.
HOLDER = "elasticdl.org/holder"
# If only the journal has grown, at least so long after the last write is the next; longer, the more there is to write.
NEWS_SECONDS = 1.0
BYTES_PER_SECOND = 40_000
# A state that does not change is written so often.
IDLE_SECONDS = 60.0
# A ConfigMap may have 1 MiB. Of a journal that is longer, packed, the oldest quarter is dropped.
MOST_BYTES = 1_000_000
MOST_JOURNAL_BYTES = 400_000
# So long the cluster may take to answer at the beginning, and to take the last status at the end.
TIMEOUT = 120.0
# So long a right may be missing that has just been given.
RIGHTS_SECONDS = 10.0
ATTEMPTS = 5  # to write what others change at the same time

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class State:
    """Empty text for what has not been written."""

    memory: str = ""
    status: str = ""
    journal: str = ""


def unpack_state(state: Mapping[str, Any]) -> State:
    """
    Raises:
        ValueError: it is damaged, or a later version of this package wrote it.
    """
    try:
        written = int(json.loads((state.get("data") or {}).get(HEAD, "{}")).get("format", FORMAT))
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{HEAD} in the job's state is damaged: {error}") from None
    if written > FORMAT:
        raise ValueError(
            f"the job's state has format {written}, and this elasticdl knows {FORMAT}: use a later version"
        )
    return State(_unpacked(state, MEMORY), _unpacked(state, STATUS), _unpacked(state, JOURNAL))


def pack(text: bytes) -> str:
    return base64.b64encode(gzip.compress(text, compresslevel=6, mtime=0)).decode()


def _unpacked(config_map: Mapping[str, Any], name: str) -> str:
    try:
        packed = base64.b64decode((config_map.get("binaryData") or {}).get(name, ""))
        return gzip.decompress(packed).decode(errors="replace")
    except (OSError, EOFError, zlib.error, binascii.Error) as error:
        raise ValueError(f"{name} in the job's state is damaged: {error}") from None


class ClusterState:
    """The `SnapshotStore` of a master on a cluster, and the keeper of its journal. Used on one event loop.

    Writing is fenced: a master that finds another one's mark there has been replaced, as after its node was cut off, and
    writes no more. A write that may or may not have been done is done again.

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
        self._name = state_name(job)
        self._holder = holder
        self._version = ""  # of what this master has written last; empty: to be asked for
        self._writing = asyncio.Lock()
        self._begin = 0  # the journal's first byte that is kept
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
            mark = {"metadata": {"annotations": {HOLDER: self._holder}}}
            self._version = ""  # nobody knows, until there is an answer
            done = await request(partial(self._client.patch, "ConfigMap", self._name, mark), "read the job's state")
            self._version = done["metadata"]["resourceVersion"]
            return done

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
        write = partial(self._write, {STATUS: status})
        await retry(write, "write down how the job has ended", Backoff(random.Random()), TIMEOUT)
        if phase is Phase.FAILED:
            change = {"spec": {"backoffLimit": 0}}
            await request(partial(self._client.patch, "Job", master_name(self._job), change), "end the job")

    async def _write(self, texts: dict[str, str], end: int | None = None) -> None:
        """Write these with the journal up to this byte. Whatever else is there stays."""
        async with self._writing:
            packed = await _whole(self._pack, texts, end)  # which may take a tenth of a second
            await self._put(packed)

    async def _put(self, packed: dict[str, str]) -> None:
        """
        Raises:
            ReplacedError: another master has taken over.
            OSError: it could not be done, or nobody knows.
        """
        # A state that could not be read keeps its format.
        head = {HEAD: json.dumps({"format": FORMAT})} if JOURNAL in packed else {}
        for _ in range(ATTEMPTS):
            try:
                version = {"resourceVersion": self._version or await self._ask_for_version()}
                await self._send({"metadata": version, "data": head, "binaryData": packed})
            except ApiError as failure:
                if failure.status != CONFLICT:
                    raise OSError(str(failure)) from failure
            else:
                self._size = sum(map(len, packed.values()))
                return
        raise OSError(f"the ConfigMap {self._name} changes under every attempt to write it")

    async def _send(self, change: Manifest) -> None:
        self._version = ""  # nobody knows, until there is an answer
        done = await _whole(self._client.patch, "ConfigMap", self._name, change)
        self._version = done["metadata"]["resourceVersion"]

    async def _ask_for_version(self) -> str:
        found = await _whole(self._client.read, "ConfigMap", self._name)
        holder = (found["metadata"].get("annotations") or {}).get(HOLDER, "")
        if holder != self._holder:
            raise ReplacedError(f"another master has taken over: pod {holder}")
        return str(found["metadata"]["resourceVersion"])

    def _pack(self, texts: dict[str, str], end: int | None) -> dict[str, str]:
        packed = {name: pack(text.encode()) for name, text in texts.items()}
        if not self._journal.exists():
            return packed
        room = min(MOST_JOURNAL_BYTES, MOST_BYTES - sum(map(len, packed.values())))
        with self._journal.open("rb") as file:
            file.seek(self._begin)
            whole, newline, _ = file.read(-1 if end is None else max(end - self._begin, 0)).rpartition(b"\n")
        lines = whole + newline  # without one that is still being written
        while len(journal := pack(lines)) > room and lines:
            oldest = lines.index(b"\n", len(lines) // 4) + 1
            self._begin, lines = self._begin + oldest, lines[oldest:]
        return {**packed, JOURNAL: journal}


async def _whole(ask: Callable[..., T], *arguments: object) -> T:
    """Do what blocks. A thread can't be stopped: who is cancelled meanwhile waits for it, so that it does nothing after what comes next."""
    asking = asyncio.ensure_future(asyncio.to_thread(ask, *arguments))
    try:
        return await asyncio.shield(asking)
    except asyncio.CancelledError:
        await asyncio.gather(asking, return_exceptions=True)  # what it raises is no news any more
        raise


async def request(ask: Callable[[], T], what: str) -> T:
    """Ask until there is an answer.

    Raises:
        NotDoneError: the master's account has not the right to ask for it.
        UnreachableError: the cluster does not answer.
    """
    begun = time.monotonic()

    def lasting(failure: Exception) -> bool:
        return isinstance(failure, NotDoneError) and failure.by_rights and time.monotonic() - begun > RIGHTS_SECONDS

    return await retry(lambda: asyncio.to_thread(ask), what, Backoff(random.Random()), TIMEOUT, lasting=lasting)
