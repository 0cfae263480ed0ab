"""The agent of a place as a real process, and the master's real server with its desk."""

import asyncio
import itertools
import os
import signal

import psutil
import pytest
from agent_kit import DEADLINE, TOKEN, acting, end_of, place

from elasticdl.common.credentials import Token, WorkerEnvironment
from elasticdl.common.errors import UserError
from elasticdl.master.core.events import ExitCause, FoundWorker, WorkerExited, WorkerPending, WorkerPlaced
from elasticdl.places.agent import Link
from elasticdl.places.base import PlaceEnding
from elasticdl.proto import elasticdl_pb2 as pb
from tests.stories import on


@on(acting)
async def test_workers_start_end_and_start_again_in_one_place(scene, tmp_path):
    master = await scene.master()
    master.agents.start(0, place("place-0"))
    assert "has not come" in (await master.next(WorkerPending)).reason
    agent = await scene.agent(master.port)
    placed = await master.next(WorkerPlaced)
    assert (placed.worker_id, placed.host) == (0, "127.0.0.1")
    os.kill(placed.pid, 0)
    await scene.up(0)
    scene.tell(0, 3)
    exited = await master.next(WorkerExited)
    assert (exited.worker_id, exited.cause, exited.code) == (0, ExitCause.CRASHED, 3)
    assert "is forked: True" in exited.output

    killed = await master.start_worker(1, DAEMON="1")
    await scene.up(1)
    daemon = int((tmp_path / "1.daemon").read_text())
    os.kill(killed.pid, signal.SIGKILL)
    assert (await master.next(WorkerExited)).cause is ExitCause.KILLED
    assert not psutil.pid_exists(daemon), "the next worker may need what it holds"

    await master.start_worker(2)
    await scene.up(2)
    master.agents.end(2, None)
    exited = await master.next(WorkerExited)
    assert (exited.code, exited.output.splitlines()[-1]) == (7, "told to leave")

    await master.start_worker(3, DEAF="1")
    await scene.up(3)
    master.agents.end(3, 0.1)
    assert (await master.next(WorkerExited)).code == -signal.SIGKILL
    await master.agents.close()
    code, out, log = await end_of(agent)
    assert code == 0
    assert "told to leave" in out, "what workers print goes through"
    assert "is forked: False" not in out, "also with another environment"
    assert "slower)" not in log
    assert master.reports.empty()


@on(acting)
async def test_a_worker_outlives_its_master_and_its_end_is_told_to_the_next_until_that_has_saved_it(scene):
    first = await scene.master()
    agent = await scene.agent(first.port)
    pid = (await first.start_worker(5)).pid
    await scene.up(5)
    await first.leave()

    second = await scene.master(first.port, find=["place-0"])
    assert second.found == [FoundWorker(5, "127.0.0.1", pid, place="place-0")]
    second.mailbox.saved.clear()
    scene.tell(5, 0)
    assert (await second.next(WorkerExited)).cause is ExitCause.CLEAN
    assert second.reports.empty()
    await second.leave()  # it has not saved that

    third = await scene.master(first.port, find=["place-0"])
    assert third.found == [FoundWorker(5, "127.0.0.1", over=True, place="place-0")]
    assert (await third.next(WorkerExited)).code == 0
    await third.start_worker(6)
    await third.leave()

    fourth = await scene.master(first.port, find=["place-0"])
    assert [(found.worker_id, found.over) for found in fourth.found] == [(6, False)]
    await fourth.agents.close()
    assert (await fourth.next(WorkerExited)).worker_id == 6
    assert (await end_of(agent))[0] == 0


@on(acting)
async def test_an_agent_that_does_not_get_ready_lets_its_worker_be_ended_and_leaves(scene, tmp_path):
    """As where a network file system hangs."""
    os.unlink(tmp_path / "job.json")
    os.mkfifo(tmp_path / "job.json")  # to read it never ends
    master = await scene.master()
    agent = await scene.agent(master.port)
    master.agents.start(0, place("place-0"))
    assert "has not come" in (await master.next(WorkerPending)).reason
    async with asyncio.timeout(DEADLINE):
        while b"starts when what it needs is imported" not in await agent.stderr.readline():
            pass
    agent.send_signal(signal.SIGTERM)
    await master.next(PlaceEnding)
    assert (await master.next(WorkerExited)).cause is ExitCause.KILLED
    assert (await end_of(agent))[0] == 128 + signal.SIGTERM


@on(acting)
async def test_of_two_agents_of_a_place_the_newer_stays(scene):
    master = await scene.master()
    older = await scene.agent(master.port)
    await master.start_worker(0)
    await scene.up(0)
    newer = await scene.agent(master.port)
    assert (await master.next(WorkerExited)).detail == "the agent that had started it is gone"
    code, out, log = await end_of(older)
    assert code == 1
    assert "told to leave" in out
    assert "a newer agent of place place-0 has come" in log
    await master.start_worker(1)
    await master.agents.close()
    assert (await end_of(newer))[0] == 0


@on(acting)
async def test_an_agent_that_is_never_taken_says_so_in_a_line(scene):
    master = await scene.master()
    refused = await scene.agent(master.port, token=Token("guessed"))
    nameless = await scene.agent(master.port, name="")
    code, _, log = await end_of(refused)
    assert (code, log.count("\n")) == (2, 1), log
    assert "the job's token is missing or wrong" in log
    code, _, log = await end_of(nameless)
    assert (code, log.count("\n")) == (2, 1), log
    assert log.startswith("elasticdl: ELASTICDL_PLACE is not set")


@pytest.mark.parametrize(
    ("readable", "told"),
    [(True, "no master at 127.0.0.1:{port} for"), (False, "s: can't read tls.crt: Stale file handle")],
)
@on(acting)
async def test_who_has_no_master_for_too_long_looks_for_none_any_more(scene, readable, told):
    """Nor minds till then, who has had one, a certificate that can't be read."""
    master, orders, can_read, seconds = await scene.master(), asyncio.Queue(), [True], [0.0]
    moments = itertools.accumulate(iter(lambda: seconds[-1], None))  # so much later whenever the time is asked for
    environment = WorkerEnvironment(f"127.0.0.1:{master.port}", TOKEN, 0, "", master_timeout=600)

    def hello():
        if not can_read[-1]:
            raise UserError("can't read tls.crt: Stale file handle")
        return pb.AgentHello(place="place-0")

    link = Link(environment, hello, orders.put_nowait, moments.__next__)
    keeping = asyncio.ensure_future(link.keep())
    assert (await asyncio.wait_for(orders.get(), DEADLINE)).HasField("welcome")
    can_read.append(readable)
    await master.leave()
    seconds.append(400.0)
    assert told.format(port=master.port) in await asyncio.wait_for(keeping, DEADLINE)
