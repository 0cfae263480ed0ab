"""What the API server is told about pods: the latest status of each, in a thread that outlasts its failures."""

from __future__ import annotations

import datetime
import sys
import threading
from dataclasses import dataclass

from tests.cluster.node.api import Api, ApiError, Json, Unreachable

_RETRY_S = 0.5
_MOST_EVENTS = 1000


def timestamp(*, micro: bool = False) -> str:
    """Now, as the API writes it."""
    now = datetime.datetime.now(datetime.UTC)
    return now.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ")


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
class _Report:
    status: Json
    final: bool


class Reporter:
    """Sends statuses and events; an older status of a pod gives way to a newer one that waits."""

    def __init__(self, api: Api, component: Json) -> None:
        self._api = api
        self._component = component
        self._changed = threading.Condition()
        self._reports: dict[PodRef, _Report] = {}
        self._events: list[Json] = []

    def start(self) -> None:
        threading.Thread(target=self._run, name="reporter", daemon=True).start()

    def report(self, pod: PodRef, status: Json, *, final: bool = False) -> None:
        """Tell ``status``; if ``final``, take the pod's object away after that."""
        with self._changed:
            self._reports[pod] = _Report(status, final)
            self._changed.notify()

    def event(self, pod: PodRef, reason: str, message: str, *, warning: bool = False) -> None:
        """Tell people, if it can be told; nothing depends on it."""
        now = timestamp()
        involved = {"apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace, "name": pod.name, "uid": pod.uid}
        event = {
            "metadata": {"generateName": f"{pod.name[:50]}.", "namespace": pod.namespace},
            "involvedObject": involved,
            "source": self._component,
            "type": "Warning" if warning else "Normal",
            "reason": reason,
            "message": message,
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
        }
        with self._changed:
            if len(self._events) < _MOST_EVENTS:
                self._events.append(event)
                self._changed.notify()

    def _run(self) -> None:
        pause = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._reports or self._events)
                reports, self._reports = self._reports, {}
                events, self._events = self._events, []
            if pause:
                threading.Event().wait(pause)
            unsent = {pod: report for pod, report in reports.items() if not self._send(pod, report)}
            pause = _RETRY_S if unsent else 0.0
            with self._changed:
                self._reports = unsent | self._reports
            for event in events:
                self._send_event(event)

    def _send(self, pod: PodRef, report: _Report) -> bool:
        """Whether the report is done with: told, or of no use any more."""
        try:
            self._api.patch(f"{pod.path}/status", {"metadata": {"uid": pod.uid}, "status": report.status})
            if report.final:
                self._api.delete(pod.path, {"gracePeriodSeconds": 0, "preconditions": {"uid": pod.uid}})
        except ApiError as error:
            if error.status not in (404, 409):  # the pod is gone, or another has its name
                print(f"status of {pod.namespace}/{pod.name}: {error}", file=sys.stderr, flush=True)
            return not error.passing
        except Unreachable:
            return False
        return True

    def _send_event(self, event: Json) -> None:
        try:
            self._api.create(f"/api/v1/namespaces/{event['metadata']['namespace']}/events", event)
        except (ApiError, Unreachable) as error:
            print(f"event {event['reason']}: {error}", file=sys.stderr, flush=True)
