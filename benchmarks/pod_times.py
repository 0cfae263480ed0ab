"""When things happened to the pods of a namespace, on this machine's clock: as a watch sees them, to the millisecond.

A pod's own timestamps are whole seconds.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from kubernetes import client

from benchmarks.processes import Failed
from elasticdl.common.backoff import Backoff
from elasticdl.kube.client import Client
from elasticdl.kube.object_watch import Source, Watch

Times = Mapping["Fact", float]


class Fact(StrEnum):
    CREATED = "created"
    BOUND = "bound"  # the scheduler has chosen its node
    RUNNING = "running"  # its container's process was started
    NOTICE = "notice"  # it is to go: its deletionTimestamp is set
    ENDED = "ended"  # its container's process has
    GONE = "gone"  # so is the object, and the device free


def facts_of(kind: str, pod: Mapping[str, Any]) -> set[Fact]:
    """All that is true of a pod now; ``kind`` is that of the watch's event."""
    found = {Fact.CREATED}
    status: Mapping[str, Any] = pod.get("status") or {}
    states = [each.get("state") or {} for each in status.get("containerStatuses") or ()]
    if pod["spec"].get("nodeName"):
        found.add(Fact.BOUND)
    if any(state.get("running") for state in states):
        found.add(Fact.RUNNING)
    if pod["metadata"].get("deletionTimestamp"):
        found.add(Fact.NOTICE)
    if status.get("phase") in ("Succeeded", "Failed") or any(state.get("terminated") for state in states):
        found.add(Fact.ENDED)
    if kind == "DELETED":
        found |= {Fact.ENDED, Fact.GONE}
    return found


class PodTimes:
    """The first time that each fact was seen of each pod, by the pod's name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._news = threading.Condition()
        self._times: dict[str, dict[Fact, float]] = {}

    @contextmanager
    def watching(self, api: client.ApiClient, namespace: str) -> Iterator[None]:
        source = Source(Client(api, namespace), "Pod")
        watch = Watch(source, self.listed, self.changed, Backoff(random.Random()))
        watch.start()
        try:
            yield
        finally:
            watch.stop()
            watch.join()

    def of(self, name: str) -> dict[Fact, float]:
        with self._news:
            return dict(self._times.get(name, {}))

    def wait(self, wanted: Callable[[str, Times], bool], seconds: float, what: str) -> str:
        """The name of the first pod of which it is so.

        Raises:
            Failed: there was none in time.
        """
        found: list[str] = []

        def some() -> bool:
            found.extend(name for name, times in self._times.items() if wanted(name, times))
            return bool(found)

        with self._news:
            if not self._news.wait_for(some, seconds):
                raise Failed(f"{what}: not within {seconds:g} s; the last pods: {list(self._times.items())[-3:]}")
        return found[0]

    # ---- the watch's receiver, in its thread ----

    def listed(self, items: tuple[Mapping[str, Any], ...]) -> None:
        for item in items:
            self.changed("MODIFIED", item)

    def changed(self, kind: str, item: Mapping[str, Any]) -> None:
        now = self._clock()
        with self._news:
            times = self._times.setdefault(item["metadata"]["name"], {})
            for fact in facts_of(kind, item):
                times.setdefault(fact, now)
            self._news.notify_all()
