"""The benchmarks run, with the smallest settings, and give results that make sense. No speeds are asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from running_job import QUICK_KERAS

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
