"""Processes with their children: a signal never goes to a number that may be another's by now."""

import asyncio
import os
import signal
import subprocess
import time

import psutil
import pytest

from elasticdl.places import fork_server
from elasticdl.places.fork_server import ForkServer
from elasticdl.places.process_group import GroupLeader, has_ended

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

    assert asyncio.run(GroupLeader(process.pid, reap).wait()) == 3
    assert seen == [psutil.STATUS_ZOMBIE, True]


def is_over(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("end", [GroupLeader.kill, lambda leader: leader.signal(signal.SIGTERM)])
def test_once_it_was_waited_for_nothing_is_sent_to_its_number(end):
    first = start("true")
    leader = GroupLeader(first.pid, first.wait)
    assert asyncio.run(leader.wait()) == 0
    other = start("sleep", "600")
    leader.pid = other.pid  # the kernel has given the number to another
    end(leader)
    other.send_signal(signal.SIGALRM)
    assert other.wait(DEADLINE) == -signal.SIGALRM  # the first that was sent


def test_to_wait_for_an_end_does_not_reap():
    async def run():
        process = start("true")
        assert await has_ended(process.pid)
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
        process.wait()
        assert await has_ended(process.pid)

    asyncio.run(run())


def test_a_process_to_fork_from_that_does_not_end_holds_up_nobody(tmp_path, monkeypatch):
    """As one that the kernel holds."""
    monkeypatch.setattr(fork_server, "kill_group", lambda pid: None)
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
            process.kill()
            process.wait(DEADLINE)

    asyncio.run(run())
    assert len(ticks) > 3
