"""What a master asks of its cluster: the ports, and their implementations over the shared client. All of it blocks."""

from __future__ import annotations

from typing import Protocol

from elasticdl.common.credentials import Role
from elasticdl.kubernetes.client import Client, Object
from elasticdl.kubernetes.manifests.names import master_name, selector, state_name
from elasticdl.kubernetes.watch import Source

# What is over is kept for its log.
_NOT_OVER = "status.phase!=Succeeded,status.phase!=Failed"


class PodApi(Protocol):
    """What is done to worker pods; every method raises `ApiError`."""

    def create(self, manifest: Object) -> Object: ...

    def read(self, name: str) -> Object: ...

    def delete(self, name: str, grace: int | None) -> bool:
        """Whether there was any. ``grace`` in seconds; None: the pod's own, 0: forget it, whatever its process does."""

    def delete_all(self, grace: int) -> None:
        """Those of the job that are not over."""


class WorkerPodApi:
    """`PodApi` of one job's workers."""

    def __init__(self, client: Client, job: str) -> None:
        self._client = client
        self._selector = selector(job, Role.WORKER)

    def create(self, manifest: Object) -> Object:
        return self._client.create(manifest)

    def read(self, name: str) -> Object:
        return self._client.read("Pod", name)

    def delete(self, name: str, grace: int | None) -> bool:
        return self._client.delete("Pod", name, grace)

    def delete_all(self, grace: int) -> None:
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
        return self._client.patch("ConfigMap", self._state, change)


def pod_source(client: Client, job: str) -> Source:
    return Source(client, "Pod", label_selector=selector(job, Role.WORKER))


def event_source(client: Client) -> Source:
    """Events about any pod; those of a job can't be chosen, as events have no labels."""
    return Source(client, "Event", field_selector="involvedObject.kind=Pod")
