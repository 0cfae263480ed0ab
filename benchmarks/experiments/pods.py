"""The pods of a namespace as they change, and what of them matters here."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from kubernetes import client

from elasticdl.common.backoff import Backoff
from elasticdl.job.quantities import GPU
from elasticdl.kube.client import Client
from elasticdl.kube.manifests.names import JOB_LABEL, ROLE_LABEL
from elasticdl.kube.object_watch import Source, Watch

Pod = dict[str, Any]
Pods = Mapping[str, Pod]


def wanted_gpus(pod: Pod) -> int:
    limits = (each.get("resources", {}).get("limits") or {} for each in pod["spec"]["containers"])
    return sum(int(each.get(GPU, 0)) for each in limits)


def held_gpus(pod: Pod) -> int:
    """From the pod's binding to its end."""
    return wanted_gpus(pod) if pod["spec"].get("nodeName") and not is_over(pod) else 0


def is_over(pod: Pod) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def owner_of(pod: Pod) -> str:
    """The elasticdl job, else the app label, else the pod itself."""
    labels = pod["metadata"].get("labels") or {}
    return str(labels.get(JOB_LABEL) or labels.get("app") or pod["metadata"]["name"])


def role_of(pod: Pod) -> str:
    """Of an elasticdl job's pod: master or worker."""
    return str((pod["metadata"].get("labels") or {}).get(ROLE_LABEL, ""))


class PodWatch:
    """Tells all pods of a namespace, by name, after each change, in a thread of its own, while its context lasts."""

    def __init__(self, core: client.CoreV1Api, namespace: str, tell: Callable[[Pods], None]) -> None:
        self._pods: Pods = {}
        self._tell = tell
        source = Source(Client(core.api_client, namespace), "Pod")
        self._watch = Watch(source, self.listed, self.changed, Backoff(random.Random(), 0.1, 2.0))

    def __enter__(self) -> Self:
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._watch.stop()
        self._watch.join()

    def listed(self, items: tuple[Pod, ...]) -> None:
        self._pods = {pod["metadata"]["name"]: pod for pod in items}
        self._tell(self._pods)

    def changed(self, kind: str, item: Pod) -> None:
        name = item["metadata"]["name"]
        others = {other: pod for other, pod in self._pods.items() if other != name}
        self._pods = others if kind == "DELETED" else {**others, name: item}
        self._tell(self._pods)
