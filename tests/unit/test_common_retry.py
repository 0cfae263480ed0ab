"""Work in the background, of which somebody hears if it fails."""

import asyncio

from elasticdl.common.errors import UnreachableError
from elasticdl.common.retry import Background
from elasticdl.places import agent as agents
from elasticdl.places.agent import Agent
from elasticdl.proto import elasticdl_pb2 as pb


async def fails(error):
    raise error


def test_what_a_task_raises_is_told_in_one_line():
    async def run():
        told = []
        background = Background("pods are looked after", told.append)
        for error in (KeyError("uid"), UnreachableError("told elsewhere")):
            background.start(fails(error))
        assert await background.wait()
        return told

    assert asyncio.run(run()) == ["pods are looked after no longer: KeyError: 'uid'"]


def test_tasks_end_with_their_owner():
    async def run():
        told = []
        background = Background("pods are looked after", told.append)
        lasting = background.start(asyncio.sleep(1000))
        assert not await background.wait(timeout=0.01)
        await background.cancel()
        assert await background.wait()
        return lasting.cancelled(), told

    assert asyncio.run(run()) == (True, [])


def test_an_agent_that_can_not_look_after_its_worker_gives_its_place_up(monkeypatch):
    """Else a worker would be waited for, of whose end nobody would ever hear."""
    monkeypatch.setattr(agents.WorkerRun, "ended", lambda *_, **__: fails(ValueError("a mistake")))

    async def run():
        agent = Agent(pb.AgentHello(), {}, asyncio.get_running_loop().create_future(), None, lambda **body: None)
        agent.obey(pb.AgentOrder(start=pb.Start(worker_id=3)))
        await asyncio.wait_for(agent.over.wait(), 10)
        return agent.exit_code

    assert asyncio.run(run()) == 1
