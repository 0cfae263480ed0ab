"""The benchmarks run, with the smallest settings, and give results that make sense. No speeds are asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from running_job import QUICK_KERAS

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


SMALL = ["--models", "1m", "--repetitions", "1", "--workers", "2", "--frameworks", "torch", "--events", "sigkill"]
LOOPS = ["elasticdl-torch", "elasticdl-horovod", "horovod", "ddp"]
QUICK = ["--models", "1m", "--rounds", "1", "--seconds", "0.5", "--warm_up", "4", "--loops", ",".join(LOOPS)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("benchmark", "arguments", "found"),
    [
        ("start", ["--repetitions", "1", "--frameworks", "torch"], [("method", "fork"), ("method", "spawn")]),
        ("master_scale", ["--workers", "20", "--repetitions", "1", "--steady", "0.5"], [("workers", 20)]),
        ("gpu", ["--small"], [("loop", "prepared"), ("event", "grow"), ("event", "sigkill")]),
        ("throughput", QUICK, [("loop", each) for each in LOOPS]),
        ("rescale", SMALL, [("collective", "horovod"), ("collective", "torch")]),
    ],
)  # fmt: skip
def test_a_benchmark_tells_what_it_measures(run, benchmark, arguments, found):
    entries, summaries = run(benchmark, *arguments)
    for key, value in found:
        assert [entry for entry in entries if entry.get(key) == value], (key, value)
    for entry in summaries:
        if benchmark == "throughput":
            assert (entry["workers"], entry["rate"]["median"] > 0) == (2, True)
        if benchmark == "rescale":
            assert (entry["redone"], entry["lost"]) == (0, 0)
            parts = sum(part["median"] for part in entry["parts"].values())
            assert parts == pytest.approx(entry["reported"]["median"], rel=0.01)  # one survivor: medians add up
