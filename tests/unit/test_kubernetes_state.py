"""What a master keeps in its job's ConfigMap: whole, fenced, seldom enough, and read by later versions."""

import asyncio
import copy
import hashlib
import json
import os
import signal
import tempfile
import threading
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st
from refusal_kit import refused

from elasticdl.common.errors import ReplacedError, UnreachableError, UserError
from elasticdl.job.messages import Member
from elasticdl.job.spec import MOST_WORKERS, WorkerRange
from elasticdl.kube.client import ApiError, NotDoneError
from elasticdl.master.core.values import Crashes, Outcome, Phase, WorkerState, World
from elasticdl.master.core.worker_record import JobSnapshot, Snapshot, TrainingSnapshot, UnwrittenSteps, WorkerSnapshot
from elasticdl.master.shell import cluster_master
from elasticdl.master.shell import state_config_map as state_module
from elasticdl.master.shell.cluster_master import require_rights, uncounted
from elasticdl.master.shell.serve import RelievedError
from elasticdl.master.shell.state_config_map import MEMORY, STATUS, ClusterState, pack, unpack_state
from elasticdl.places.judge import TRACKING
from elasticdl.proto import elasticdl_pb2 as pb
from tests.stories import on


class FakeApi:
    """The job's ConfigMap with optimistic locking; the next requests may fail as told."""

    def __init__(self):
        self.there = {"metadata": {"resourceVersion": "1"}}
        self.failures = []  # (status, whether it was done all the same)
        self.written = []  # bytes that are stored anew

    def read(self, kind, name):
        return copy.deepcopy(self.there)

    def patch(self, kind, name, change):
        status, done = self.failures.pop(0) if self.failures else (0, True)
        if status and not done:
            raise ApiError(status, "no")
        version = self.there["metadata"]["resourceVersion"]
        if change["metadata"].pop("resourceVersion", version) != version:
            raise ApiError(409, "conflict")
        _merge(self.there, copy.deepcopy(change))
        self.written.append(len(json.dumps(self.there)))
        self.there["metadata"]["resourceVersion"] = str(int(version) + 1)
        if status:
            raise ApiError(status, "the answer was lost")
        return copy.deepcopy(self.there)

    @property
    def state(self):
        return unpack_state(self.there)


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


class Holder:
    """A master's state, saved by a holder whose journal is a file."""

    def __init__(self, api, folder, holder="one"):
        self.now, self.api = 100.0, api
        self.journal = folder / f"{holder}.jsonl"
        self.store = ClusterState(api, "digits", holder, self.journal, lambda: self.now)

    def write(self, line):
        with self.journal.open("a") as file:
            file.write(line)

    async def save(self, number, line=""):
        self.write(line)
        await self.store.save(memory(number))


@asynccontextmanager
async def loaded(tmp_path):
    """By the first master of a job."""
    bench = Holder(FakeApi(), tmp_path)
    assert await bench.store.load() is None
    bench.api.written.clear()
    yield bench


HAPPENS = ["it is saved", "it is saved", "it is refused", "the answer is lost", "another begins", "an older one saves"]


def entries(number):
    """Lines that can't be packed well."""
    return "".join(f'{{"event": "entry", "text": "{hash_of(number * 50 + line)}"}}\n' for line in range(50))


def hash_of(number):
    return hashlib.sha256(str(number).encode()).hexdigest()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(HAPPENS), st.integers(0, 30)), max_size=20))
def test_whatever_becomes_of_writes_and_masters_the_next_one_has_what_was_saved_and_no_line_twice(history):
    """What came to the journal since the state was would happen once more under the next master, whose memory lacks it."""

    async def run(folder):
        api, older, saved = FakeApi(), [], [(None, "")]  # of the last that are there the one, or the other
        master = Holder(api, folder, "0")
        assert await master.store.load() is None
        for step, (happens, lines) in enumerate(history):
            master.write(entries(step)[: 99 * lines])  # the last is still being written
            then = replace(memory(step), journal_bytes=master.journal.stat().st_size)
            kept = master.journal.read_text().rpartition("\n")
            master.write(f'later"}}\n{{"event": "entry", "text": "{step}"}}\n')
            if happens == "another begins":
                older, master = [*older, master], Holder(api, folder, str(step + 1))
                found = await master.store.load(), master.journal.read_text()
                assert found in saved
                assert master.store.next_worker == (found[0].job.next_id if found[0] else 0)
                saved = [found]
            elif happens == "an older one saves":
                for each in older:
                    with pytest.raises(ReplacedError, match="another master has taken over: pod "):
                        await each.store.save(then)
            else:
                api.failures = {"it is saved": [], "the answer is lost": [(500, True)]}.get(happens, [(429, False)])
                with suppress(OSError) if api.failures else nullcontext():
                    await master.store.save(then)
                is_there = "".join(kept[:2])
                if happens == "it is saved":
                    saved = [(then, is_there)]
                elif happens == "the answer is lost":
                    saved = [*saved, (then, is_there)]
                api.failures = []
            assert (Snapshot.from_json(api.state.memory) if api.state.memory else None, api.state.journal) in saved
        assert api.there["metadata"]["annotations"][state_module.HOLDER] == master.store._holder

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))


