"""What the API server is told of pods: their status, as a kubelet derives it, and events."""

from __future__ import annotations

import datetime
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticdl.kube.client import ABSENT, CONFLICT, ApiError, NoAnswerError
from tests.cluster.node.api import Api, Json

if TYPE_CHECKING:
    from tests.cluster.node.container import Container

_RETRY_S = 0.5


def timestamp(*, micro: bool = False) -> str:
    """Now, as the API writes it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True)
class PodRef:
    """Which pod, even if another one of the same name follows it."""

    namespace: str
    name: str
    uid: str

    @classmethod
    def of(cls, pod: Json) -> PodRef:
        return cls(pod["metadata"]["namespace"], pod["metadata"]["name"], pod["metadata"]["uid"])

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a pod has failed as a whole, whatever its containers did."""

    reason: str
    message: str


def phase(containers: list[Container], *, ending: bool, verdict: Verdict | None) -> str:
    """Pending until every container has run; then Running until all have ended."""
    if verdict:
        return "Failed"
    codes = [each.state["terminated"]["exitCode"] for each in containers if "terminated" in each.state]
    if ending and not any("running" in each.state for each in containers):
        return "Succeeded" if len(codes) == len(containers) and not any(codes) else "Failed"
    if any("waiting" in each.state for each in containers):
        return "Pending"
    if len(codes) < len(containers):
        return "Running"
    return "Failed" if any(codes) else "Succeeded"


def pod_status(uid: str, told: str, containers: list[Container], verdict: Verdict | None) -> Json:
    """The part of a patch of the pod's status that changes."""
    ready = all("running" in each.state for each in containers) and not verdict
    reason = None if ready else "PodCompleted" if told == "Succeeded" else "ContainersNotReady"
    conditions = [{"type": each, "status": str(ready), "reason": reason} for each in ("Ready", "ContainersReady")]
    return {
        "phase": told,
        "reason": verdict.reason if verdict else None,
        "message": verdict.message if verdict else None,
        "conditions": [{"type": "Initialized", "status": "True"}, *conditions],
        "containerStatuses": [_container_status(uid, each) for each in containers],
    }


def _container_status(uid: str, container: Container) -> Json:
    has_run = "waiting" not in container.state
    return {
        "name": container.name,
        "image": container.image,
        "imageID": f"process://{container.image}" if has_run else "",
        "containerID": f"process://{uid}/{container.name}" if has_run else "",
        "restartCount": 0,
        "started": "running" in container.state,
        "ready": "running" in container.state,
        "state": container.state,
    }


class Reporter:
    """Sends the latest status of each pod, and events, in a thread that outlasts its failures."""

    def __init__(self, api: Api, node: str) -> None:
        self._api = api
        self._source = {"component": "kubelet", "host": node}
        self._changed = threading.Condition()
        self._reports: dict[PodRef, tuple[Json, bool]] = {}
        self._events: list[Json] = []

    def report(self, pod: PodRef, status: Json, *, final: bool = False) -> None:
        """Tell ``status``; if ``final``, take the pod's object away after that."""
        with self._changed:
            self._reports[pod] = (status, final)
            self._changed.notify()

    def event(self, pod: PodRef, reason: str, message: str, *, warning: bool = False) -> None:
        """Tell people, if it can be told; nothing depends on it."""
        now = timestamp()
        event = {
            "metadata": {"generateName": f"{pod.name[:50]}.", "namespace": pod.namespace},
            "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace, "name": pod.name, "uid": pod.uid},
            "source": self._source,
            "type": "Warning" if warning else "Normal",
            "reason": reason,
            "message": message,
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
        }  # fmt: skip
        with self._changed:
            self._events.append(event)
            self._changed.notify()

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._reports or self._events)
                reports, self._reports = self._reports, {}
                events, self._events = self._events, []
            unsent = {pod: report for pod, report in reports.items() if not self._send(pod, *report)}
            for event in events:
                try:
                    self._api.ask("POST", f"/api/v1/namespaces/{event['metadata']['namespace']}/events", event)
                except ApiError as error:
                    print(f"event {event['reason']}: {error}", file=sys.stderr, flush=True)
            if unsent:
                threading.Event().wait(_RETRY_S)
                with self._changed:
                    self._reports = unsent | self._reports

    def _send(self, pod: PodRef, status: Json, final: bool) -> bool:
        """Whether the report is done with: told, or of no use any more."""
        try:
            self._api.ask("PATCH", f"{pod.path}/status", {"metadata": {"uid": pod.uid}, "status": status})
            if final:
                self._api.ask("DELETE", pod.path, {"gracePeriodSeconds": 0, "preconditions": {"uid": pod.uid}})
        except ApiError as error:
            if error.status not in (ABSENT, CONFLICT):  # the pod is gone, or another has its name
                print(f"status of {pod.namespace}/{pod.name}: {error}", file=sys.stderr, flush=True)
            return not isinstance(error, NoAnswerError)
        return True
