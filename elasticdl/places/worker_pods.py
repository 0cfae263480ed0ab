"""The pods of a job's workers: how they are made, and what is asked of the cluster about them."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticdl.common.credentials import Role
from elasticdl.common.reason import flat
from elasticdl.job.quantities import Priority
from elasticdl.kube.client import FORBIDDEN, INVALID, ApiError, Client, Source, end_group
from elasticdl.kube.manifests import size_of
from elasticdl.kube.names import (
    KUEUE_GROUP_LABEL,
    PLACE_LABEL,
    WORKER_LABEL,
    group_name,
    job_reference,
    owner_uids,
    selector,
    worker_name,
)
from elasticdl.places.base import Limits

Manifest = dict[str, Any]
# What is over is kept for its log.
_NOT_OVER = "status.phase!=Succeeded,status.phase!=Failed"
_WRONG = (400, INVALID)
# Warnings about a pod that has no node yet: of the scheduler, and of Kueue while a group is not complete.
_BEFORE_THE_NODE = ("FailedScheduling", "ErrWorkloadCompose")
# What a node tells of a pod whose volumes are mounted.
_MOUNTED = ("Pulling", "Pulled", "Created", "Started")
_REFUSED = "FailedCreate"
_GROUP_WAITS = "the podgroup phase is Pending"  # so older Volcanos refuse pods of a gang for which there is no room yet
_log = logging.getLogger(__name__)


def owner_references(job: Manifest, state: Manifest) -> list[Manifest]:
    """Of the workers' pods. When the Job of the master is deleted, so are the workers.

    ``state``: the job's, as a ConfigMap. If it goes with the Job it is the workers' controller, without which `kubectl drain`
    takes pods for somebody's own. The Job can't be: it would disown pods that it did not start.
    """
    made, also = job_reference(job), state["metadata"]
    controller = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": also.get("name"),
        "uid": also["uid"],
        "controller": True,
    }
    return [made, controller] if made["uid"] in owner_uids(state) else [made]


@dataclass(frozen=True, slots=True)
class WorkerPods:
    """What the pods of a job's workers are made from.

    Each is a place: workers run in it one after another. A pod's number is in its name and never used again. Its index
    says how early it is filled: a pod takes the first that is free. A share of the pods gets the priority class, those with
    the first indices, counted from the most workers there may be. So those of the minimum are filled first and kept filled
    with pods of that class, however many were replaced.
    """

    job: str
    namespace: str
    owners: Sequence[Manifest]
    template: Mapping[str, Any]
    limits: Limits
    priority: Priority | None = None

    def name(self, number: int) -> str:
        """Of the pod, and the id of the place."""
        return worker_name(self.job, number)

    def manifest(self, number: int, index: int, away_from: Iterable[str] = ()) -> Manifest:
        """``away_from``: nodes to avoid, if the scheduler finds others; a gang of Kueue's can't avoid any."""
        metadata, spec = self.template["metadata"], self.template["spec"]
        made: Manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                **metadata,
                "name": self.name(number),
                "namespace": self.namespace,
                "labels": {**metadata["labels"], WORKER_LABEL: str(number), PLACE_LABEL: str(index)},
                "ownerReferences": list(self.owners),
            },
            "spec": {**spec},
        }
        if self.priority and index < self.urgent:
            made["spec"]["priorityClassName"] = self.priority.class_name
        # The pods of a Kueue group must be alike: it counts one with another affinity as another role.
        if away_from and KUEUE_GROUP_LABEL not in metadata["labels"]:
            made["spec"]["affinity"] = _avoiding(sorted(away_from), spec.get("affinity") or {})
        return made

    @property
    def is_group(self) -> bool:
        """Whether Kueue admits them together."""
        return size_of(self.template) is not None

    def may_ask(self, missing: int, there: int) -> int:
        """How many of those that are missing may be asked for while ``there`` are there, those that leave among them."""
        size = size_of(self.template)
        return max(0, missing if size is None else min(missing, size - there))

    @property
    def urgent(self) -> int:
        """The number of places whose workers get the priority class."""
        share = self.priority.share if self.priority else 0.0
        return math.ceil(round(share * self.limits().maximum, 6))  # 0.7 of 10 are 7

    def owns(self, pod: Mapping[str, Any]) -> bool:
        """Whether a pod is a worker of this very job: not of another one that had its name, nor somebody's own."""
        metadata = pod["metadata"]
        labels = metadata.get("labels") or {}
        number = labels.get(WORKER_LABEL, "")
        return (
            # An owner that is gone is taken from the pod.
            not owner_uids(pod).isdisjoint(each["uid"] for each in self.owners)
            and number.isdecimal()
            and metadata["name"] == self.name(int(number))
            and labels.get(PLACE_LABEL, "0").isdecimal()
        )


