"""A job's pods and the events about them: one list, then two watches that go on from it. Used on one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from elasticdl.kubernetes.retry import Backoff, retry
from elasticdl.kubernetes.watch import Listing, Receiver, Source, Watch
from elasticdl.master.launchers.kubernetes.task_runner import TaskRunner


@dataclass(frozen=True, slots=True)
class View:
    """One kind of objects, and who is told of them, in a thread of the watch."""

    source: Source
    receiver: Receiver


class PodInformer:
    """``backoff`` makes one for each who needs it; what blocks is done by the ``runner``."""

    def __init__(self, pods: View, events: View, runner: TaskRunner, backoff: Callable[[], Backoff]) -> None:
        self._pods = Watch(pods.source, pods.receiver, backoff(), time.monotonic)
        self._events = Watch(events.source, events.receiver, backoff(), time.monotonic)
        self._source = pods.source
        self._runner = runner
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
        return await retry(
            lambda: self._runner.call(self._source.list), "list the workers' pods", self._backoff(), seconds
        )
