"""What a master keeps in its job's ConfigMap: whole, fenced, and seldom enough."""

import asyncio
import copy
import json
from dataclasses import replace

import pytest

from elasticdl.common.errors import UserError
from elasticdl.job.spec import WorkerRange
from elasticdl.kube.api_error import ApiError
from elasticdl.kube.manifests.packed_state import HOLDER, JOURNAL, Packer, State, unpack_state
from elasticdl.master.shell import state_config_map as state_module
from elasticdl.master.shell.state_config_map import ClusterState, ReplacedError
from elasticdl.master.state.instructions import Phase
from elasticdl.master.state.snapshot import JobSnapshot, Snapshot, TrainingSnapshot


class FakeApi:
    """A ConfigMap with optimistic locking; the next requests may fail as told."""

    def __init__(self):
        self.object = {"metadata": {"resourceVersion": "1"}}
        self.failures = []  # (status, whether it was done all the same)
        self.patches = 0

    def read(self, kind, name):
        return copy.deepcopy(self.object)

    def patch(self, kind, name, change):
        status, done = self.failures.pop(0) if self.failures else (0, True)
        if status and not done:
            raise ApiError(status, "no")
        wanted = change["metadata"].pop("resourceVersion")
        if wanted != self.object["metadata"]["resourceVersion"]:
            raise ApiError(409, "conflict")
        self.patches += 1
        _merge(self.object, copy.deepcopy(change))
        self.object["metadata"]["resourceVersion"] = str(int(wanted) + 1)
        if status:
            raise ApiError(status, "the answer was lost")
        return copy.deepcopy(self.object)

    @property
    def state(self):
        return unpack_state(self.object)


def _merge(target, change):
    for key, value in change.items():
        if isinstance(value, dict):
            _merge(target.setdefault(key, {}), value)
        else:
            target[key] = value


def memory(step=0):
    return Snapshot(JobSnapshot(WorkerRange(minimum=1, maximum=2), training=TrainingSnapshot(step=step)), started=1.0)


@pytest.fixture
def api():
    return FakeApi()


class Bench:
    def __init__(self, api, folder, holder="one"):
        self.replaced = 0
        self.journal = folder / f"{holder}.jsonl"
        self.store = ClusterState(api, "digits", holder, self._count, self.journal)

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
    api.object["data"] = {"memory.json": "nonsense"}
    api.object["binaryData"] = {JOURNAL: "damaged"}

    async def run():
        bench = Bench(api, tmp_path)
        with pytest.raises(UserError):
            await bench.store.load()
        await bench.store.finish("failed", Phase.SUCCEEDED)

    asyncio.run(run())
    assert (api.object["data"], api.object["binaryData"]) == (
        {"memory.json": "nonsense", "status.json": "failed"},
        {JOURNAL: "damaged"},
    )


def test_a_master_that_was_replaced_writes_no_more(api, tmp_path):
    async def run():
        first, second = Bench(api, tmp_path), Bench(api, tmp_path, "two")
        await first.store.load()
        await first.store.save(memory(1))
        await second.store.load()
        with pytest.raises(ReplacedError, match="pod two"):
            await first.store.save(memory(2))
        assert (first.replaced, second.replaced) == (1, 0)
        await second.store.save(memory(3))
        with pytest.raises(ReplacedError):
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
            if api.object["metadata"]["annotations"][HOLDER] == "one":
                api.read = read
                asyncio.run(Bench(api, tmp_path).store._patch({"data": {"memory.json": memory(5).to_json()}}))
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
    for broken in ({"data": {"memory.json": "{}"}}, {"binaryData": {JOURNAL: "AAAA"}}):
        api.object = {"metadata": {"resourceVersion": "1"}, **broken}
        with pytest.raises(UserError, match="what an earlier master has left can't be read: "):
            asyncio.run(Bench(api, tmp_path).store.load())


@pytest.mark.parametrize("each", [1, 100])
def test_of_a_journal_that_is_too_long_the_newest_is_kept_however_often(api, tmp_path, monkeypatch, each):
    monkeypatch.setattr(state_module, "MOST_BYTES", 2000)

    async def run():
        bench = Bench(api, tmp_path)
        await bench.store.load()
        for number in range(2000):
            bench.write(f"entry {number * 7919 % 10007}\n")
            if number % each == each - 1:
                await bench.store.save(memory(number))
                assert len(api.object["binaryData"][JOURNAL]) <= 2000
                kept = api.state.journal.splitlines()
                assert kept == bench.journal.read_text().splitlines()[-len(kept) :]
                assert len(kept) > min(number, 200)

    asyncio.run(run())


def test_a_line_that_is_too_long_by_itself_is_left_out(api, tmp_path, monkeypatch):
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


def test_text_is_packed_as_it_comes():
    packer = Packer()
    packed = []
    for text in ("one\n", "two\n", ""):
        packer.add(text)
        packed.append(unpack_state({"metadata": {}, "binaryData": {JOURNAL: packer.packed()}}))
    assert packed == [State(journal="one\n"), State(journal="one\ntwo\n"), State(journal="one\ntwo\n")]
