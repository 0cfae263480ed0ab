"""The open sessions: a queue of outgoing messages for each worker, and the key-value entries that workers share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from typing import Generic, TypeAlias, TypeVar

from elasticdl.job.shared_values import FACTS, MOST_FACTS
from elasticdl.proto import elasticdl_pb2 as pb

Message = TypeVar("Message")


class Outbox(Generic[Message]):
    """Messages that are yet to be sent over one stream."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[Message | None] = asyncio.Queue()
        self.replaced = False

    def put(self, message: Message) -> None:
        self.waiting.put_nowait(message)

    def close(self, *, replaced: bool = False) -> None:
        self.replaced = replaced
        self.waiting.put_nowait(None)

    async def messages(self) -> AsyncIterator[Message]:
        """Until it is closed."""
        while (message := await self.waiting.get()) is not None:
            yield message


SessionOutbox: TypeAlias = Outbox[pb.MasterMessage]


class Sessions:
    """A worker has at most one session; a newer one ends the older.

    An entry that a member puts into the key-value store of its world is passed on to the other members. A later world
    does not see it.
    """

    def __init__(self, taken: Mapping[int, int] | None = None) -> None:
        """``taken``: by worker, the number of its last message that an earlier master has taken and saved."""
        self._outboxes: dict[int, SessionOutbox] = {}
        self.taken = dict(taken or {})
        self._unsaved: set[int] = set()  # workers that wait to hear that what they have said is saved
        self._version = 0
        self._members: Collection[int] = ()
        self._entries: dict[tuple[str, str], pb.MasterMessage] = {}  # by scope and key
        # Put before a world was known: a new master learns the world from its workers.
        self._early: list[tuple[int, pb.KvPut]] = []
        self.facts = b""  # see `FACTS`; workers that come later are given it

    def open(self, worker_id: int) -> SessionOutbox:
        if older := self._outboxes.get(worker_id):
            older.close(replaced=True)
        outbox = self._outboxes[worker_id] = SessionOutbox()
        return outbox

    def close(self, worker_id: int, outbox: SessionOutbox) -> bool:
        """End this session; returns whether it was the worker's present one."""
        present = self._outboxes.get(worker_id) is outbox
        if present:
            del self._outboxes[worker_id]
        return present

    def send(self, worker_ids: Iterable[int], message: pb.MasterMessage) -> None:
        """A worker without a session misses it; the core sends it again when the worker reconnects."""
        for worker_id in worker_ids:
            if outbox := self._outboxes.get(worker_id):
                outbox.put(message)

    def take(self, worker_id: int, number: int) -> bool:
        """Whether a message of this number is new; 0 is no number. A worker repeats a message until it is saved."""
        if number == 0:
            return True
        self._unsaved.add(worker_id)
        last = self.taken.get(worker_id, 0)
        self.taken[worker_id] = max(number, last)
        return number > last

    @property
    def has_unsaved(self) -> bool:
        return bool(self._unsaved)

    def saving(self) -> dict[int, int]:
        """A save has begun. Returns by worker the number that `saved` is to tell once it is done."""
        unsaved, self._unsaved = self._unsaved, set()
        return {worker_id: self.taken[worker_id] for worker_id in unsaved}

    def saved(self, numbers: Mapping[int, int]) -> None:
        for worker_id, number in numbers.items():
            self.send((worker_id,), pb.MasterMessage(saved=pb.Saved(number=number)))

    def begin_world(self, version: int, members: Collection[int]) -> None:
        """From now on entries are those of this world."""
        self._version, self._members, self._entries = version, members, {}
        early, self._early = self._early, []
        for worker_id, put in early:
            self.put(worker_id, put)

    def put(self, worker_id: int, put: pb.KvPut) -> None:
        """In a new session a member puts everything again; an entry that is known is not passed on twice."""
        if self._version == 0:
            self._early.append((worker_id, put))
        if put.world_version != self._version or worker_id not in self._members:
            return
        if (put.scope, put.key) == FACTS:
            self.facts = put.value if len(put.value) <= MOST_FACTS else b""
            return
        entry = pb.KvEntry(world_version=put.world_version, scope=put.scope, key=put.key, value=put.value)
        message, name = pb.MasterMessage(kv_entry=entry), (put.scope, put.key)
        if self._entries.get(name) != message:
            self._entries[name] = message
            self.send((other for other in self._members if other != worker_id), message)

    def replay(self, worker_id: int) -> None:
        """Send every entry again to a member that has reconnected, as it may have missed some."""
        if worker_id in self._members:
            for message in self._entries.values():
                self.send((worker_id,), message)
