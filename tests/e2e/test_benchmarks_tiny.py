"""The benchmarks run, with the smallest settings, and give results that make sense. No speeds are asserted.

A larger storm: `ELASTICDL_STORM=100 make test-all ARGS="-k storm"`.
"""

import json
import os
import subprocess
import sys

import pytest
from running_job import QUICK_KERAS, run

from benchmarks.faults.__main__ import BY_NAME, LIMITS, find
from benchmarks.processes import scratch
from benchmarks.storm.__main__ import NAMESPACES
from benchmarks.storm.driver import Kind

pytestmark = pytest.mark.slow

SMALL = ["--models", "1m", "--repetitions", "1", "--workers", "2", "--frameworks", "torch", "--events", "sigkill"]
LOOPS = ["elasticdl-torch", "elasticdl-horovod", "horovod", "ddp"]
QUICK = ["--models", "1m", "--rounds", "1", "--seconds", "0.5", "--warm_up", "4", "--loops", ",".join(LOOPS)]


def entries_of(benchmark, out, *arguments, timeout=280, **env):
    done = run([sys.executable, "-m", f"benchmarks.{benchmark}", *arguments, "--out", str(out)], env, timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


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
    entries = entries_of(benchmark, tmp_path / "out.jsonl", *arguments, **QUICK_KERAS)
    assert not [entry for entry in entries if entry["kind"] == "failure"]
    for key, value in found:
        assert [entry for entry in entries if entry.get(key) == value], (key, value)
    for entry in entries if benchmark == "rescale" else ():
        if entry["kind"] == "summary":
            assert (entry["redone"], entry["lost"]) == (0, 0)
            parts = sum(part["median"] for part in entry["parts"].values())
            assert parts == pytest.approx(entry["reported"]["median"], rel=0.01)  # one survivor: medians add up


HAS_NAMESPACES = subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode == 0
COUNT = int(os.environ.get("ELASTICDL_STORM", "10"))
SECONDS = 180 + 30 * COUNT  # that long only on a machine that has much else to do


@pytest.mark.skipif(not HAS_NAMESPACES, reason="this machine lets nobody have network and mount namespaces")
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_storm_does_not_show_in_the_training(tmp_path, processes):
    out, how = tmp_path / "storm.jsonl", ["--seed", os.environ.get("ELASTICDL_STORM_SEED", "1")]
    how += ["--disturbances", str(COUNT), "--processes_per_worker", str(processes)]
    how += ["--most_workers", "5" if processes == 1 else "3"]
    *entries, storm = entries_of("storm", out, *how, timeout=SECONDS, TMPDIR=str(tmp_path))
    assert sum(storm["counts"].values()) == COUNT
    assert set(storm["counts"]) == {kind.name for kind in Kind if processes == 1 or kind is not Kind.FILL_DISK}
    assert storm["losses_compared"] > storm["steps"]
    assert "failure" in {entry["change"] for entry in entries if entry["kind"] == "pauses"}  # of the frozen member
    assert list(tmp_path.iterdir()) == [out]


LATE_SECONDS = 5.0  # at most, beyond the limit


@pytest.mark.parametrize(
    ("name", "collective", "done"),
    [
        ("wait_for_a_lock", "torch", "replaced"),
        ("hold_pythons_lock", "auto", "replaced"),
        ("skip_a_collective", "auto", "the job ends"),
    ],
)
def test_who_hangs_is_named_with_its_line(tmp_path, name, collective, done):
    with scratch(tmp_path / "kept") as processes:
        finding = find(BY_NAME[name], LIMITS, 3, collective, processes)
    assert finding.right, finding
    assert finding.after < LIMITS[BY_NAME[name].limit] + LATE_SECONDS, finding
    assert finding.done == done


def test_status_and_events_show_where_it_stands(tmp_path):
    """As a user sees it, while the worker still hangs."""
    with scratch(tmp_path / "kept") as processes:
        finding = find(BY_NAME["hang_in_c"], {**LIMITS, "progress_timeout": 15.0}, 2, "torch", processes, look=True)
    assert "hang_in_c" in finding.shown["status"], finding.shown
    assert "worker_stuck" in finding.shown["events"]
    assert "in hang_in_c\n" in finding.shown["events"]
