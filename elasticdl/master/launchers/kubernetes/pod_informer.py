"""A job's pods and the events about them: one list, then two watches that go on from it. Used on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from elasticdl.kubernetes.retry import Backoff, retry
from elasticdl.kubernetes.watch import Listing, Watch


class PodInformer:
    """``ask`` lists the pods; ``pods`` and ``events`` are begun with that list."""

    def __init__(self, pods: Watch, events: Watch, ask: Callable[[], Awaitable[Listing]], backoff: Backoff) -> None:
        self._pods = pods
        self._events = events
        self._ask = ask
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
            listing = retry(self._ask, "list the workers' pods", self._backoff, seconds)
            self._opening = asyncio.get_running_loop().create_task(listing)
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
