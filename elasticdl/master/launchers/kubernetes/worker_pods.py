"""The manifest of one worker's pod: the job's template, and who this worker is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticdl.common import environment as variables
from elasticdl.common.quantities import Priority
from elasticdl.kubernetes.manifests.names import CONTAINER, PLACE_LABEL, WORKER_LABEL, state_name, worker_name

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Owner:
    """The Job of the master: when it is deleted, so are the workers.

    ``state_uid``: of the job's state, if that goes with the Job. It then is the workers' controller, without which
    `kubectl drain` takes pods for somebody's own. The Job can't be: it would disown pods that it did not start.
    """

    name: str
    uid: str
    state_uid: str = ""

    @classmethod
    def of(cls, job: Mapping[str, Any], state: Mapping[str, Any]) -> Owner:
        made = job["metadata"]
        goes_along = any(each["uid"] == made["uid"] for each in state["metadata"].get("ownerReferences") or ())
        return cls(made["name"], made["uid"], state["metadata"]["uid"] if goes_along else "")

    def reference(self) -> Manifest:
        return {"apiVersion": "batch/v1", "kind": "Job", "name": self.name, "uid": self.uid}

    def references(self, job: str) -> list[Manifest]:
        """Those of the workers of a job."""
        state = {"apiVersion": "v1", "kind": "ConfigMap", "name": state_name(job), "uid": self.state_uid}
        return [self.reference(), *([{**state, "controller": True}] if self.state_uid else [])]

    def about(self, namespace: str) -> dict[str, str]:
        """The reference of an event about it."""
        return {**self.reference(), "namespace": namespace}


@dataclass(frozen=True, slots=True)
class WorkerPods:
    """What the pods of a job's workers are made from.

    A share of the workers gets the priority class: those in the first places, counted from the most workers there may
    be. A worker takes the first place that is free, so the places of the minimum are filled first and kept filled with
    pods of that class, however many were replaced.
    """

    job: str
    namespace: str
    owner: Owner
    template: Mapping[str, Any]
    most: int
    priority: Priority | None = None

    def manifest(self, worker_id: int, place: int) -> Manifest:
        metadata, spec = self.template["metadata"], self.template["spec"]
        made: Manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                **metadata,
                "name": worker_name(self.job, worker_id),
                "namespace": self.namespace,
                "labels": {**metadata["labels"], WORKER_LABEL: str(worker_id), PLACE_LABEL: str(place)},
                "ownerReferences": self.owner.references(self.job),
            },
            "spec": {**spec, "containers": [_numbered(container, worker_id) for container in spec["containers"]]},
        }
        if self.priority and place < self.urgent:
            made["spec"]["priorityClassName"] = self.priority.class_name
        return made

    @property
    def urgent(self) -> int:
        """The number of places whose workers get the priority class."""
        share = self.priority.share if self.priority else 0.0
        return math.ceil(round(share * self.most, 6))  # 0.7 of 10 are 7

    def owns(self, pod: Mapping[str, Any]) -> bool:
        """Whether a pod is a worker of this very job: not of another one that had its name, nor somebody's own."""
        metadata = pod["metadata"]
        labels = metadata.get("labels") or {}
        number = labels.get(WORKER_LABEL, "")
        owners = {self.owner.uid, self.owner.state_uid}  # of two, one that is gone is taken from the pod
        return (
            any(owner["uid"] in owners for owner in metadata.get("ownerReferences") or ())
            and number.isdecimal()
            and metadata["name"] == worker_name(self.job, int(number))
            and labels.get(PLACE_LABEL, "0").isdecimal()
        )


def worker_id_of(pod: Mapping[str, Any]) -> int:
    return int(pod["metadata"]["labels"][WORKER_LABEL])


def place_of(pod: Mapping[str, Any]) -> int:
    return int(pod["metadata"]["labels"].get(PLACE_LABEL, 0))


def _numbered(container: Mapping[str, Any], worker_id: int) -> Mapping[str, Any]:
    if container["name"] != CONTAINER:
        return container
    number = {"name": variables.WORKER_ID, "value": str(worker_id)}
    return {**container, "env": [number, *container.get("env", [])]}
