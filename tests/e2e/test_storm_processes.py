"""A small storm of real processes. A larger one: `ELASTICDL_STORM=100 make test-all ARGS="-k storm"`."""

import json
import os
import subprocess
import sys

import pytest
from running_job import run

from benchmarks.storm.__main__ import NAMESPACES
from benchmarks.storm.driver import Kind

HAS_NAMESPACES = subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode == 0
COUNT = int(os.environ.get("ELASTICDL_STORM", "10"))
SECONDS = 180 + 30 * COUNT  # that long only on a machine that has much else to do


@pytest.mark.slow
@pytest.mark.skipif(not HAS_NAMESPACES, reason="this machine lets nobody have network and mount namespaces")
@pytest.mark.timeout(SECONDS)
def test_a_storm_does_not_show_in_the_training(tmp_path):
    out = tmp_path / "storm.jsonl"
    seed = os.environ.get("ELASTICDL_STORM_SEED", "1")
    options = ["--seed", seed, "--disturbances", str(COUNT), "--out", str(out)]
    done = run([sys.executable, "-m", "benchmarks.storm", *options], {"TMPDIR": str(tmp_path)}, SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    *entries, storm = (json.loads(line) for line in out.read_text().splitlines())
    assert sum(storm["counts"].values()) == COUNT
    assert set(storm["counts"]) == {kind.name for kind in Kind}
    assert storm["losses_compared"] > storm["steps"]
    assert "failure" in {entry["change"] for entry in entries if entry["kind"] == "pauses"}  # of the frozen member
    assert list(tmp_path.iterdir()) == [out]
