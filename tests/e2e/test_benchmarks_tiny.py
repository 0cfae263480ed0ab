"""The benchmarks run, with the smallest settings, and give results that make sense. No speeds are asserted."""

import json
import sys

import pytest
from running_job import QUICK_KERAS, run

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
def test_a_benchmark_tells_what_it_measures(tmp_path, benchmark, arguments, found):
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", *arguments, "--out", str(out)]
    done = run(command, QUICK_KERAS, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    entries = [json.loads(line) for line in out.read_text().splitlines()]
    assert not [entry for entry in entries if entry["kind"] == "failure"]
    for key, value in found:
        assert [entry for entry in entries if entry.get(key) == value], (key, value)
    for entry in entries if benchmark == "rescale" else ():
        if entry["kind"] == "summary":
            assert (entry["redone"], entry["lost"]) == (0, 0)
            parts = sum(part["median"] for part in entry["parts"].values())
            assert parts == pytest.approx(entry["reported"]["median"], rel=0.01)  # one survivor: medians add up
