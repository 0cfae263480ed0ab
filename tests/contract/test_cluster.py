"""The programs of a test cluster go with whoever has started them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil


def file_within(seconds, path):
    """The content of a file that a process is about to write."""
    deadline = time.monotonic() + seconds
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)
    return path.read_text().strip()


def test_nothing_outlives_the_process_that_holds_the_leash(tmp_path):
    script = (
        "import pathlib, sys, time; from tests.cluster.processes import Leashed;"
        "Leashed.start(['bash', '-c', 'setsid sleep 1000 & echo $! > orphan; echo $$ > main; wait'],"
        " pathlib.Path('log'), folder=pathlib.Path('.')); time.sleep(1000)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=env) as holder:
        pids = [file_within(20, tmp_path / name) for name in ("orphan", "main")]
        holder.kill()
    _, alive = psutil.wait_procs([psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))], 10)
    assert alive == []
