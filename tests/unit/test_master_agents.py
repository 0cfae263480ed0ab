"""The master's desk for agents: what it orders and reports, by lists of what agents say; also of late and silent agents."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial

import pytest

from elasticdl.master.core.events import ExitCause, FoundWorker, StacksFound, WorkerExited, WorkerPlaced
from elasticdl.master.shell import agents as module
from elasticdl.master.shell.agents import Agents
from elasticdl.master.shell.calls import Mailbox, Servicer, Sessions
from elasticdl.places.base import Place, PlaceEnding, PlaceState
from elasticdl.proto import elasticdl_pb2 as pb
from tests.stories import on

A, B = (Place(name, f"node-{name}", state=PlaceState.READY, environment={"GPU": name}) for name in "ab")
SEES_NOTHING = StacksFound(0, "", "the agent of its place does not answer")
AT_ONCE, NEVER = 0.0, 1000.0  # seconds
SOMEBODY = {-1: ""}  # whose place is not known


class Desk:
    def __init__(self, find_seconds):
        self.agents = Agents()
        self.agents.find_seconds = find_seconds
        self.agents.soon_seconds = self.agents.close_seconds = self.agents.late_seconds = AT_ONCE
        self.reports = []
        self.agents.reporting_to(self.reports.append)
        self.saved = True

    async def settled(self):
        return self.saved

    async def begin(self, *places, remembered=SOMEBODY):
        found = await self.agents.found(places, remembered)
        await asyncio.sleep(0)
        return found

    def comes(self, place, *untold, **fields):
        """Its agent, with what it says first."""
        running = fields.pop("running", None)
        hello = pb.AgentHello(place=place.id, node=place.node, host=f"host-{place.id}", untold=untold, **fields)
        if running is not None:
            hello.running.CopyFrom(running)
        line = self.agents.open(hello, self.settled)
        if self.agents.begun.is_set():
            self.agents.greet(line, hello)
        return line

    async def starts(self, begun=True):
        """Worker 0, in the place of an agent that has come."""
        await self.begin()
        line = self.comes(A)
        self.agents.start(0, A)
        if begun:
            self.says(line, started=started(0))
            assert self.told() == [WorkerPlaced(0, "host-a", 1, "node-a")]
        return line

    def says(self, line, **body):
        self.agents.hear(line, "a", pb.AgentMessage(**body))

    def told(self):
        told, self.reports[:] = list(self.reports), []
        return told

    def kinds(self):
        return [type(report) for report in self.told()]

    async def told_soon(self):
        """With what is told when a time is over."""
        await turns()
        return self.told()


async def turns():
    """Of the event loop, until what is due at once has happened."""
    for _ in range(4):
        await asyncio.sleep(0)


async def orders(line):
    """Those that are new."""
    await turns()
    made = []
    while not line.waiting.empty():
        order = line.waiting.get_nowait()
        made.append("end of stream" if order is None else order.WhichOneof("body"))
    return made


@asynccontextmanager
async def desk(find_seconds=AT_ONCE):
    yield Desk(find_seconds)


def started(worker_id, pid=1):
    return pb.Started(worker_id=worker_id, pid=pid)


def ended(worker_id, code=0, **fields):
    return pb.Ended(worker_id=worker_id, code=code, **fields)


@on(desk)
async def test_a_worker_that_no_agent_has_heard_of_is_taken_back(desk):
    await desk.begin()
    desk.agents.start(0, A)
    desk.agents.end(0, 0)
    assert [type(report) for report in await desk.told_soon()] == [WorkerExited]
    assert await orders(desk.comes(A)) == []


@on(desk)
async def test_what_an_agent_has_not_heard_it_is_ordered_again(desk):
    line = await desk.starts(begun=False)
    desk.agents.end(0, 5.0)
    assert await orders(line) == ["start", "end"]
    desk.agents.closed(line, "a")
    assert await orders(desk.comes(A)) == ["start", "end"], "the stream broke before it had them"
    assert await orders(desk.comes(A, running=started(0))) == ["end"], "it had the first"
    assert desk.told() == [WorkerPlaced(0, "host-a", 1, "node-a")]


@on(desk)
async def test_an_end_is_reported_once_and_may_be_forgotten_when_it_is_saved(desk):
    line = await desk.starts()
    desk.saved = False
    desk.says(line, ended=ended(0, 3, output="Traceback\nValueError: x"))
    assert await orders(line) == ["start"]
    (exited,) = desk.told()
    assert (exited.cause, exited.code, exited.output) == (ExitCause.CRASHED, 3, "Traceback\nValueError: x")
    desk.saved = True
    assert await orders(desk.comes(A, ended(0, 3))) == ["end_taken"]
    assert desk.told() == []


@pytest.mark.parametrize(
    ("said", "cause", "detail"),
    [
        (ended(0, -9, out_of_memory=True), ExitCause.OUT_OF_MEMORY, "memory was short"),
        (ended(0, 137, out_of_memory=True), ExitCause.OUT_OF_MEMORY, "memory was short"),
        (ended(0, -15, out_of_memory=True), ExitCause.KILLED, "SIGTERM"),
        (ended(0, 3, out_of_memory=True), ExitCause.CRASHED, "exit code 3"),
        (ended(0, -9), ExitCause.KILLED, "SIGKILL"),
        (ended(0, 1, problem="/x: no such file"), ExitCause.CRASHED, "can't start it: /x: no such file"),
        (ended(0, 0), ExitCause.CLEAN, "exit code 0"),
    ],
)
@on(desk)
async def test_how_an_end_is_judged(desk, said, cause, detail):
    desk.says(await desk.starts(begun=False), ended=said)
    (exited,) = desk.told()
    assert exited.cause is cause
    assert detail in exited.detail


@pytest.mark.parametrize(
    ("untold", "said", "told"),
    [
        ((), {"running": started(3, 33)}, WorkerPlaced(3, "host-a", 33, "node-a")),
        ([ended(3, 0)], {}, WorkerExited(3, ExitCause.CLEAN, 0, "exit code 0")),
        ((), {}, WorkerExited(3, ExitCause.KILLED, -9, "the agent that had started it is gone")),
    ],
)
@on(partial(desk, NEVER))
async def test_a_worker_whose_agent_is_late_counts_as_found_where_the_earlier_master_had_it(desk, untold, said, told):
    """So that others need not wait for an agent that perhaps never comes."""
    found = await asyncio.wait_for(desk.begin(A, B, remembered={3: "a", 4: "elsewhere"}), 20.0)
    assert found == [FoundWorker(3, "node-a", node="node-a", place="a")]
    desk.comes(A, *untold, **said)
    assert desk.told() == [told]


@on(desk)
async def test_an_earlier_masters_worker_that_comes_late_is_shown_and_can_be_ended(desk):
    assert await desk.begin(A) == []
    desk.agents.start(0, A)
    line = desk.comes(A, running=started(8, 88))
    assert desk.told() == [WorkerPlaced(8, "host-a", 88, "node-a")]
    desk.says(line, ended=ended(8, 0))
    desk.says(line, started=started(9, 99))  # it had waited for the other to end
    assert desk.told()[-1] == WorkerPlaced(9, "host-a", 99, "node-a")
    desk.agents.end(9, 0)
    assert set(await orders(line)) == {"start", "end_taken", "end"}
    desk.says(line, ended=ended(9, -9))
    desk.says(line, started=started(0, 1))
    assert [(type(report), report.worker_id) for report in desk.told()] == [(WorkerExited, 9), (WorkerPlaced, 0)]


@on(desk)
async def test_a_worker_ends_with_its_agent_not_with_a_stream(desk):
    line = await desk.starts()
    desk.agents.closed(line, "a")
    desk.agents.read_stacks(0)
    assert await desk.told_soon() == [SEES_NOTHING]
    desk.comes(A, running=started(0))
    assert desk.told() == []
    desk.comes(A)  # another process: that of before is gone, with its worker
    (exited,) = desk.told()
    assert (exited.cause, exited.worker_id) == (ExitCause.KILLED, 0)


@on(desk)
async def test_nothing_is_told_of_a_place_that_is_lost_and_who_shows_up_there_leaves(desk):
    line = await desk.starts(begun=False)
    desk.agents.lost("a")
    desk.says(line, ended=ended(0))
    assert await orders(line) == ["start", "leave"]
    assert await orders(desk.comes(A, running=started(0))) == ["leave"]
    desk.agents.end(0, 0)
    assert desk.told() == []


@on(desk)
async def test_that_a_place_ends_is_told_before_the_end_of_its_worker(desk):
    line = await desk.starts(begun=False)
    desk.says(line, leaving=pb.Leaving(reason="it got SIGTERM"))
    desk.says(line, ended=ended(0, -15))
    assert desk.kinds() == [PlaceEnding, WorkerExited]
    desk.comes(B, leaving="it got SIGTERM")
    assert desk.told() == [PlaceEnding("b")]


@on(desk)
async def test_who_closes_kills_and_lets_nobody_wait_for_what_is_saved(desk):
    line, late = await desk.starts(begun=False), Place("c", state=PlaceState.READY)
    desk.saved = False
    desk.agents.start(7, B)
    other = desk.comes(B, ended(7))
    assert await orders(other) == []
    await desk.agents.close()
    assert [await orders(each) for each in (line, other)] == [["start", "end", "leave"], ["leave"]]
    desk.says(line, ended=ended(0, -9))
    assert await orders(line) == ["end_taken"]
    assert desk.kinds() == [WorkerExited] * 2
    desk.agents.start(1, A)
    assert await orders(desk.comes(late)) == ["leave"]


@on(desk)
async def test_of_a_worker_whose_agent_is_silent_it_is_said_that_nothing_is_seen(desk, monkeypatch):
    monkeypatch.setattr(module, "STACKS_SECONDS", AT_ONCE)
    line = await desk.starts()
    desk.agents.read_stacks(0)
    desk.says(line, looked=pb.Looked(worker_id=0, text="File"))
    assert await desk.told_soon() == [StacksFound(0, "File")]
    desk.agents.read_stacks(0)
    assert await desk.told_soon() == [SEES_NOTHING]


@on(desk)
async def test_an_answered_look_says_nothing_of_a_later_one(desk, monkeypatch):
    monkeypatch.setattr(module, "STACKS_SECONDS", AT_ONCE)
    line = await desk.starts()
    desk.agents.read_stacks(0)
    desk.says(line, looked=pb.Looked(worker_id=0, text="File"))
    monkeypatch.setattr(module, "STACKS_SECONDS", NEVER)
    desk.agents.read_stacks(0)
    await asyncio.sleep(0.05)
    assert desk.told() == [StacksFound(0, "File")]


@on(partial(desk, NEVER))
async def test_who_may_never_come_is_not_waited_for_as_long_as_the_others(desk):
    finding = asyncio.ensure_future(desk.agents.found([A, Place("b", state=PlaceState.ENDING)], SOMEBODY))
    await turns()
    assert not finding.done()
    desk.comes(A)
    assert await asyncio.wait_for(finding, 20.0) == []


@on(desk)
async def test_who_detaches_says_nothing_to_agents_and_hears_nothing(desk):
    line = await desk.starts(begun=False)
    desk.agents.start(1, B)  # whose agent is late
    await desk.agents.close(keep=True)
    assert await orders(line) == ["start", "end of stream"]
    desk.says(line, ended=ended(0))
    assert await orders(desk.comes(A, ended(0))) == ["end of stream"]
    assert desk.told() == []


def test_a_mistake_about_an_agent_is_seen_and_ends_its_stream(monkeypatch):
    """Else nobody would listen to the agent, which would never open another stream."""

    class Context:
        async def write(self, message):
            pass

    async def says():
        yield pb.AgentMessage(hello=pb.AgentHello(place="a"))
        await asyncio.Event().wait()

    async def whole():
        agents = Agents()
        agents.begun.set()
        monkeypatch.setattr(agents, "greet", lambda *given: 1 / 0)
        parts = (None, asyncio.Event(), None, pb.Welcome, lambda workers: "")
        async with asyncio.timeout(20):
            await Servicer(Mailbox(), Sessions(), *parts, agents).Attend(says(), Context())

    with pytest.raises(ZeroDivisionError):
        asyncio.run(whole())
