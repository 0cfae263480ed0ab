"""Experiment 2 in numbers. Pure: all times are seconds since the load began."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.experiments.measures import Change, gpu_seconds, mean_gpus
from benchmarks.experiments.serving.records import Request
from benchmarks.experiments.zoo.step_log import LoggedStep
from benchmarks.pod_times import Fact, Times
from elasticdl.job.journal import Entry
from elasticdl.kube.manifests.names import worker_name

BatchShape = Mapping[str, Any]

# Of the series behind its figure; the lags of its three releases of GPUs: 19 to 25, 18 to 24, and 23 s.
PUBLISHED: BatchShape = {"mean_gpus": 7.72, "utilisation": 0.965, "gpus": 8, "reclaim_for_training": "18-25"}
TARGETS: BatchShape = {"utilisation": 0.98, "reclaim": 5.0}


@dataclass(frozen=True, slots=True)
class Seen:
    """What was observed until ``end``; the times of ``pods`` by name, of ``journal`` and ``steps`` count as all others."""

    end: float
    gpus: int
    changes: Sequence[Change]  # GPUs by owner
    rotations: Sequence[Change]  # replicas that take requests
    requests: Sequence[Request]
    pods: Mapping[str, Times]
    journal: Sequence[Entry]
    steps: Sequence[LoggedStep]
    serving: str  # the owner's name, with which those of its pods begin
    training: str


@dataclass(frozen=True, slots=True)
class ForServing:
    """From a replica's creation by the Deployment until it runs on a GPU that was taken away."""

    at: float
    pod: str
    leave: float  # until the scheduler has bound it: a worker was told to leave, has left, and its GPU was free
    start: float  # until its process runs

    @property
    def total(self) -> float:
        return self.leave + self.start


@dataclass(frozen=True, slots=True)
class ForTraining:
    """From the end of a replica, which frees a GPU, to the first step with the worker that takes it."""

    at: float
    pod: str
    scheduler: float  # until the worker's pod is bound
    start: float  # until its process runs
    warm_up: float  # until it is ready: imports, the model, a step on data that is thrown away
    join: float  # until the first step of its first world is done

    @property
    def total(self) -> float:
        return self.scheduler + self.start + self.warm_up + self.join


def measured(seen: Seen) -> dict[str, Any]:
    for_serving, for_training = lags_for_serving(seen), lags_for_training(seen)
    mean = mean_gpus(seen.changes, seen.end)
    working = mean_gpus(at_work(seen), seen.end)
    return {
        "seconds": seen.end,
        "mean_gpus": mean,
        "utilisation": mean / seen.gpus,
        "mean_gpus_working": working,
        "working": working / seen.gpus,
        "gpu_seconds": {owner: gpu_seconds(seen.changes, seen.end, owner) for owner in (seen.serving, seen.training)},
        "reclaim_for_serving": _summary(for_serving, replicas_that_wait(seen)),
        "reclaim_for_training": _summary(for_training, gpus_that_wait(seen)),
        "workers_left_within": _range(worker_leaves(seen)),
        "requests": _requests(seen.requests),
        "steps": step_counts(seen),
        "lags": {"for_serving": _listed(for_serving), "for_training": _listed(for_training)},
    }


def from_zero(changes: Sequence[Change]) -> list[Change]:
    """What the first look found was there when it began."""
    first = min((change.time for change in changes), default=0.0)
    return [replace(change, time=0.0) if change.time == first else change for change in changes]


def lags_for_serving(seen: Seen) -> list[ForServing]:
    found = []
    for name, times in _of(seen, seen.serving):
        created, bound, running = (times.get(fact) for fact in (Fact.CREATED, Fact.BOUND, Fact.RUNNING))
        if created is not None and created > 0 and bound is not None and running is not None and running <= seen.end:
            found.append(ForServing(created, name, bound - created, running - bound))
    return sorted(found, key=lambda lag: lag.at)


def replicas_that_wait(seen: Seen) -> list[float]:
    """How long, of those that did not run when it ended, or when they were given up."""
    waits = []
    for _, times in _of(seen, seen.serving):
        created, until = times.get(Fact.CREATED, 0.0), min(times.get(Fact.NOTICE, seen.end), seen.end)
        if 0 < created < until and times.get(Fact.RUNNING, seen.end + 1) > until:
            waits.append(until - created)
    return waits


def lags_for_training(seen: Seen) -> list[ForTraining]:
    return [lag for freed, pod in _takers(seen) if pod and (lag := _given(freed, pod, seen))]


def gpus_that_wait(seen: Seen) -> list[float]:
    """How long, of those that were given to no worker, or to one that had made no step at the last look and was still there."""
    last = max([seen.end, *(step.time for step in seen.steps)])
    return [
        last - freed
        for freed, pod in _takers(seen)
        if not pod or not (_given(freed, pod, seen) or Fact.NOTICE in seen.pods[pod] or Fact.ENDED in seen.pods[pod])
    ]


