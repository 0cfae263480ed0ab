"""Processes with their children: a signal never goes to a number that may be another's by now."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from elasticdl.common.process_group import ProcessGroup
from tests.waiting import wait_until

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
