"""What a master keeps in its job's ConfigMaps: whole, fenced, and seldom enough."""

import asyncio
import copy
import hashlib
import json
from contextlib import suppress
from dataclasses import replace

import pytest
from google.protobuf import json_format

from elasticdl.common.errors import UserError
from elasticdl.job.journal import dump_entry
from elasticdl.job.worker_range import MOST_WORKERS, WorkerRange
from elasticdl.kube.api_error import ApiError
from elasticdl.kube.fenced import NotWrittenError
from elasticdl.kube.manifests.packed_state import HEAD, HOLDER, JOURNAL, MEMORY, STATUS, pack, unpack_state
from elasticdl.master.shell import state_config_map as state_module
from elasticdl.master.shell.state_config_map import ClusterState
from elasticdl.master.state.instructions import Phase
from elasticdl.master.state.snapshot import JobSnapshot, Snapshot, TrainingSnapshot, WorkerSnapshot
from elasticdl.master.state.states import WorkerState
from elasticdl.master.state.values import Member, World
from elasticdl.proto import elasticdl_pb2 as pb

STATE, OLDER = "digits-state", "digits-journal"
MIB = 1 << 20


class FakeApi:
    """The job's ConfigMaps with optimistic locking; the next requests may fail as told."""

    def __init__(self):
        self.objects = {name: {"metadata": {"resourceVersion": "1"}} for name in (STATE, OLDER)}
        self.failures = []  # (status, whether it was done all the same)
        self.refused = {}  # by name: the same, for the next requests about that ConfigMap
        self.written = []  # (name, bytes that are stored anew)

    @property
    def object(self):
        return self.objects[STATE]

    @object.setter
    def object(self, content):
        self.objects[STATE] = content

    @property
    def patches(self):
        return len(self.written)

    def read(self, kind, name):
        if name not in self.objects:
            raise ApiError(404, f"{name} not found")
        return copy.deepcopy(self.objects[name])

    def patch(self, kind, name, change):
        failures = self.refused.get(name) or self.failures
        status, done = failures.pop(0) if failures else (0, True)
        if status and not done:
            raise ApiError(status, "no")
        there = self.objects[name]
        wanted = change["metadata"].pop("resourceVersion")
        if wanted != there["metadata"]["resourceVersion"]:
            raise ApiError(409, "conflict")
        _merge(there, copy.deepcopy(change))
        self.written.append((name, len(json.dumps(there))))
        there["metadata"]["resourceVersion"] = str(int(wanted) + 1)
        if status:
            raise ApiError(status, "the answer was lost")
        return copy.deepcopy(there)

    @property
    def state(self):
        return unpack_state(self.object, self.objects.get(OLDER))


def _merge(target, change):
    for key, value in change.items():
        if isinstance(value, dict):
            _merge(target.setdefault(key, {}), value)
        else:
            target[key] = value


def memory(step=0):
    """A snapshot that differs from others in what has to be saved."""
    training = TrainingSnapshot(step=step)
    return Snapshot(JobSnapshot(WorkerRange(minimum=1, maximum=2), step, training=training), started=1.0)


@pytest.fixture
def api():
    return FakeApi()


class Bench:
    def __init__(self, api, folder, holder="one"):
        self.replaced = 0
        self.now = 100.0
        self.journal = folder / f"{holder}.jsonl"
        self.store = ClusterState(api, "digits", holder, self._count, self.journal, lambda: self.now)

    def _count(self):
        self.replaced += 1

    def write(self, line):
        with self.journal.open("a") as file:
            file.write(line)


