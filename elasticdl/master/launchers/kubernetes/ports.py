"""What a master asks of its cluster, over the shared client. All of it blocks, and raises `ApiError`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TypeVar

from elasticdl.common.credentials import Role
from elasticdl.kubernetes.client import Client, Object
from elasticdl.kubernetes.manifests.names import master_name, selector, state_name
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


class OwnJobApi:
    """The master's own Job, the pods of its masters, and the ConfigMap of its state."""

    def __init__(self, client: Client, job: str) -> None:
        self._client = client
        self._job = master_name(job)
        self._state = state_name(job)
        self._masters = selector(job, Role.MASTER)

    def masters(self) -> list[Object]:
        """The pods of the job's masters, this one's and those before it."""
        return self._client.list("Pod", label_selector=self._masters)

    def read_job(self) -> Object:
        return self._client.read("Job", self._job)

    def patch_job(self, change: Object) -> Object:
        return self._client.patch("Job", self._job, change)

    def read_state(self) -> Object:
        return self._client.read("ConfigMap", self._state)

    def patch_state(self, change: Object) -> Object:
        """Merge; with a ``resourceVersion`` only into that version, else 409."""
        return self._client.patch("ConfigMap", self._state, change)


async def request(ask: Callable[[], T], what: str) -> T:
    """Ask until there is an answer.

    Raises:
        UnreachableError: the cluster does not answer.
    """
    return await retry(lambda: asyncio.to_thread(ask), what, Backoff(random.Random()), PATIENCE)
