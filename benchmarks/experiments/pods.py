"""The pods of a namespace as they change: who has which GPUs, and when things happened to each, on this machine's clock."""

from __future__ import annotations

import contextlib
import csv
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from kubernetes import client

from benchmarks.experiments.measures import Change
from benchmarks.processes import Failed
from elasticdl.common.backoff import Backoff
from elasticdl.job.quantities import GPU
from elasticdl.kube.client import ANSWER_SECONDS, Client, Source, Watch
from elasticdl.kube.names import JOB_LABEL, ROLE_LABEL

LISTED_SECONDS = 30.0

Pod = Mapping[str, Any]
Pods = Mapping[str, Pod]
Result = TypeVar("Result")


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


def gpu_capacity(core: client.CoreV1Api) -> dict[str, int]:
    """By node, of those that take pods: not of one that is lost, or kept free."""
    answer: Any = core.list_node(_preload_content=False, _request_timeout=ANSWER_SECONDS)
    nodes = (node for node in json.loads(answer.data)["items"] if _takes_pods(node["spec"]))
    return {node["metadata"]["name"]: int(node["status"]["allocatable"].get(GPU, 0)) for node in nodes}


def _takes_pods(node: Mapping[str, Any]) -> bool:
    barred = any(taint["effect"] != "PreferNoSchedule" for taint in node.get("taints", []))
    return not node.get("unschedulable") and not barred


class PodWatch:
    """Follows all pods of a namespace in a thread of its own, while its context lasts."""

    def __init__(self, core: client.CoreV1Api, namespace: str) -> None:
        self._pods: Pods | None = None
        self._failure = ""  # what ends all waiting
        self._news = threading.Condition()
        source = Source(Client(core.api_client, namespace), "Pod")
        self._watch = Watch(source, self._listed, self._changed, Backoff(random.Random(), 0.1, 2.0))

    def see(self, pods: Pods) -> None:
        """All pods by name, after each change; called in the watch's thread, while nobody else looks."""

    def __enter__(self) -> Self:
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.stop()
        self._watch.join()

    def wait(self, ready: Callable[[Pods], Result], seconds: float, what: str) -> Result:
        """Until ``ready`` returns something true of the pods, by name; return that."""

        def look() -> Result | bool | None:
            if self._failure:
                return True
            return ready(self._pods) if self._pods is not None else None

        with self._news:
            found = self._news.wait_for(look, seconds)
            if self._failure:
                raise Failed(self._failure)
            if not found:
                phases = {name: pod.get("status", {}).get("phase") for name, pod in (self._pods or {}).items()}
                raise Failed(f"{what}: not within {seconds:g} s; the pods: {phases}")
            return cast(Result, found)

    def _listed(self, items: Sequence[Pod]) -> None:
        self._become({pod["metadata"]["name"]: pod for pod in items})

    def _changed(self, kind: str, item: Pod) -> None:
        name = item["metadata"]["name"]
        others = {other: pod for other, pod in (self._pods or {}).items() if other != name}
        self._become(others if kind == "DELETED" else {**others, name: item})

    def _become(self, pods: Pods) -> None:
        with self._news:
            self.see(pods)
            self._pods = pods
            self._news.notify_all()


class Fact(StrEnum):
    CREATED = "created"
    BOUND = "bound"  # the scheduler has chosen its node
    RUNNING = "running"  # its container's process was started
    NOTICE = "notice"  # it is to go: its deletionTimestamp is set
    ENDED = "ended"  # its container's process has
    GONE = "gone"  # so is the object, and the device free


Times = Mapping[Fact, float]


def facts_of(pod: Pod) -> set[Fact]:
    """All that is true of a pod that is there."""
    status: Pod = pod.get("status") or {}
    states = [each.get("state") or {} for each in status.get("containerStatuses") or ()]
    true = {
        Fact.CREATED: True,
        Fact.BOUND: pod["spec"].get("nodeName"),
        Fact.RUNNING: any(state.get("running") for state in states),
        Fact.NOTICE: pod["metadata"].get("deletionTimestamp"),
        Fact.ENDED: is_over(pod) or any(state.get("terminated") for state in states),
    }
    return {fact for fact, so in true.items() if so}


class PodTimes(PodWatch):
    """The first time that each fact was seen of each pod; a pod's own timestamps are whole seconds."""

    def __init__(self, core: client.CoreV1Api, namespace: str, clock: Callable[[], float] = time.time) -> None:
        super().__init__(core, namespace)
        self._clock = clock
        self._times: dict[str, dict[Fact, float]] = {}

    def see(self, pods: Pods) -> None:
        now = self._clock()
        facts = {name: facts_of(pod) for name, pod in pods.items()}
        gone = {name: {Fact.ENDED, Fact.GONE} for name in self._times if name not in pods}
        for name, found in (facts | gone).items():
            times = self._times.setdefault(name, {})
            for fact in found:
                times.setdefault(fact, now)

    def rows(self) -> list[list[str]]:
        """The pod's name, and when each fact was first seen."""
        return [
            [name, *(f"{times[fact]:.3f}" if fact in times else "" for fact in Fact)]
            for name, times in sorted(self.all().items())
        ]

    def all(self) -> dict[str, dict[Fact, float]]:
        """By the pod's name."""
        with self._news:
            return {name: dict(times) for name, times in self._times.items()}


class GpuSeries(PodWatch):
    """GPUs in use over time, from each pod's binding to its end; time 0 is when the context was entered.

    Every change is a line of the CSV at once, so that whatever interrupts an experiment leaves the series up to there.
    """

    def __init__(self, core: client.CoreV1Api, namespace: str, path: Path) -> None:
        super().__init__(core, namespace)
        self._path = path
        self._held: Counter[str] = Counter()
        self._changes: list[Change] = []

    def __enter__(self) -> Self:
        """Returns when it sees the pods."""
        self._lines = self._path.open("w", newline="")
        self._write("time", "owner", "gpus")
        self.epoch, self._began = time.time(), time.monotonic()
        super().__enter__()
        try:
            self.wait(lambda pods: True, LISTED_SECONDS, "the list of pods")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        with contextlib.suppress(OSError):  # what can't be written was told
            self._lines.close()

    def now(self) -> float:
        return time.monotonic() - self._began

    @property
    def changes(self) -> list[Change]:
        """So far."""
        with self._news:
            return list(self._changes)

    def see(self, pods: Pods) -> None:
        now, held = self.now(), Counter[str]()
        for pod in pods.values():
            held[owner_of(pod)] += held_gpus(pod)
        for owner in sorted(held.keys() | self._held.keys()):
            if held[owner] != self._held[owner]:
                self._changes.append(Change(now, owner, held[owner]))
                self._write(f"{now:.3f}", owner, held[owner])
        self._held = held

    def _write(self, *row: object) -> None:
        try:
            csv.writer(self._lines).writerow(row)
            self._lines.flush()
        except OSError as error:  # told to whoever waits; the watch goes on
            self._failure = f"{self._path}: {error.strerror}"
