"""What the master's end of the agents does when agents are late, silent or never come; without agents and streams."""

import asyncio
import itertools

from elasticdl.master.shell import agents as module
from elasticdl.master.shell.agents import Agents
from elasticdl.master.state.events import StacksFound, WorkerExited, WorkerPending, WorkerPlaced
from elasticdl.places.base import Place, PlaceState
from elasticdl.proto import elasticdl_pb2 as pb

NEVER = 1000.0
READY, DOUBTFUL = Place("a", "n1", state=PlaceState.READY), Place("b", "n2", state=PlaceState.ENDING)


async def never_settled():
    await asyncio.Event().wait()


class Scene:
    def __init__(self, **seconds):
        self.reports = asyncio.Queue()
        self.agents = Agents(**seconds).reporting_to(self.reports.put_nowait)

    def comes(self, place="a"):
        hello = pb.AgentHello(place=place, node="n1", host="h")
        line = self.agents.open(hello, never_settled)
        self.agents.greet(line, hello)
        return line

    def says(self, line, **body):
        self.agents.hear(line, "a", pb.AgentMessage(**body))

    async def next(self):
        return await asyncio.wait_for(self.reports.get(), 20.0)

    def orders(self, line):
        waiting = line.waiting
        return [waiting.get_nowait().WhichOneof("body") for _ in range(waiting.qsize())]


def test_an_agent_that_comes_in_time_is_no_news():
    async def story():
        scene = Scene(late_seconds=0.0)
        scene.agents.start(0, READY)
        scene.comes()
        for _ in range(3):
            await asyncio.sleep(0)
        assert scene.reports.empty()
        scene.agents.start(1, Place("late", "n2", state=PlaceState.READY))
        assert await scene.next() == WorkerPending(1, "the agent of its place has not come yet", "n2")

    asyncio.run(story())


def test_at_the_end_of_a_job_agents_need_not_keep_what_nobody_will_save():
    async def story():
        scene = Scene()
        scene.agents.start(0, READY)
        line = scene.comes()
        scene.says(line, started=pb.Started(worker_id=0, pid=7))
        scene.says(line, ended=pb.Ended(worker_id=0, code=0))
        assert [type(await scene.next()) for _ in range(2)] == [WorkerPlaced, WorkerExited]
        await scene.agents.close()
        assert scene.orders(line) == ["start", "end_taken", "leave"]

    asyncio.run(story())


def test_of_a_worker_whose_agent_is_silent_it_is_said_that_nothing_is_seen(monkeypatch):
    monkeypatch.setattr(module, "STACKS_SECONDS", 0.0)

    async def story():
        scene = Scene()
        scene.agents.start(0, READY)
        line = scene.comes()
        scene.says(line, started=pb.Started(worker_id=0, pid=7))
        await scene.next()
        for read in (scene.agents.read_stacks, scene.agents.read_log):
            read(0)
            assert await scene.next() == StacksFound(0, "", "the agent of its place does not answer")
        scene.agents.read_stacks(0)
        scene.says(line, looked=pb.Looked(worker_id=0, text="File"))
        assert await scene.next() == StacksFound(0, "File")
        await asyncio.sleep(0)
        assert scene.reports.empty()

    asyncio.run(story())


def test_who_may_never_come_is_not_waited_for_as_long_as_the_others(monkeypatch):
    monkeypatch.setattr(module, "DOUBTFUL_SECONDS", 0.0)

    async def story():
        scene = Scene(find_seconds=NEVER)
        finding = asyncio.ensure_future(scene.agents.found([READY, DOUBTFUL]))
        for _ in itertools.repeat(None, 3):
            await asyncio.sleep(0)
        assert not finding.done()
        scene.comes()
        assert await asyncio.wait_for(finding, 20.0) == []

    asyncio.run(story())
