"""Where a process of this machine stands that can't tell it by itself."""

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest

from elasticdl.places.worker_process import RUNS, look_at
from tests.waiting import wait_until

DEADLINE = 30.0
DUMP = 'Timeout (0:00:04)!\nThread 0x1 (most recent call first):\n  File "/job/train.py", line 31 in load\n'


@contextlib.contextmanager
def sleeper(*prefix):
    command = [*prefix, sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        wait_until_it_sleeps(int(process.stdout.readline()))
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=DEADLINE)


def wait_until_it_sleeps(pid):
    """While a program starts, it may well wait for a disk, of which `look_at` would tell."""
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_SLEEPING)


def test_what_it_has_left_is_told_and_goes_into_its_log(tmp_path):
    with sleeper() as pid:
        found = look_at(0, pid, tmp_path / "none", tmp_path / "log")
        assert (found.state, found.has_session) == (RUNS, False)
    dump, log = tmp_path / "stacks", tmp_path / "log"
    for into in (log, tmp_path / "no" / "log"):  # one that can't be written keeps nothing back
        dump.write_text(DUMP)
        with sleeper() as pid:
            found = look_at(3, pid, dump, into)
        assert (found.worker_id, found.text, found.state) == (3, DUMP, "")
    assert "train.py" in log.read_text()
    assert look_at(0, 2**22 - 1, tmp_path / "none", log).text == "", "one that is gone is no reason to fail"


@pytest.mark.parametrize("prefix", [[], ["sh", "-c", '"$@" & wait', "sh"]])
def test_one_that_is_stopped_says_so_also_behind_a_shell(tmp_path, prefix):
    with sleeper(*prefix) as pid:
        wait_until(lambda: not prefix or psutil.Process(pid).children())
        victim = psutil.Process(pid).children()[0] if prefix else psutil.Process(pid)
        victim.suspend()
        wait_until(lambda: victim.status() == psutil.STATUS_STOPPED)
        assert look_at(0, pid, tmp_path / "none", tmp_path / "log").state == "does not run: it is stopped (state T)"
