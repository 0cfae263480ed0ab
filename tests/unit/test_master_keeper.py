"""When a master's memory is saved, and what happens if that fails."""

import asyncio
import itertools

from elasticdl.common.spec import WorkerRange
from elasticdl.master.core import events as e
from elasticdl.master.core.snapshot import FleetSnapshot, JobSnapshot, Snapshot, TrainingSnapshot
from elasticdl.master.core.training import Training
from elasticdl.master.service import saver as keeping
from elasticdl.master.service.loop import Mailbox
from elasticdl.master.service.saver import SAVE_SECONDS, StateSaver
from elasticdl.master.service.sessions import KeyValueRelay, Sessions
from elasticdl.proto import elasticdl_pb2 as pb


def remember(next_id=0, step=0):
    job = JobSnapshot(WorkerRange(minimum=1, maximum=2), FleetSnapshot(next_id), step=step)
    return Snapshot(job, TrainingSnapshot(step=step), 0.0)


class Desk:
    """A keeper, and the store that it fills."""

    def __init__(self):
        self.now = 100.0
        self.memory = remember()
        self.saved = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures = 0
        self.keeper = StateSaver(self, lambda: self.memory, lambda: self.now)

    async def load(self):
        return None

    async def save(self, memory):
        await self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise OSError("the API server is away")
        self.saved.append(memory)


def test_what_a_successor_must_know_is_saved_before_the_keeper_returns():
    async def run():
        desk = Desk()
        await desk.keeper.keep(changed=True)
        assert desk.saved == [desk.memory]
        await desk.keeper.keep(changed=True)
        assert len(desk.saved) == 1
        desk.memory = remember(next_id=1)
        await desk.keeper.keep(changed=False)
        assert len(desk.saved) == 1
        await desk.keeper.keep(changed=True)
        assert desk.saved[-1].job.fleet.next_id == 1

    asyncio.run(run())


def test_numbers_that_only_grow_are_saved_from_time_to_time():
    async def run():
        desk = Desk()
        steps = itertools.count(1)
        for _ in range(100):
            desk.memory = remember(step=next(steps))
            await desk.keeper.keep(changed=False)
            desk.now += SAVE_SECONDS / 10
        assert [memory.job.step for memory in desk.saved] == list(range(1, 101, 10))

    asyncio.run(run())


def test_a_store_that_fails_holds_up_nothing_and_gets_the_newest_when_it_works_again(monkeypatch, caplog):
    monkeypatch.setattr(keeping, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(keeping, "PATIENCE", 0.01)

    async def run():
        desk = Desk()
        desk.gate.clear()
        desk.failures = 3
        for next_id in range(1, 50):
            desk.memory = remember(next_id)
            await desk.keeper.keep(changed=True)
        assert desk.saved == []
        desk.gate.set()
        await desk.keeper.close()
        assert desk.saved[-1].job.fleet.next_id == 49

    asyncio.run(run())
    assert [record.message.split(";")[0] for record in caplog.records] == [
        "can't save what a next master must know: it takes long"
    ]


def test_whoever_waits_for_what_it_posted_goes_on_when_it_is_acted_upon_or_never_will_be():
    async def run():
        mailbox = Mailbox()
        mailbox.post(e.Tick())
        waiting = asyncio.create_task(mailbox.settled())
        await asyncio.sleep(0)
        assert await mailbox.take() == e.Tick()
        assert not waiting.done()
        taking = asyncio.create_task(mailbox.take())
        await waiting
        taking.cancel()
        late = asyncio.create_task(mailbox.settled())
        await asyncio.sleep(0)
        mailbox.close()
        await late
        await mailbox.settled()

    asyncio.run(run())


def test_entries_of_members_that_came_before_their_world_was_known_reach_the_others():
    sessions = Sessions()
    relay, outboxes = KeyValueRelay(sessions), [sessions.open(worker_id) for worker_id in range(3)]

    def put(worker_id, world, value):
        relay.put(worker_id, pb.KvPut(world_version=world, scope="s", key=str(worker_id), value=value))

    def got(worker_id):
        outboxes[worker_id].close()
        return [message.kv_entry.value for message in asyncio.run(drain(outboxes[worker_id]))]

    async def drain(outbox):
        return [message async for message in outbox.messages()]

    put(0, 7, b"of 0")
    put(1, 7, b"of 1")
    put(2, 7, b"of no member")
    put(1, 6, b"of an earlier world")
    relay.begin_world(7, (0, 1))
    put(1, 7, b"of 1")  # again, in a new session
    put(1, 7, b"changed")
    assert (got(0), got(1), got(2)) == ([b"of 1", b"changed"], [b"of 0"], [])


def test_the_numbers_go_on_where_an_earlier_master_was():
    def report(*steps):
        reports = [e.StepReport(n, (n - 1) // 4, float(n), 8, 0.1, 0.05, 1, 8 * n, n % 4 == 0) for n in steps]
        return e.ProgressReported(0, tuple(reports), 100, 25)

    def tell(training, *steps):
        return [record.fields for record in training.observe(training.news(report(*steps)), 0.0)]

    first = Training(started=0.0)
    tell(first, 1, 2, 3, 4, 5)
    first.observe(e.NoticeReported(0, "evaluation", {"metrics": {"accuracy": 0.5}}), 0.0)
    second = Training.go_on(0.0, first.memory())
    assert (second.step, second.samples, second.epochs_done, second.metrics) == (5, 40, 1, {"accuracy": 0.5})
    assert tell(second, 3, 4, 5, 6) == [], "rank 0 tells again what it has kept"
    assert tell(second, 5, 6, 7, 8) == [{"epoch": 1, "step": 8, "loss": 6.5}]