def test_what_is_saved_is_what_the_next_master_loads(api, tmp_path):
    async def run():
        first = Bench(api, tmp_path)
        assert await first.store.load() is None
        first.write('{"event": "a"}\n')
        await first.store.save(memory(7))
        first.write('{"event": "b"}\n{"eve')
        await first.store.save(memory(8))
        second = Bench(api, tmp_path, "two")
        assert await second.store.load() == memory(8)
        assert (first.store.next_worker, second.store.next_worker) == (0, memory(8).job.next_id)
        assert second.journal.read_text() == '{"event": "a"}\n{"event": "b"}\n'
        second.write('{"event": "c"}\n')
        await second.store.finish('{"phase": "failed"}', Phase.SUCCEEDED)

    asyncio.run(run())
    events = [json.loads(line)["event"] for line in api.state.journal.splitlines()]
    assert events == ["a", "b", "c"]
    assert api.state.status == '{"phase": "failed"}'
    assert api.object["metadata"]["annotations"][HOLDER] == "two"
    assert Snapshot.from_json(api.state.memory) == memory(8)


def test_the_journal_is_saved_as_it_was_when_the_state_was(api, tmp_path):
    """What has come since would happen once more under the next master, whose memory lacks it."""

    async def run():
        first, second = Bench(api, tmp_path, "one"), Bench(api, tmp_path, "two")
        await first.store.load()
        for number in range(3):
            first.write(f'{{"event": "{number}"}}\n')
            then = replace(memory(number), journal_bytes=first.journal.stat().st_size)
            first.write('{"event": "later"}\n')
            await first.store.save(then)
            assert api.state.journal.endswith(f'{{"event": "{number}"}}\n')
        await second.store.load()
        assert [json.loads(line)["event"] for line in second.journal.read_text().splitlines()] == [
            "0",
            "later",
            "1",
            "later",
            "2",
        ]

    asyncio.run(run())


def test_the_status_is_seen_between_two_masters(api, tmp_path):
    async def run():
        first = Bench(api, tmp_path)
        await first.store.load()
        await first.store.save(memory(1))
        assert api.state.status == ""
        told = iter(["running", ""])
        first.store.status = lambda: next(told)
        await first.store.save(memory(2))
        await first.store.save(memory(3))

    asyncio.run(run())
    assert api.state.status == "running"


def test_what_could_not_be_loaded_stays_when_the_job_ends_for_it(api, tmp_path):
    api.object["binaryData"] = {MEMORY: "nonsense", JOURNAL: "damaged"}

    async def run():
        bench = Bench(api, tmp_path)
        with pytest.raises(UserError):
            await bench.store.load()
        await bench.store.claim()
        await bench.store.finish("failed", Phase.SUCCEEDED)

    asyncio.run(run())
    kept = api.object["binaryData"]
    assert kept == {MEMORY: "nonsense", JOURNAL: "damaged", STATUS: kept[STATUS]}
    assert unpack_state({"binaryData": {STATUS: kept[STATUS]}}).status == "failed"


def test_a_master_that_was_replaced_writes_no_more(api, tmp_path):
    async def run():
        first, second = Bench(api, tmp_path), Bench(api, tmp_path, "two")
        await first.store.load()
        await first.store.save(memory(1))
        await second.store.load()
        with pytest.raises(NotWrittenError, match="another master has taken over: pod two"):
            await first.store.save(memory(2))
        assert (first.replaced, second.replaced) == (1, 0)
        await second.store.save(memory(3))
        with pytest.raises(NotWrittenError, match="another master has taken over"):
            await first.store.save(memory(4))

    asyncio.run(run())
    assert Snapshot.from_json(api.state.memory).job.training.step == 3
    assert api.state.status == ""


def test_what_the_first_writes_while_the_second_takes_over_is_not_lost(api, tmp_path):
    async def run():
        first, second = Bench(api, tmp_path), Bench(api, tmp_path, "two")
        await first.store.load()
        read = api.read

        def read_first(kind, name):
            found = read(kind, name)
            if name == STATE and api.object["metadata"]["annotations"][HOLDER] == "one":
                api.read = read
                patch = {"binaryData": {MEMORY: pack(memory(5).to_json())}}
                asyncio.run(Bench(api, tmp_path).store._state.patch(patch))
            return found

        api.read = read_first
        assert (await second.store.load()).job.training.step == 5

    asyncio.run(run())


