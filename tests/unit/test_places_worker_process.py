"""What a master sees of its machine's processes: where one stands that can't tell it, and whether the kernel has killed one."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from elasticdl.common.process_group import ProcessGroup
from elasticdl.places.worker_process import RUNS, MemoryKills, look_at
from tests.waiting import wait_until

DUMP = 'Timeout (0:00:04)!\nThread 0x1 (most recent call first):\n  File "/job/train.py", line 31 in load\n'


@contextlib.contextmanager
def sleeper(*prefix):
    command = [*prefix, sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        itself = psutil.Process(int(process.stdout.readline()))
        wait_until(lambda: itself.status() == psutil.STATUS_SLEEPING)  # while it starts it may well wait for a disk
        yield process.pid, itself
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)


@pytest.mark.parametrize("prefix", [[], ["sh", "-c", '"$@" & wait', "sh"]])
def test_where_it_stands_is_in_its_log_and_told_or_that_it_is_stopped(tmp_path, prefix):
    dump, log = tmp_path / "stacks", tmp_path / "log"
    with sleeper(*prefix) as (pid, itself):
        for into in (log, tmp_path / "no" / "log"):  # one that can't be written keeps nothing back
            dump.write_text(DUMP)
            found = look_at(3, pid, dump, into)
            assert (found.worker_id, found.text, found.state) == (3, DUMP, "")
        assert "train.py" in log.read_text()
        found = look_at(0, pid, tmp_path / "none", log)
        assert (found.state, found.has_session) == (RUNS, False)
        itself.suspend()
        wait_until(lambda: itself.status() == psutil.STATUS_STOPPED)
        assert look_at(0, pid, tmp_path / "none", log).state == "does not run: it is stopped (state T)"
    assert look_at(0, 2**22 - 1, tmp_path / "none", log).text == "", "one that is gone is no reason to fail"


def test_of_a_worker_of_several_processes_each_is_looked_at(tmp_path):
    dump, log = tmp_path / "stacks", tmp_path / "log"
    with sleeper("sh", "-c", f'"$@" 3>{dump} & "$@" 3>{dump}.1 >{log} & wait', "sh") as (pid, _):
        wait_until(lambda: dump.exists() and Path(f"{dump}.1").exists())
        assert look_at(0, pid, dump, log).has_session
        children = psutil.Process(pid).children()
        for each in children:
            each.suspend()
            wait_until(lambda each=each: each.status() == psutil.STATUS_STOPPED)
            assert look_at(0, pid, dump, log).state == "does not run: it is stopped (state T)"
            each.resume()
    Path(f"{dump}.1").write_text(DUMP)
    assert look_at(0, pid, dump, log).text == DUMP


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


TWO, ONE = "low 0\noom 2\noom_kill {}\noom_group_kill 0\n", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.mark.parametrize(
    ("groups", "file", "text"),
    [
        ("0::/kubepods/pod1/abc\n", "memory.events", TWO),  # a container whose group is what is mounted
        ("9:cpu,memory:/job_7\n0::/\n", "memory/job_7/memory.oom_control", ONE),
        ("9:memory:/docker/abc\n", "memory/memory.oom_control", ONE),
        ("4:memory:/old\n", "", ""),  # the kernel does not say
        ("", "", ""),
    ],
)
def test_a_kill_for_want_of_memory_that_the_kernel_counts_is_told_once(tmp_path, groups, file, text):
    write(tmp_path / "proc/self/cgroup", groups)
    if file:
        write(events := tmp_path / "sys/fs/cgroup" / file, text.format(3))
    kills = MemoryKills(tmp_path)
    assert not kills.happened(), "those of before are nobody's"
    if file:
        events.write_text(text.format(4))
        assert kills.happened()
        assert not kills.happened()


# ---- processes with their children: a signal never goes to a number that may be another's by now ----

DEADLINE = 30.0


def start(*command, **more):
    process = subprocess.Popen(command, start_new_session=True, **more)
    return process, ProcessGroup(process.pid, process.wait)


def is_over(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_children_that_are_left_behind_are_killed_before_the_number_is_free():
    process, _ = start("sh", "-c", "sleep 600 & echo $!; exit 3", stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(process.stdout.readline()))
    process.stdout.close()
    seen = []

    def reap():
        wait_until(lambda: is_over(child))  # the kernel takes a moment
        seen.append(psutil.Process(process.pid).status())
        return process.wait()

    assert asyncio.run(ProcessGroup(process.pid, reap).wait()) == 3
    assert seen == [psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("end", [ProcessGroup.kill, lambda leader: leader.signal(signal.SIGTERM)])
def test_once_it_was_waited_for_nothing_is_sent_to_its_number(end):
    _, leader = start("true")
    assert asyncio.run(leader.wait()) == 0
    other, _ = start("sleep", "600")
    leader.pid = other.pid  # the kernel has given the number to another
    end(leader)
    other.send_signal(signal.SIGALRM)
    assert other.wait(DEADLINE) == -signal.SIGALRM  # the first that was sent


KEEPS = """
import multiprocessing, sys
kept = multiprocessing.get_context("spawn").Semaphore()
print(kept._semlock.name, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", [lambda group: asyncio.run(group.wait()), ProcessGroup.end])
def test_of_a_killed_process_no_semaphore_is_left(end):
    """What removes it is a child of that process."""
    process, group = start(sys.executable, "-c", KEEPS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process.stdin, process.stdout:
        semaphore = Path("/dev/shm", "sem." + process.stdout.readline().strip("/\n"))
        (tracker,) = psutil.Process(process.pid).children()
        wait_until(tracker.cmdline)  # it has begun
        assert semaphore.exists()
        group.kill()
        assert end(group) == -signal.SIGKILL
    assert not semaphore.exists()
    wait_until(lambda: is_over(tracker))