@on(loaded)
async def test_a_save_that_is_given_up_writes_nothing_over_the_jobs_last_status(first):
    begun, may_go_on, patch = threading.Event(), threading.Event(), first.api.patch

    def slow_patch(*arguments):
        first.api.patch = patch
        begun.set()
        assert may_go_on.wait(20.0)
        return patch(*arguments)

    first.store.status = lambda: '{"phase": "running"}'
    first.api.patch = slow_patch
    saving = asyncio.create_task(first.save(1))
    assert await asyncio.to_thread(begun.wait, 20.0)
    saving.cancel()
    finishing = asyncio.create_task(first.store.finish('{"phase": "succeeded"}', Phase.SUCCEEDED))
    await asyncio.sleep(0.1)
    may_go_on.set()
    await asyncio.wait({saving, finishing})
    await asyncio.get_running_loop().shutdown_default_executor()
    assert (saving.cancelled(), first.api.state.status) == (True, '{"phase": "succeeded"}')


@on(loaded)
async def test_the_status_is_seen_between_two_masters_and_after_the_last(first):
    told = iter(["running", ""])
    first.store.status = lambda: next(told)
    for step in range(2):
        await first.save(step, '{"event": "b"}\n{"eve')
        assert first.api.state.status == "running"
    kept = first.api.state
    await first.store.finish("failed", Phase.SUCCEEDED)
    assert first.api.state == replace(kept, status="failed")


@on(loaded)
async def test_what_the_first_writes_while_the_second_takes_over_is_not_lost(first, tmp_path):
    patch = first.api.patch

    def patch_first(*arguments):
        first.api.patch = patch
        asyncio.run(Holder(first.api, tmp_path).store._write({MEMORY: memory(5).to_json()}))
        return patch(*arguments)

    first.api.patch = patch_first
    assert (await Holder(first.api, tmp_path, "two").store.load()).job.training.step == 5


