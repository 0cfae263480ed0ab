"""What is seen of a job's pods: one list, then two watches that go on from it. Used on one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from elasticdl.common.errors import UnreachableError
from elasticdl.master.launchers.kubernetes.api import ApiFailure, Listing, Source
from elasticdl.master.launchers.kubernetes.backoff import Backoff
from elasticdl.master.launchers.kubernetes.task_runner import TaskRunner
from elasticdl.master.launchers.kubernetes.watch import Receiver, Watch


@dataclass(frozen=True, slots=True)
class View:
    """One kind of objects, and who is told of them, in a thread of the watch."""

    source: Source
    receiver: Receiver


class PodInformer:
    """``backoff`` makes one for each who needs it; what blocks is done in ``room``."""

    def __init__(self, pods: View, events: View, room: TaskRunner, backoff: Callable[[], Backoff]) -> None:
        self._pods = Watch(pods.source, pods.receiver, backoff(), time.monotonic)
        self._events = Watch(events.source, events.receiver, backoff(), time.monotonic)
        self._source = pods.source
        self._room = room
        self._backoff = backoff
        self._opening: asyncio.Task[Listing] | None = None
        self._watching = False
        self.closed = False

    async def first(self, seconds: float) -> Listing:
        """The list from which the watches go on; asked for once, within so many seconds.

        Raises:
            UnreachableError: the cluster can't be asked.
        """
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._list(seconds))
        return await asyncio.shield(self._opening)

    def begins(self) -> bool:
        """Whether this is asked for the first time."""
        self._watching, before = True, self._watching
        return not before

    def watch(self, listing: Listing) -> None:
        """Go on from it."""
        self._pods.start(listing)
        self._events.start()

    async def close(self) -> None:
        """Returns when nobody is told anything any more."""
        self.closed = True
        if self._opening:
            self._opening.cancel()
        for watch in (self._pods, self._events):
            watch.stop()
        await asyncio.gather(*(asyncio.to_thread(watch.join) for watch in (self._pods, self._events)))

    async def _list(self, seconds: float) -> Listing:
        backoff, deadline = self._backoff(), time.monotonic() + seconds
        while True:
            try:
                return await self._room.call(self._source.list)
            except ApiFailure as failure:
                delay = backoff.delay(failure.retry_after)
                if time.monotonic() + delay > deadline:
                    raise UnreachableError(f"can't list the workers' pods: {failure}") from failure
            await asyncio.sleep(delay)
