"""What the API server is told: the status of pods."""

from __future__ import annotations

import datetime
import sys
import threading
import time
from dataclasses import dataclass

from elasticdl.kube.client import ABSENT, CONFLICT, ApiError, NoAnswerError
from tests.cluster.api import Api, Json

_RETRY_S = 0.5


def timestamp(when: datetime.datetime | None = None, *, micro: bool = False) -> str:
    """Some time, or now, as the API writes it."""
    utc = when.astimezone(datetime.UTC) if when else datetime.datetime.now(datetime.UTC)
    return utc.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ")


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


def pod_status(uid: str, container: Json, state: Json, *, ending: bool) -> Json:
    """The part of a patch of the pod's status that changes; ``state`` is that of its container."""
    running, has_run = "running" in state, "waiting" not in state
    if ended := state.get("terminated"):
        phase = "Failed" if ended["exitCode"] else "Succeeded"
    else:
        phase = "Running" if running else "Failed" if ending else "Pending"
    reason = None if running else "PodCompleted" if phase == "Succeeded" else "ContainersNotReady"
    conditions = [{"type": each, "status": str(running), "reason": reason} for each in ("Ready", "ContainersReady")]
    told = {
        "name": container["name"],
        "image": container["image"],
        "imageID": f"process://{container['image']}" if has_run else "",
        "containerID": f"process://{uid}/{container['name']}" if has_run else "",
        "restartCount": 0,
        "started": running,
        "ready": running,
        "state": state,
    }
    initialized = {"type": "Initialized", "status": "True"}
    return {"phase": phase, "conditions": [initialized, *conditions], "containerStatuses": [told]}


class Reporter:
    """Sends the latest status of each pod, in a thread that outlasts its failures."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._changed = threading.Condition()
        self._reports: dict[PodRef, tuple[Json, bool]] = {}

    def report(self, pod: PodRef, status: Json, *, final: bool = False) -> None:
        """Tell ``status``; if ``final``, take the pod's object away after that."""
        with self._changed:
            self._reports[pod] = (status, final)
            self._changed.notify()

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._reports)
                reports, self._reports = self._reports, {}
            if unsent := {pod: report for pod, report in reports.items() if not self._send(pod, *report)}:
                time.sleep(_RETRY_S)
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