@pytest.mark.parametrize("failure", [(429, False), (503, False), (500, True)])
def test_a_write_that_fails_is_done_when_it_is_tried_again(api, tmp_path, failure):
    async def run():
        bench = Bench(api, tmp_path)
        await bench.store.load()
        api.failures = [failure]
        with pytest.raises(OSError):  # noqa: PT011
            await bench.store.save(memory(1))
        await bench.store.save(memory(2))
        assert bench.replaced == 0

    asyncio.run(run())
    assert Snapshot.from_json(api.state.memory).job.training.step == 2


def test_damage_is_the_users_business(api, tmp_path):
    later = {"data": {HEAD: '{"format": 2, "number": 0}'}}
    damages = {"binaryData": {MEMORY: pack("{}")}}, {"binaryData": {JOURNAL: "AAAA"}}, {"data": {HEAD: "[]"}}, later
    for broken in damages:
        api.object = {"metadata": {"resourceVersion": "1"}, **broken}
        with pytest.raises(UserError, match="what an earlier master has left can't be read: "):
            asyncio.run(Bench(api, tmp_path).store.load())


def test_a_state_that_does_not_change_is_written_once_a_minute(api, tmp_path):
    async def run():
        bench = Bench(api, tmp_path)
        await bench.store.load()
        before = api.patches
        for _ in range(120):  # two minutes
            await bench.store.save(memory(1))
            bench.now += 1
        assert api.patches - before == 2
        bench.write('{"event": "a"}\n')
        await bench.store.save(replace(memory(1), journal_bytes=bench.journal.stat().st_size))
        assert api.patches - before == 3, "there is something new"

    asyncio.run(run())


def entries(number):
    """Lines that can't be packed well."""
    return "".join(f'{{"event": "entry", "text": "{hash_of(number * 50 + line)}"}}\n' for line in range(50))


def hash_of(number):
    return hashlib.sha256(str(number).encode()).hexdigest()


def test_a_long_journal_is_not_written_anew_with_each_save(api, tmp_path):
    async def run():
        bench = Bench(api, tmp_path)
        await bench.store.load()
        api.written.clear()
        for number in range(100):
            bench.write(entries(number))
            await bench.store.save(memory(number))
        assert api.state.journal == bench.journal.read_text()[-len(api.state.journal) :]
        assert len(api.state.journal) > 400_000

    asyncio.run(run())
    small = [size for name, size in api.written if name == STATE]
    large = [size for name, size in api.written if name == OLDER]
    assert len(small) == 100
    assert max(small) < 30_000
    assert len(large) < 25
    assert max(large) < 700_000


@pytest.mark.parametrize("failure", [(500, True), (503, False), (404, False)])
def test_whatever_becomes_of_the_older_part_no_line_is_lost_or_doubled(api, tmp_path, monkeypatch, failure):
    monkeypatch.setattr(state_module, "PART_BYTES", 2000)

    async def run():
        bench = Bench(api, tmp_path)
        await bench.store.load()
        for number in range(12):
            if number in (3, 4, 7):
                api.refused[OLDER] = [failure]
            bench.write(entries(number))
            with suppress(OSError):
                await bench.store.save(memory(number))
                assert api.state.journal == bench.journal.read_text()
                assert Snapshot.from_json(api.state.memory) == memory(number)
        another = Bench(api, tmp_path, "two")
        assert await another.store.load() == memory(11)
        assert another.journal.read_text() == bench.journal.read_text()
        another.write(entries(12))
        await another.store.save(memory(12))
        assert api.state.journal == another.journal.read_text()

    asyncio.run(run())


def test_a_master_that_dies_when_it_has_moved_the_journal_leaves_each_line_once(api, tmp_path, monkeypatch):
    monkeypatch.setattr(state_module, "PART_BYTES", 2000)

    async def run():
        bench = Bench(api, tmp_path)
        await bench.store.load()
        bench.write(entries(0) + entries(1))
        await bench.store.save(memory(1))
        assert api.written[-1][0] == OLDER, "it dies here, before it writes the state again"
        assert api.state.journal == bench.journal.read_text()
        another = Bench(api, tmp_path, "two")
        assert await another.store.load() == memory(1)
        assert another.journal.read_text() == bench.journal.read_text()

    asyncio.run(run())