class WorkerPodApi:
    """The pods of one job's workers.

    Every method blocks, and raises `ApiError`.
    """

    def __init__(self, client: Client, job: str) -> None:
        self._client = client
        self._job = job
        self._selector = selector(job, Role.WORKER)
        self.pods: Source = Source(client, "Pod", label_selector=self._selector)

    def create(self, manifest: Manifest) -> Manifest:
        return self._client.create(manifest)

    def read(self, name: str) -> Manifest:
        return self._client.read("Pod", name)

    def warning(self, name: str, uid: str) -> str:
        """See `last_warning`."""
        return last_warning(self._client, name, uid)

    def delete(self, name: str, grace: int | None) -> bool:
        """Whether there was any. ``grace`` in seconds; None: the pod's own, 0: forget it, whatever its process does."""
        return self._client.delete("Pod", name, grace)

    def delete_all(self, grace: int) -> None:
        """Those that are not over."""
        self._client.delete_all("Pod", grace, label_selector=self._selector, field_selector=_NOT_OVER)

    def end_group(self) -> None:
        """Have Kueue keep no pods of the gang, and no quota. Where that is forbidden a line in the log says what helps."""
        try:
            end_group(self._client, self.pods.list()["items"])
        except ApiError as failure:
            if failure.status != FORBIDDEN:
                raise
            delete = f"kubectl delete workload {group_name(self._job)}"
            _log.error("%s: if a pod has failed Kueue keeps the gang's quota until `%s`", failure, delete)


def last_warning(client: Client, name: str, uid: str) -> str:
    """What the node of this pod has warned of last; empty if of nothing, or if the node has come further since."""
    events = client.list("Event", field_selector=f"involvedObject.name={name},involvedObject.uid={uid}")
    warnings = [each for each in events if each.get("type") == "Warning" and each.get("reason") not in _BEFORE_THE_NODE]
    further = max((_when(each) for each in events if each.get("reason") in _MOUNTED), default="")
    last = max(warnings, key=_when, default=None)
    return flat(last.get("message") or last.get("reason") or "") if last and _when(last) >= further else ""


def last_refusal(client: Client, job: str) -> str:
    """Why the cluster makes no pod for the Job ``job``; empty if it gives no reason, or has made one since."""
    events = client.list("Event", field_selector=f"involvedObject.kind=Job,involvedObject.name={job}")
    told = [each for each in events if each.get("reason") in (_REFUSED, "SuccessfulCreate")]
    last = max(told, key=_when, default={})
    return flat(last.get("message") or "") if last.get("reason") == _REFUSED else ""


def is_wrong(failure: ApiError) -> bool:
    """Whether the cluster refuses a pod for good."""
    return failure.status in _WRONG and _GROUP_WAITS not in str(failure)


def number_of(pod: Mapping[str, Any]) -> int:
    return int(pod["metadata"]["labels"][WORKER_LABEL])


def _when(event: Mapping[str, Any]) -> str:
    """When an event came last; those of one cluster compare as texts."""
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp") or "")


def index_of(pod: Mapping[str, Any]) -> int:
    return int(pod["metadata"]["labels"].get(PLACE_LABEL, 0))


def _avoiding(nodes: Sequence[str], affinity: Mapping[str, Any]) -> Mapping[str, Any]:
    """The user's own affinity, and one away from these nodes that outweighs it, where nodes are only preferred.

    It is a preference: what a pod requires can't be changed any more when the nodes are in order again.
    """
    of_nodes = affinity.get("nodeAffinity") or {}
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    not_named = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    terms = [*(of_nodes.get(preferred) or ()), {"weight": 100, "preference": {"matchFields": not_named}}]
    return {**affinity, "nodeAffinity": {**of_nodes, preferred: terms}}