BROKEN = {
    "memory": {"binaryData": {MEMORY: pack(b"{}")}},
    "journal": {"binaryData": {state_module.JOURNAL: "AAAA"}},
    "of a later format": {"data": {state_module.HEAD: '{"format": 3}'}},
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
@on(loaded)
async def test_damage_is_the_users_business_and_stays_when_the_job_ends_for_it(first, tmp_path, broken):
    first.api.there = {"metadata": {"resourceVersion": "1"}, **broken}
    bench = Holder(first.api, tmp_path, "another")
    with pytest.raises(UserError, match="what an earlier master has left can't be read: "):
        await bench.store.load()
    await bench.store.claim()
    await bench.store.finish("failed", Phase.SUCCEEDED)
    kept = first.api.there["binaryData"]
    assert kept == broken.get("binaryData", {}) | {STATUS: kept[STATUS]}
    assert first.api.there["data"] == broken.get("data", {})
    assert unpack_state({"binaryData": {STATUS: kept[STATUS]}}).status == "failed"


@on(loaded)
async def test_a_state_that_does_not_change_is_written_once_a_minute(bench):
    for _ in range(120):  # two minutes
        await bench.save(1)
        bench.now += 1
    assert len(bench.api.written) == 2
    bench.write('{"event": "a"}\n')
    await bench.store.save(replace(memory(1), journal_bytes=bench.journal.stat().st_size))
    assert len(bench.api.written) == 3, "there is something new"


@on(loaded)
async def test_of_a_journal_that_is_too_long_the_newest_is_kept_however_often(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(state_module, "MOST_JOURNAL_BYTES", 4000)
    for number in range(1000):
        bench.write(f"entry {number * 7919 % 10007}\n")
        if number == 500:
            bench = Holder(bench.api, tmp_path, "two")
            await bench.store.load()
        if number % 10 == 9:
            await bench.save(number)
            assert len(bench.api.there["binaryData"][state_module.JOURNAL]) <= 4000
            kept = bench.api.state.journal.splitlines()
            assert kept == bench.journal.read_text().splitlines()[-len(kept) :]
            assert len(kept) > min(number, 200)
    await bench.save(1001, entries(0).replace("\n", " ") * 9 + "\n")
    assert bench.api.state.journal == "", "a line that is too long by itself"
    await bench.save(1002, "last\n")
    assert bench.api.state.journal == "last\n"


@on(loaded)
async def test_ten_thousand_workers_and_their_journal_fit_into_a_config_map(bench):
    """With names, reasons and numbers of their own, as far as they have such."""
    most, limits = range(MOST_WORKERS), WorkerRange(minimum=1, maximum=MOST_WORKERS)
    why = [f"in place of worker {n - 1}, which was preempted" for n in most]
    workers = tuple(WorkerSnapshot(n, WorkerState.MEMBER, why[n], 12, True, "") for n in most)
    members = tuple(Member(n, f"10.{n % 7}.{n // 250}.{n % 250}", 100 + n % 3, True, 3, 12) for n in most)
    world = World(12, members, "worker 17 left: preempted")
    snapshot = Snapshot(JobSnapshot(limits, 20_000, tuple(most), world=world, workers=workers), started=1.0)
    status = pb.JobStatus(job_name="digits", phase="running", reason="")
    for n in most:
        status.workers.add(worker_id=n, state="member", rank=n, host=f"gpu-node-{hash_of(n)[:8]}", pid=1, reason=why[n])
    bench.store.status = lambda: json_format.MessageToJson(status, indent=None)
    bench.write("".join(entries(number) for number in range(500)))
    await bench.store.save(snapshot)
    assert bench.api.written[-1] < 1 << 20
    assert Snapshot.from_json(bench.api.state.memory) == snapshot
    assert bench.api.state.journal.endswith(entries(499))


# ---- the master's own pod and account ----


class OnePod:
    """Whether the Job counts the end of a master's pod, as it was set."""

    def __init__(self):
        self.set = []

    def list(self, kind, **selection):
        own = {"name": "m", "uid": "7", "resourceVersion": "1", "finalizers": ["mine", TRACKING]}
        return [{"metadata": own}, {"metadata": {**own, "uid": "8"}}]

    def patch(self, kind, name, change):
        assert change["metadata"]["resourceVersion"] == "1", "else a change of another one's would be lost"
        assert "mine" in change["metadata"]["finalizers"]
        self.set.append(TRACKING in change["metadata"]["finalizers"])


@pytest.mark.parametrize(
    ("end", "told"),
    [(None, [False, True]), (RelievedError("drained"), [False]), (ValueError("a fault of ours"), [False, True])],
    ids=["the job is over", "it is told to leave", "it crashes"],
)
def test_a_master_at_work_is_not_counted_until_the_job_is_over_or_it_crashes(end, told):
    async def live():
        with suppress(RelievedError, ValueError):
            async with uncounted(pod, "digits", "7"):
                if end:
                    raise end

    pod = OnePod()
    asyncio.run(live())
    assert pod.set == told


def test_a_right_that_the_masters_account_has_not_got_is_not_waited_for_as_an_answer_is(monkeypatch):
    monkeypatch.setattr(state_module, "RIGHTS_SECONDS", 0.0)
    client = SimpleNamespace(namespace="lab", may=lambda verb, what: what == "pods" and verb not in ("watch", "delete"))
    with pytest.raises(NotDoneError, match=r"^its account cannot watch, delete the resource pods in namespace lab: "):
        asyncio.run(asyncio.wait_for(state_module.request(partial(require_rights, client), "see"), 10.0))


def test_a_master_that_is_told_to_leave_while_it_starts_leaves(monkeypatch, tmp_path):
    def read(kind, name):
        os.kill(os.getpid(), signal.SIGTERM)
        raise UnreachableError("no answer")

    monkeypatch.setattr(cluster_master, "identify", lambda tls: SimpleNamespace(job="digits"))
    monkeypatch.setattr(cluster_master, "connect", lambda target, own_account: SimpleNamespace(read=read))
    environ = dict.fromkeys([f"ELASTICDL_{each}" for each in ("NAMESPACE", "POD_UID", "HOST", "TLS")], "x")
    with pytest.raises(RelievedError, match="it got SIGTERM"):
        asyncio.run(asyncio.wait_for(cluster_master.run(environ, tmp_path, tmp_path), 20.0))


def test_a_template_that_is_damaged_is_the_users_mistake(tmp_path):
    (tmp_path / "damaged").write_text("{")
    for name in ("damaged", "missing"):
        with pytest.raises(UserError, match="can't read the template"):
            cluster_master.read_template(tmp_path / name)


# ---- a state that an earlier or a later version has written ----

KEPT = Path(__file__).with_name("job_state_format_1.json")
TRAINING = TrainingSnapshot(
    epochs_done=1, begun=True, epoch=1, epoch_steps=4, total_epochs=3, step=24, total_steps=60, samples=384, loss=0.5,
    metrics={"accuracy": 0.75}, collective="horovod", counted=24, epoch_loss=(32.0, 64), newest=(3, 24), compared_step=20,
    compared_workers=2,
)  # fmt: skip
JOB = JobSnapshot(
    limits=WorkerRange(minimum=1, maximum=4),
    next_id=5,
    finished=(1,),
    together=True,
    world=World(3, (Member(2, "10.0.0.2", 20, True, 1, 3), Member(3, "10.0.0.3", 0, False)), "worker 3 came"),
    phase=Phase.STOPPING,
    outcome=Outcome(Phase.STOPPED, "elasticdl stop", checkpoint=True),
    training=TRAINING,
    workers=(
        WorkerSnapshot(2, WorkerState.MEMBER, "wanted", world_version=3, ready=True),
        WorkerSnapshot(4, WorkerState.PENDING, "0/2 nodes are available", failure="its node was lost"),
    ),
    crashes=Crashes(at_start=1, in_training=2, steps_since=7),
    target=2,
)
WRITTEN = Snapshot(JOB, 1.7e9, 2, {2: 17, 4: 1}, UnwrittenSteps({"step": 24, "steps": 4}, 0.25), journal_bytes=3830)


def kept():
    api = FakeApi()
    api.there = json.loads(KEPT.read_text())["digits-state"]
    return api


def test_the_state_of_the_first_version_is_taken_over(tmp_path):
    api = kept()
    bench = Holder(api, tmp_path, "next")
    assert asyncio.run(bench.store.load()) == WRITTEN
    newest = bench.journal.read_text()  # the rest is in an object that is not read any more
    assert [json.loads(line)["message"] for line in newest.splitlines()][-12:] == [f"no. {n}" for n in range(48, 60)]
    assert api.state.status == '{"phase": "running"}'


def test_what_is_written_is_read_and_fields_that_are_missing_have_their_defaults():
    assert Snapshot.from_json(WRITTEN.to_json()) == WRITTEN
    least = {"format": 2, "job": {"limits": {"minimum": 1, "maximum": 4}}, "started": 5.0}
    assert Snapshot.from_json(json.dumps(least)) == Snapshot(JobSnapshot(WorkerRange(minimum=1, maximum=4)), 5.0)


def test_what_is_no_snapshot_or_of_another_format_is_refused_in_one_line():
    other = [json.dumps({**json.loads(kept().state.memory), "format": written}) for written in (3, 1, None, "2")]
    for text in ("", "[]", '{"format": 2, "job": 1}', '{"format": 2}', "no", *other):
        words = "not .*: another version of elasticdl wrote it" if text in other else "snapshot|Expecting value"
        refused(words, partial(Snapshot.from_json, text), ValueError)


def _everywhere(content):
    """With a field that nobody knows wherever there are fields."""
    if isinstance(content, list):
        return [_everywhere(each) for each in content]
    if not isinstance(content, dict):
        return content
    numbered = all(key.isdigit() for key in content)  # a mapping by worker has no fields
    free = numbered or content.keys() <= {"accuracy"} or ("steps" in content and "step" in content)
    return {**{key: _everywhere(value) for key, value in content.items()}, **({} if free else {"new": {"a": [1]}})}


def test_fields_of_later_versions_are_ignored():
    content = _everywhere(json.loads(kept().state.memory))
    assert Snapshot.from_json(json.dumps(content)) == WRITTEN


def test_a_state_without_a_journal_of_its_own_is_taken_over(tmp_path):
    api = FakeApi()
    api.there["binaryData"] = {MEMORY: pack(kept().state.memory.encode())}
    bench = Holder(api, tmp_path, "next")
    assert asyncio.run(bench.store.load()) == WRITTEN
    assert bench.journal.read_text() == ""