def test_a_job_without_a_config_map_for_the_journal_keeps_what_fits(api, tmp_path, monkeypatch):
    monkeypatch.setattr(state_module, "MOST_STATE_BYTES", 10_000)
    del api.objects[OLDER]

    async def run():
        bench = Bench(api, tmp_path)
        await bench.store.load()
        for number in range(20):
            bench.write(entries(number))
            await bench.store.save(memory(number))
        kept = api.state.journal
        assert bench.journal.read_text().endswith(kept)
        assert len(kept) > 4_000

    asyncio.run(run())


@pytest.mark.parametrize("each", [1, 100])
def test_of_a_journal_that_is_too_long_the_newest_is_kept_however_often(api, tmp_path, monkeypatch, each):
    monkeypatch.setattr(state_module, "MOST_BYTES", 2000)
    monkeypatch.setattr(state_module, "PART_BYTES", 300)

    async def run():
        bench = Bench(api, tmp_path)
        await bench.store.load()
        for number in range(1000):
            bench.write(f"entry {number * 7919 % 10007}\n")
            if number % each == each - 1:
                await bench.store.save(memory(number))
                assert len(api.objects[OLDER].get("binaryData", {}).get(JOURNAL, "")) <= 2000
                kept = api.state.journal.splitlines()
                assert kept == bench.journal.read_text().splitlines()[-len(kept) :]
                assert len(kept) > min(number, 200)

    asyncio.run(run())


def test_a_line_that_is_too_long_by_itself_is_left_out(api, tmp_path, monkeypatch):
    monkeypatch.setattr(state_module, "MOST_STATE_BYTES", 2500)
    monkeypatch.setattr(state_module, "MOST_BYTES", 2000)

    async def run():
        bench = Bench(api, tmp_path)
        await bench.store.load()
        bench.write("first\n" + " ".join(str(number * 7919 % 10007) for number in range(3000)) + "\n")
        await bench.store.save(memory(1))
        assert api.state.journal == ""
        bench.write("last\n")
        await bench.store.save(memory(2))
        assert api.state.journal == "last\n"

    asyncio.run(run())


def test_ten_thousand_workers_and_their_journal_fit_into_a_config_map(api, tmp_path):
    """With names, reasons and numbers of their own, as far as they have such."""
    most = range(MOST_WORKERS)
    workers = tuple(
        WorkerSnapshot(n, WorkerState.MEMBER, f"in place of worker {n - 1}, which was preempted", 12, True, "")
        for n in most
    )
    members = tuple(Member(n, f"10.{n % 7}.{n // 250}.{n % 250}", 100 + n % 3, True, 3, 12) for n in most)
    world = World(12, members, "worker 17 left: preempted")
    limits = WorkerRange(minimum=1, maximum=MOST_WORKERS)
    snapshot = Snapshot(JobSnapshot(limits, 20_000, tuple(most), world=world, workers=workers), started=1.0)
    status = pb.JobStatus(job_name="digits", phase="running", reason="")
    for n in most:
        status.workers.add(
            worker_id=n, state="member", rank=n, host=f"gpu-node-{hash_of(n)[:8]}", pid=1, reason=workers[n].reason
        )

    async def run():
        bench = Bench(api, tmp_path)
        await bench.store.load()
        bench.store.status = lambda: json_format.MessageToJson(status, indent=None)
        for number in most:
            bench.write(dump_entry({"time": 1e9 + number, "event": "worker_launched", "worker": number}) + "\n")
        bench.write("".join(entries(number) for number in range(100)))
        await bench.store.save(snapshot)

    asyncio.run(run())
    for stored in api.objects.values():
        assert len(json.dumps(stored)) < MIB
    assert Snapshot.from_json(api.state.memory) == snapshot
    assert len(json_format.Parse(api.state.status, pb.JobStatus()).workers) == MOST_WORKERS
    assert api.state.journal.endswith(entries(99))