def _takers(seen: Seen) -> list[tuple[float, str | None]]:
    """When replicas freed their GPUs, and who took them: the first worker that was bound after that, each once."""
    freed = sorted(
        times[Fact.ENDED] for _, times in _of(seen, seen.serving) if 0 < times.get(Fact.ENDED, 0.0) <= seen.end
    )
    bound = sorted((times[Fact.BOUND], name) for name, times in _of(seen, seen.training) if Fact.BOUND in times)
    found: list[tuple[float, str | None]] = []
    for time in freed:
        taker = next(((when, name) for when, name in bound if when >= time), None)
        if taker:
            bound.remove(taker)
        found.append((time, taker[1] if taker else None))
    return found


def _given(freed: float, pod: str, seen: Seen) -> ForTraining | None:
    """None: it was gone again before its first step. Of workers that ran in it one after another the first that was ready counts."""
    times = seen.pods[pod]
    workers = {e["worker"] for e in seen.journal if _is(e, "worker_started") and e["place"] == pod}
    ready = next((e["time"] for e in seen.journal if _is(e, "worker_ready") and e["worker"] in workers), None)
    worlds = (e["time"] for e in seen.journal if _is(e, "world_formed") and workers & {*e["members"]})
    joined = next(worlds, None)
    if ready is None or joined is None or Fact.RUNNING not in times:
        return None
    step = next((step.time for step in seen.steps if step.time > joined), None)
    if step is None:
        return None
    bound, running = times[Fact.BOUND], times[Fact.RUNNING]
    return ForTraining(freed, pod, bound - freed, running - bound, ready - running, step - ready)


def worker_leaves(seen: Seen) -> list[float]:
    """From a worker's notice to its end, of those that were told to leave while the load lasted."""
    workers = (times for _, times in _of(seen, seen.training) if 0 < times.get(Fact.NOTICE, 0.0) <= seen.end)
    return [times[Fact.ENDED] - times[Fact.NOTICE] for times in workers if Fact.ENDED in times]


def at_work(seen: Seen) -> list[Change]:
    """GPUs of workers that are in a world, and of replicas that take requests."""
    worlds = [Change(e["time"], seen.training, len(e["members"])) for e in seen.journal if _is(e, "world_formed")]
    replicas = [Change(change.time, seen.serving, change.gpus) for change in seen.rotations]
    return sorted([*worlds, *replicas], key=lambda change: change.time)


def step_counts(seen: Seen) -> dict[str, int]:
    """Of all steps that were made, from the first to the last."""
    times = Counter(step.step for step in seen.steps)
    span = max(times) - min(times) + 1 if times else 0
    torn = sum(int(bool(entry.get("steps_torn"))) for entry in seen.journal if _is(entry, "pause"))
    return {"made": len(times), "lost": span - len(times), "twice": times.total() - len(times), "torn": torn}


def _requests(requests: Sequence[Request]) -> dict[str, Any]:
    answered = [request.latency for request in requests if not request.failure]
    failures = Counter(request.failure for request in requests if request.failure)
    return {
        "count": len(requests),
        "failed": failures.total(),
        "failures": dict(failures),
        "refused": sum(request.refused for request in requests),
        "latency": {
            **{f"p{part}": float(np.percentile(answered, part)) if answered else None for part in (50, 99)},
            "max": max(answered, default=None),
        },
    }


def _summary(lags: Sequence[ForServing] | Sequence[ForTraining], unfinished: Sequence[float]) -> dict[str, Any]:
    parts = [name for name in type(lags[0]).__slots__ if name not in ("at", "pod")] if lags else []
    return {
        **_range(lag.total for lag in lags),
        "unfinished": list(unfinished),
        "parts": {name: _range(getattr(lag, name) for lag in lags)["median"] for name in parts},
    }


def _range(values: Iterable[float]) -> dict[str, Any]:
    found = list(values)
    if not found:
        return {"n": 0, "median": None, "min": None, "max": None}
    return {"n": len(found), "median": float(np.median(found)), "min": min(found), "max": max(found)}


def _listed(lags: Sequence[ForServing] | Sequence[ForTraining]) -> list[dict[str, Any]]:
    return [{**{name: getattr(lag, name) for name in type(lag).__slots__}, "total": lag.total} for lag in lags]


def _of(seen: Seen, owner: str) -> list[tuple[str, Times]]:
    """The pods that use the owner's GPUs."""
    start = worker_name(owner, 0).removesuffix("0") if owner == seen.training else f"{owner}-"
    return [(name, times) for name, times in seen.pods.items() if name.startswith(start)]


def _is(entry: Entry, event: str) -> bool:
    return bool(entry["event"] == event)
