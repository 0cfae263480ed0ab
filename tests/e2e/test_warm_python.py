"""The process that the tests' scripts are forked from: what a script starts ends with it, and it ends in its time."""

import signal
import time

import psutil
import pytest
import warm_python

SCRIPT = """
import subprocess, sys, time
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(("takes", "within", "code"), [("0", 60.0, 0), ("600", 2.0, -signal.SIGKILL)])
def test_what_a_script_has_started_ends_with_it(tmp_path, monkeypatch, takes, within, code):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    python = warm_python.WarmPython([], tmp_path, {})
    try:
        with monkeypatch.context() as patch:
            patch.setattr(warm_python, "DEADLINE", within)
            ended = python.run(script, takes)
        assert (ended.returncode, ended.stderr) == (code, "")
        deadline = time.monotonic() + 30.0
        while is_running(int(ended.stdout)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        python.close()
