"""What a master asks of its cluster, over the shared client. All of it blocks, and raises `ApiError`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TypeVar

from elasticdl.common.credentials import Role
from elasticdl.kubernetes.client import Client, Object
from elasticdl.kubernetes.manifests.names import selector
from elasticdl.kubernetes.retry import Backoff, retry
from elasticdl.kubernetes.watch import KindSource, Source

# What is over is kept for its log.
_NOT_OVER = "status.phase!=Succeeded,status.phase!=Failed"
# For the cluster to answer at the beginning, and to take the last status at the end.
PATIENCE = 120.0
T = TypeVar("T")


class WorkerPodApi:
    """The pods of one job's workers, and the events about any pod: those of a job can't be chosen, having no labels."""

    def __init__(self, client: Client, job: str) -> None:
        self._client = client
        self._selector = selector(job, Role.WORKER)
        self.pods: Source = KindSource(client, "Pod", label_selector=self._selector)
        self.events: Source = KindSource(client, "Event", field_selector="involvedObject.kind=Pod")

    def create(self, manifest: Object) -> Object:
        return self._client.create(manifest)

    def read(self, name: str) -> Object:
        return self._client.read("Pod", name)

    def delete(self, name: str, grace: int | None) -> bool:
        """Whether there was any. ``grace`` in seconds; None: the pod's own, 0: forget it, whatever its process does."""
        return self._client.delete("Pod", name, grace)

    def delete_all(self, grace: int) -> None:
        """Those that are not over."""
        self._client.delete_all("Pod", grace, label_selector=self._selector, field_selector=_NOT_OVER)


async def request(ask: Callable[[], T], what: str) -> T:
    """Ask until there is an answer.

    Raises:
        UnreachableError: the cluster does not answer.
    """
    return await retry(lambda: asyncio.to_thread(ask), what, Backoff(random.Random()), PATIENCE)
