"""A small storm of real processes, and the program that makes it. A larger one: `ELASTICDL_STORM=100 make test-all ARGS="-k storm"`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.storm.driver import Kind
from tests.namespaces import needs_namespaces

ROOT = Path(__file__).parents[2]
COUNT = int(os.environ.get("ELASTICDL_STORM", "10"))
SEED = os.environ.get("ELASTICDL_STORM_SEED", "1")
DEADLINE = 120.0
STORM = (sys.executable, "-m", "benchmarks.storm")


@pytest.mark.slow
@needs_namespaces
@pytest.mark.timeout(180 + 30 * COUNT)  # that long only on a machine that has much else to do
def test_a_storm_does_not_show_in_the_training(tmp_path):
    out = tmp_path / "storm.jsonl"
    command = [*STORM, "--disturbances", str(COUNT), "--seed", SEED, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *entries, storm = (json.loads(line) for line in out.read_text().splitlines())
    assert sum(storm["counts"].values()) == COUNT
    assert set(storm["counts"]) == {kind.name for kind in Kind}
    assert storm["losses_compared"] > storm["steps"]
    assert "failure" in {entry["change"] for entry in entries if entry["kind"] == "pauses"}  # of the frozen member
    assert sum(len(entry["disturbances"]) for entry in entries if entry["kind"] == "moment") == COUNT
    assert list(tmp_path.iterdir()) == [out]


def until(so):
    deadline = time.monotonic() + DEADLINE
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_storm_that_is_interrupted_or_killed_leaves_nothing(tmp_path, number):
    command = [*STORM, "--disturbances", "1000", "--out", str(tmp_path / "storm.jsonl")]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}, **options) as storm:
        try:
            until(lambda: storm.poll() is not None or list(tmp_path.glob("elasticdl-storm-*/losses/*")))
            storm.send_signal(number)
            output, _ = storm.communicate(timeout=DEADLINE)
        finally:
            storm.kill()
    if number == signal.SIGINT:
        assert (storm.returncode, output.splitlines()[-1]) == (130, "interrupted")
    until(lambda: not list(tmp_path.glob("elasticdl-storm-*")))  # goes last, after processes and namespaces
