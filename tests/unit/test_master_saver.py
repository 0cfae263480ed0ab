"""When a master's state is saved, what waits for that, and what happens if it fails."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial

import pytest
from test_master_serve import NoPlace

from elasticdl.job import messages as m
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core import events as e
from elasticdl.master.core.job_core import Job
from elasticdl.master.core.values import Settings
from elasticdl.master.core.worker_record import Snapshot
from elasticdl.master.shell import loop as loop_module
from elasticdl.master.shell.calls import Mailbox, Sessions
from elasticdl.master.shell.loop import SAVE_SECONDS, Loop, NoStore, StateSaver
from elasticdl.master.shell.observers import Observer
from elasticdl.proto import elasticdl_pb2 as pb
from tests.stories import on

START = (e.WorkerPlaced(0, "h", 1), e.FromWorker(0, m.Hello("h", 1)), e.FromWorker(0, m.Ask(0, 0, has_state=False)))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(loop_module, "SLOW_SAVE_SECONDS", 0.01)
    monkeypatch.setattr(loop_module, "RETRY_SECONDS", 0.001)


class GatedStore(NoStore):
    """Saves when its gate is open, after one failure if it ``fails``."""

    news_seconds, fails = 1.0, False

    def __init__(self):
        self.saved, self.gate = [], asyncio.Event()
        self.gate.set()

    async def save(self, snapshot):
        await self.gate.wait()
        if self.fails:
            self.fails = False
            raise OSError("the API server is away")
        self.saved.append(snapshot)


class Books(Observer):
    def __init__(self):
        self.entries = []

    def append(self, event, fields):
        self.entries.append((event, fields))


class LoopAtWork:
    """A loop between a mailbox and a store. Worker 0 has a session."""

    def __init__(self):
        self.now = 100.0
        self.store, self.launcher, self.books, self.mailbox = GatedStore(), NoPlace(), Books(), Mailbox()
        self.sessions = Sessions()
        self.outbox = self.sessions.open(0)
        self.job = Job(Settings(WorkerRange(minimum=1, maximum=1)))
        clocks = (lambda: self.now, lambda: Snapshot(self.job.snapshot(), len(self.noted("checkpoint"))))
        others = (self.launcher, self.sessions, self.books, StateSaver(self.store), self.books)
        self.loop = Loop(self.job, self.mailbox, *others, *clocks)

    async def post(self, *events):
        """Until each is decided, and acted upon as far as the store allows."""
        for event in events:
            self.mailbox.post(event)
        for _ in range(20):
            await asyncio.sleep(0)

    async def step(self, number):
        report = m.StepReport(number, 0, 0.5, 8, 0.1, 0.05, 1, 8, False)
        await self.post(e.FromWorker(0, m.Progress((report,), 1000, 1)))

    async def break_world(self):
        self.job.rendezvous.begin(self.now, "it hangs", broken=True)
        await self.post(e.Tick())

    async def leave(self):
        self.store.gate.set()
        self.running.cancel()
        await asyncio.wait({self.running})

    def told(self):
        queue = self.outbox.waiting
        return [queue.get_nowait().WhichOneof("body") for _ in range(queue.qsize())]

    def noted(self, event):
        return [fields for name, fields in self.books.entries if name == event]


@asynccontextmanager
async def at_a_desk(saves=True):
    """The loop begins with a tick of its own, so worker 0 is launched as soon as that is saved."""
    desk = LoopAtWork()
    if not saves:
        desk.store.gate.clear()
    desk.running = asyncio.create_task(desk.loop.run())
    async with asyncio.timeout(30):
        try:
            await desk.post()
            if saves:
                await desk.post(*START)
                desk.told()
            yield desk
        finally:
            await desk.leave()


@on(partial(at_a_desk, saves=False))
async def test_nothing_is_done_before_that_is_saved_which_it_follows_from(desk):
    assert desk.launcher.launched == []
    desk.store.gate.set()
    await desk.post()
    assert desk.launcher.launched == [0]
    desk.store.gate.clear()
    await desk.post(*START)
    await desk.break_world()
    for _ in range(2):  # the second time in a new session
        await desk.post(e.FromWorker(0, m.Notice("checkpoint", {"step": 1, "path": "x"}, 1)))
    desk.now += SAVE_SECONDS
    await desk.post(e.Tick())
    assert desk.told() == []
    assert len(desk.noted("checkpoint")) == 1, "each word once"
    desk.store.fails = True
    desk.store.gate.set()
    await asyncio.wait_for(desk.mailbox.settled(), 10)
    told = desk.told()
    assert sorted(told) == ["broken", "saved", "world"]
    assert told.index("world") < told.index("broken")
    assert desk.store.saved[-1].job.world.version == 1


@on(at_a_desk)
async def test_steps_are_taken_and_members_told_of_a_break_while_the_store_does_not_answer(desk):
    desk.store.gate.clear()
    await desk.post(e.ScaleRequested(WorkerRange(minimum=1, maximum=2)))
    await desk.post(e.WorkerDisconnected(0), e.FromWorker(0, m.Hello("h", 1, world_version=1)))
    await desk.step(1)
    assert (desk.launcher.launched, desk.job.training.step) == ([0], 1)
    await desk.break_world()
    assert desk.told() == ["broken"]


@on(partial(at_a_desk, saves=False))
async def test_a_job_that_waits_for_its_state_to_be_saved_says_so(desk):
    desk.store.fails = True
    while "saved" not in desk.job.reason:
        await asyncio.sleep(0.005)
    assert desk.job.reason == "waits until the job's state is saved: it takes long"
    (warning,) = desk.noted("warning")
    assert warning["message"].endswith(desk.job.reason)
    desk.store.gate.set()
    while "saved" in desk.job.reason:
        await asyncio.sleep(0.005)
    assert desk.launcher.launched == [0]


@on(at_a_desk)
async def test_numbers_that_only_grow_are_saved_from_time_to_time_and_when_the_master_leaves(desk):
    before = len(desk.store.saved)
    for number in range(1, 101):
        await desk.step(number)
        desk.now += SAVE_SECONDS / 10
    steps = [saved.job.training.step for saved in desk.store.saved[before:]]
    assert 9 <= len(steps) <= 11
    assert steps == sorted(steps)
    await desk.post(e.Tick())
    await desk.step(101)
    assert desk.store.saved[-1].job.training.step <= 100
    await desk.leave()
    assert desk.store.saved[-1].job.training.step == 101


@on(at_a_desk)
async def test_news_that_the_job_can_not_take_is_dropped_with_a_warning_and_the_job_goes_on(desk):
    desk.job.records[0].ready = False
    odd, good = m.Notice("worker_waits", {}, 2), m.Notice("exported", {"path": "x"}, 3)
    await desk.post(e.FromWorker(0, odd), e.FromWorker(0, good))
    told = "worker 0: the master can't use what it has told (KeyError: 'seconds'), and goes on without it"
    assert [warning["message"] for warning in desk.noted("warning")] == [told]
    assert desk.noted("exported")


@on(at_a_desk)
async def test_a_later_world_does_not_see_what_was_put_into_an_earlier_one(desk):
    desk.sessions.put(0, pb.KvPut(world_version=1, scope="s", key="k", value=b"v"))
    await desk.break_world()
    await desk.post(e.FromWorker(0, m.Ask(1, 0, has_state=True)))
    assert desk.told() == ["broken", "world"]
    desk.sessions.replay(0)
    assert desk.told() == []
