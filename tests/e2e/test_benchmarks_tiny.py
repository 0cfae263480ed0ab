"""The benchmarks run, with the smallest settings, and give results that make sense. No speeds are asserted."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes import client
from running_job import QUICK_KERAS

from benchmarks.experiments.pods import Fact, PodTimes, facts_of
from benchmarks.steps import Step, gap_between, split_at

pytest_plugins = ["tests.cluster.fixtures"]
slow = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path):
    """Runs a benchmark; what it has written, and of that the summaries."""

    def go(benchmark: str, *arguments: str, **env: str) -> tuple[list[dict], list[dict]]:
        out = tmp_path / "out.jsonl"
        command = [sys.executable, "-m", f"benchmarks.{benchmark}", *arguments, "--out", str(out)]
        own = {**os.environ, **QUICK_KERAS, **env}
        done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        entries = [json.loads(line) for line in out.read_text().splitlines()]
        assert not [entry for entry in entries if entry["kind"] == "failure"]
        assert all(entry["machine"]["cores"] for entry in entries)
        return entries, [entry for entry in entries if entry["kind"] == "summary"]

    return go


@slow
@pytest.mark.parametrize(
    ("benchmark", "arguments", "found"),
    [
        ("start", ["--repetitions", "1", "--frameworks", "torch"], [("method", "fork"), ("method", "spawn")]),
        ("master_scale", ["--workers", "20", "--repetitions", "1", "--steady", "0.5"], [("workers", 20)]),
        ("gpu", ["--small"], [("loop", "prepared"), ("event", "grow"), ("event", "sigkill")]),
    ],
)  # fmt: skip
def test_a_benchmark_tells_what_it_measures(run, benchmark, arguments, found):
    entries, _ = run(benchmark, *arguments)
    for key, value in found:
        assert [entry for entry in entries if entry.get(key) == value], (key, value)


@slow
@pytest.mark.parametrize(
    ("needs", "loops"),
    [
        ("torch", ["elasticdl-torch", "elasticdl-horovod", "horovod", "ddp"]),
        ("tensorflow", ["keras-2-torch", "horovod-tf-grouped"]),
        ("lightning", ["transformers-elastic-2", "lightning-ddp-2"]),
    ],
)
def test_throughput(run, needs, loops):
    pytest.importorskip(needs)
    arguments = ["--models", "1m", "--rounds", "1", "--seconds", "0.5", "--warm_up", "4", "--loops", ",".join(loops)]
    found = {entry["loop"]: entry for entry in run("throughput", *arguments)[1]}
    assert list(found) == loops
    assert all(entry["workers"] == 2 and entry["rate"]["median"] > 0 for entry in found.values())
    if needs == "torch":
        laps = found["elasticdl-torch"]["laps_ms"]
        assert laps["commit"] < laps["compute"]
        assert sum(laps.values()) == pytest.approx(found["elasticdl-torch"]["step_ms"], rel=0.1)


@slow
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_rescale(run, framework):
    pytest.importorskip({"torch": "torch", "keras": "tensorflow"}[framework])
    arguments = ["--repetitions", "1", "--workers", "2", "--models", "1m", "--events", "sigkill"]
    summaries = run("rescale", "--frameworks", framework, *arguments)[1]
    found = {(entry["event"], entry["collective"]): entry for entry in summaries}
    assert set(found) == set(product(("sigkill", "rejoin"), ("horovod", "torch")))
    once = dict.fromkeys(("differentiate", "micro", "add", "update", "apply", "whole"), 1)
    for collective in ("horovod", "torch"):
        assert found["rejoin", collective]["worlds_seen"] >= 3
        assert found["rejoin", collective]["traces"] == (once if framework == "keras" else {})
    for entry in found.values():
        assert (entry["redone"], entry["lost"]) == (0, 0)
        parts = sum(part["median"] for part in entry["parts"].values())
        assert parts == pytest.approx(entry["reported"]["median"], rel=0.01)  # one survivor: medians add up


def pod(state: str, deleted: bool) -> dict:
    metadata = {"name": "one", **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleted else {})}
    containers = [{"name": "main", "state": {state: {"a": 1}}}] if state else []
    spec = {"nodeName": "n0"} if state else {}
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Pending", "containerStatuses": containers}}


@given(st.lists(st.tuples(st.sampled_from(["waiting", "running", "terminated"]), st.booleans()), min_size=1))
def test_a_fact_has_the_time_at_which_it_was_first_seen(changes):
    clock = itertools.count(1.0)
    core = client.CoreV1Api(client.ApiClient(client.Configuration(host="https://nobody.invalid")))
    times = PodTimes(core, "n", lambda: next(clock))
    first: dict[Fact, float] = {}
    for number, change in enumerate(changes, 1):
        times.see({"one": pod(*change)})
        for fact in facts_of(pod(*change)):
            first.setdefault(fact, float(number))
    assert times.all()["one"] == first
    times.see({})
    gone = dict.fromkeys((Fact.ENDED, Fact.GONE), len(changes) + 1.0)
    assert times.all()["one"] == gone | first


def steps(world: str, first: int, *times: float) -> list[Step]:
    return [Step(time, first + index, world, 2) for index, time in enumerate(times)]


def test_a_gap_is_the_pause_less_an_ordinary_step():
    survivor = [*steps("1", 1, 0.0, 0.1, 0.2), *steps("2", 4, 1.3, 1.4)]
    gap = gap_between([split_at(survivor, 0.25, [step.world == "2" for step in survivor])], 0.25)
    assert gap.pauses == (pytest.approx(1.0),)
    assert (gap.ordinary, gap.from_event) == (pytest.approx(0.1), pytest.approx(1.05))
    assert (gap.redone, gap.lost) == (0, 0)


@pytest.mark.parametrize(
    ("ahead", "behind", "redone", "lost"),
    [(2, 2, 2, 0), (3, 3, 1, 0), (4, 4, 0, 0), (6, 6, 0, 2), (4, 3, 0, 0)],
    ids=["two redone", "one redone", "none", "two lost", "one survivor is a step behind"],
)
def test_steps_redone_and_lost_are_counted(ahead, behind, redone, lost):
    before = steps("1", 1, 0.0, 0.1, 0.2)
    late = before if ahead == behind else before[:-1]
    gap = gap_between([(before, steps("2", ahead, 1.0)), (late, steps("2", max(ahead, behind), 1.0))], 0.25)
    assert (gap.redone, gap.lost) == (redone, lost)


def test_a_survivor_without_steps_after_the_change_is_no_measurement():
    with pytest.raises(ValueError, match="no step"):
        gap_between([(steps("1", 1, 0.0, 0.1), [])], 0.25)
