"""Processes with their children: a signal never goes to a number that may be another's by now."""

import asyncio
import os
import signal
import subprocess
import time

import psutil
import pytest

from elasticdl.common.process_group import ProcessGroup
from elasticdl.places import fork_server
from elasticdl.places.fork_server import ForkServer

DEADLINE = 30.0


def start(*command, **more):
    return subprocess.Popen(command, start_new_session=True, **more)


def test_children_that_are_left_behind_are_killed_before_the_number_is_free():
    process = start("sh", "-c", "sleep 600 & echo $!; exit 3", stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(process.stdout.readline()))
    process.stdout.close()
    seen = []

    def reap():
        deadline = time.monotonic() + DEADLINE
        while not is_over(child) and time.monotonic() < deadline:  # the kernel takes a moment
            time.sleep(0.001)
        seen.extend([psutil.Process(process.pid).status(), is_over(child)])
        return process.wait()

    assert asyncio.run(ProcessGroup(process.pid, reap).wait()) == 3
    assert seen == [psutil.STATUS_ZOMBIE, True]


def is_over(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("end", [ProcessGroup.kill, lambda leader: leader.signal(signal.SIGTERM)])
def test_once_it_was_waited_for_nothing_is_sent_to_its_number(end):
    first = start("true")
    leader = ProcessGroup(first.pid, first.wait)
    assert asyncio.run(leader.wait()) == 0
    other = start("sleep", "600")
    leader.pid = other.pid  # the kernel has given the number to another
    end(leader)
    other.send_signal(signal.SIGALRM)
    assert other.wait(DEADLINE) == -signal.SIGALRM  # the first that was sent


def test_to_wait_for_an_end_does_not_reap():
    async def run():
        process = start("true")
        group = ProcessGroup(process.pid, process.wait)
        assert await group.has_ended()
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
        assert (group.end(), await group.has_ended(), await group.wait()) == (0, True, 0)

    asyncio.run(run())


def test_a_group_is_killed_while_its_number_is_its_own(monkeypatch):
    """Once its leader is reaped, the number may be that of somebody else's group."""
    process, kill = start("sh", "-c", "exit 3"), os.killpg
    group = ProcessGroup(process.pid, process.wait)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert group.code() == 3
    killed = []

    def is_own(pid, number):
        assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT), "it was reaped before"
        killed.append(pid)
        kill(pid, number)

    monkeypatch.setattr(os, "killpg", is_own)
    group.signal(signal.SIGTERM)
    assert (group.end(), group.end()) == (3, 3)
    group.kill()
    assert (killed, group.code()) == ([process.pid], 3)


def test_of_a_killed_leader_the_signal_is_told():
    process = start("sleep", "60")
    group = ProcessGroup(process.pid, process.wait)
    assert group.code() is None
    group.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert (group.code(), group.end()) == (-signal.SIGKILL, -signal.SIGKILL)


def test_a_process_to_fork_from_that_does_not_end_holds_up_nobody(tmp_path, monkeypatch):
    """As one that the kernel holds."""
    monkeypatch.setattr(ProcessGroup, "kill", lambda group: None)
    monkeypatch.setattr(fork_server, "ENDING_SECONDS", 0.0)
    monkeypatch.setattr(fork_server, "END_SECONDS", 0.3)
    ticks = []

    async def tick():
        while True:
            ticks.append(1)
            await asyncio.sleep(0.01)

    async def run():
        server = ForkServer(["sleep", "600"], os.environ, [], tmp_path / "log")
        server.start()
        process = server._process
        try:
            ticking = asyncio.create_task(tick())
            await server.close()
            ticking.cancel()
        finally:
            process.signal(signal.SIGKILL)
            process.end()

    asyncio.run(run())
    assert len(ticks) > 3
