"""A small storm of real processes. A larger one: `ELASTICDL_STORM=100 make test-all ARGS="-k storm"`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.storm.__main__ import NAMESPACES
from benchmarks.storm.driver import Kind

HAS_NAMESPACES = subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode == 0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_NAMESPACES, reason="this machine lets nobody have network and mount namespaces"),
]

COUNT = int(os.environ.get("ELASTICDL_STORM", "10"))
DEADLINE = 120.0
STORM = (sys.executable, "-m", "benchmarks.storm", "--seed", os.environ.get("ELASTICDL_STORM_SEED", "1"))
HOW = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": Path(__file__).parents[2]}


@pytest.mark.timeout(180 + 30 * COUNT)  # that long only on a machine that has much else to do
def test_a_storm_does_not_show_in_the_training(tmp_path):
    out = tmp_path / "storm.jsonl"
    done = subprocess.run([*STORM, "--disturbances", str(COUNT), "--out", str(out)], **HOW, check=False)
    assert done.returncode == 0, done.stdout
    *entries, storm = (json.loads(line) for line in out.read_text().splitlines())
    assert sum(storm["counts"].values()) == COUNT
    assert set(storm["counts"]) == {kind.name for kind in Kind}
    assert storm["losses_compared"] > storm["steps"]
    assert "failure" in {entry["change"] for entry in entries if entry["kind"] == "pauses"}  # of the frozen member
    assert list(tmp_path.iterdir()) == [out]


def test_a_storm_that_is_killed_leaves_nothing(tmp_path):
    command = [*STORM, "--disturbances", "1000", "--out", str(tmp_path / "storm.jsonl")]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}, **HOW) as storm:
        deadline = time.monotonic() + 2 * DEADLINE
        while not list(tmp_path.glob("elasticdl-storm-*/losses/*")):
            assert storm.poll() is None
            time.sleep(0.05)
        storm.send_signal(signal.SIGKILL)
        while list(tmp_path.glob("elasticdl-storm-*")):  # goes last, after processes and namespaces
            assert time.monotonic() < deadline
            time.sleep(0.05)
