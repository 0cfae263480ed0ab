"""Experiment 2 in numbers: made by hand, with the answers."""

from __future__ import annotations

import pytest

from benchmarks.experiments.measures import Change
from benchmarks.experiments.pods import Fact
from benchmarks.experiments.serving.outcome import (
    TARGETS,
    Seen,
    lags_for_serving,
    lags_for_training,
    measured,
    step_counts,
)
from benchmarks.experiments.serving.service import Request
from benchmarks.experiments.zoo.step_log import LoggedStep
from benchmarks.harness import flat, judge


def step(number: int, time: float) -> LoggedStep:
    return LoggedStep(number, time, 2, 1.0)


def pod(**times: float) -> dict[Fact, float]:
    return {Fact(name): time for name, time in times.items()}


def formed(time: float, *members: int) -> dict:
    return {"time": time, "event": "world_formed", "members": list(members)}


def started(worker: int, pod: int | None = None) -> dict:
    place = f"training-worker-{worker if pod is None else pod}"
    return {"time": -20.0, "event": "worker_started", "worker": worker, "place": place}


def ready(worker: int, time: float) -> dict:
    return {"time": time, "event": "worker_ready", "worker": worker}


def seen(**changed) -> Seen:
    """Three GPUs for 40 s: at 10 s a replica takes one of training's two, at 20 s it gives it back."""
    given = {
        "end": 40.0,
        "gpus": 3,
        "changes": [
            Change(0.0, "serving", 1),
            Change(0.0, "training", 2),
            Change(11.0, "training", 1),
            Change(11.5, "serving", 2),
            Change(21.0, "serving", 1),
            Change(21.5, "training", 2),
        ],
        "rotations": [Change(0.0, "rotation", 1), Change(15.0, "rotation", 2), Change(20.0, "rotation", 1)],
        "requests": [Request(n / 10, 0.1 + n / 1000, "a", 0, 1, "") for n in range(101)],
        "pods": {
            "serving-1-a": pod(created=-30, bound=-30, running=-29),
            "serving-1-b": pod(created=10, bound=11.5, running=11.8, notice=20, ended=21, gone=21.1),
            "training-worker-0": pod(created=-20, bound=-20, running=-19),
            "training-worker-1": pod(created=-20, bound=-20, running=-19, notice=10.1, ended=11, gone=11.2),
            "training-worker-2": pod(created=10.2, bound=21.5, running=21.75),
        },
        "journal": [
            *(started(worker) for worker in range(3)),
            formed(-10.0, 0, 1),
            formed(11.0, 0),
            ready(2, 24.0),
            formed(24.2, 0, 2),
        ],
        "steps": [step(number, time) for number, time in enumerate((-9, 5, 10.5, 12, 24.1, 24.6, 40), 1)],
        "serving": "serving",
        "training": "training",
    }
    return Seen(**{**given, **changed})


def test_a_replica_waits_from_its_creation_to_its_start():
    (lag,) = lags_for_serving(seen())
    assert (lag.pod, lag.parts) == ("serving-1-b", pytest.approx({"leave": 1.5, "start": 0.3}))


def test_a_freed_gpu_trains_from_the_first_step_with_the_worker_that_took_it():
    (lag,) = lags_for_training(seen())
    assert (lag.at, lag.pod, lag.total) == (21, "training-worker-2", pytest.approx(24.6 - 21))
    assert lag.parts == pytest.approx({"scheduler": 0.5, "start": 0.25, "warm_up": 2.25, "join": 0.6})
    another = [*seen().journal[:2], started(9, 2), ready(9, 24.0), formed(24.2, 0, 9)]  # worker 2 was killed at once
    assert lags_for_training(seen(journal=another)) == [lag]


def test_each_freed_gpu_goes_to_a_worker_of_its_own():
    two = {
        "serving-1-c": pod(created=10, bound=11, running=12, ended=20.9),
        "training-worker-3": pod(bound=21.2, running=21.3),
    }
    found = lags_for_training(seen(pods={**seen().pods, **two}, journal=[*seen().journal, started(3), ready(3, 25.0)]))
    assert [lag.pod for lag in found] == ["training-worker-2"], "worker 3 has never been in a world"
    joined = [*seen().journal, started(3), ready(3, 25.0), formed(25.1, 0, 2, 3)]
    found = lags_for_training(seen(pods={**seen().pods, **two}, journal=joined))
    assert [(lag.at, lag.pod) for lag in found] == [(20.9, "training-worker-3"), (21, "training-worker-2")]
    assert found[0].total == pytest.approx(40 - 20.9)


def unfinished(**changed) -> dict:
    numbers = measured(seen(**changed))
    return {name: numbers[f"reclaim_for_{name}"]["unfinished"] for name in ("serving", "training")}


def test_who_waits_when_it_ends_counts_as_long_as_that():
    pods, journal = seen().pods, seen().journal
    assert unfinished() == {"serving": [], "training": []}
    late = {"serving-1-c": pod(created=15), "serving-1-d": pod(created=30, bound=35, notice=33), "serving-1-e": pod()}
    assert unfinished(pods={**pods, **late})["serving"] == [25, 3]
    untaken = {name: times for name, times in pods.items() if name != "training-worker-2"}
    assert unfinished(pods=untaken)["training"] == [40 - 21]
    never_ready = [entry for entry in journal if entry["event"] != "worker_ready"]
    assert measured(seen(journal=never_ready))["reclaim_for_training"]["longest"] == 19
    preempted = {**pods, "training-worker-2": pod(created=10.2, bound=21.5, running=21.75, notice=23)}
    assert unfinished(pods=preempted, journal=journal[:-2])["training"] == []


def test_utilisation_counts_held_gpus_and_work_only_those_that_work():
    numbers = measured(seen())
    held = 3 * 40 - 0.5 - 0.5
    assert numbers["utilisation"] == pytest.approx(held / 120)
    working = 3 * 11 + 2 * (15 - 11) + 3 * (20 - 15) + 2 * (24.2 - 20) + 3 * (40 - 24.2)
    assert numbers["mean_gpus_working"] == pytest.approx(working / 40)


def test_steps_are_counted_once_each():
    assert step_counts(seen()) == {"made": 7, "lost": 0, "twice": 0}
    odd = [step(1, 1), step(2, 2), step(2, 3), step(5, 4)]
    assert step_counts(seen(steps=odd)) == {"made": 3, "lost": 2, "twice": 1}


def test_the_targets_are_judged_by_the_worst_and_what_was_not_measured_is_not_met():
    def met(**changed) -> list[str]:
        return [row[-1] for row in judge(flat(measured(seen(**changed))), TARGETS)]

    assert met() == ["yes"] * 6
    late = {**seen().pods, "serving-1-c": pod(created=1, bound=6.1, running=6.2)}
    failed = [*seen().requests, Request(1.0, 30.0, "a", 2, None, "503 no")]
    assert met(pods=late, requests=failed, steps=[*seen().steps, step(9, 41)]) == [
        "yes",
        "no",
        "yes",
        "no",
        "no",
        "yes",
    ]
    never = {name: times for name, times in seen().pods.items() if name != "serving-1-b"}
    assert met(pods=never)[1:3] == ["no", "no"]
