"""A job's journal over the deaths of its masters: each step once, and nothing that a worker has said is missing."""

import asyncio
import json
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_kubernetes_state import FakeApi
from test_master_serve import NoPlace

from elasticdl.elastic.core.plan import Progress
from elasticdl.elastic.core.protocol import Member, World
from elasticdl.elastic.core.reporting import Reporting
from elasticdl.elastic.link.stream import Kept
from elasticdl.job import messages as m
from elasticdl.job.jobdir import JobDir
from elasticdl.job.journal import number_of, read_journal
from elasticdl.job.spec import JobSpec
from elasticdl.kube.client import ApiError
from elasticdl.master.core import events as e
from elasticdl.master.shell import journal_file
from elasticdl.master.shell import loop as loop_module
from elasticdl.master.shell import state_config_map as state_module
from elasticdl.master.shell.journal_file import Journal
from elasticdl.master.shell.serve import Master
from elasticdl.master.shell.state_config_map import ClusterState

SPEC = JobSpec.model_validate({"num_workers": "1", "command": ("true",)})
SETTLED = 40  # turns of the event loop


class Route:
    """The ConfigMap as one master reaches it: not to write while it is ``closed``."""

    def __init__(self, real):
        self.real, self.read, self.closed = real, real.read, False

    def patch(self, kind, name, change):
        if self.closed:
            raise ApiError(503, "not now")
        return self.real.patch(kind, name, change)


class NoServer:
    async def start(self, servicer): ...

    async def close(self): ...


class OnePlace(NoPlace):
    """In which there is one worker, that no master's death concerns."""

    async def find(self, remembered):
        assert remembered == dict.fromkeys(self.launched, "slot 0")
        return [e.FoundWorker(worker_id, "h", 7) for worker_id in self.launched]


class Town:
    """A job of one worker, whose masters die. Only what is in the ConfigMap outlives them, and what the worker keeps."""

    def __init__(self, folder):
        self.folder, self.object = Path(folder), FakeApi()
        self.launched, self.said, self.told = [], [], []
        self.masters = self.step = 0
        self.reporting, self.kept = Reporting(), Kept()
        self.reporting.enter(World.of(1, (Member(0, "h", 0, False),), 0, ""))

    async def begin(self):
        await self.rise()
        while not self.launched:
            await asyncio.sleep(0)
        await self.post(e.FromWorker(0, m.Hello("h", 7)), e.FromWorker(0, m.Ask(0, 0, has_state=False)))
        while '"slot 0"' not in self.object.state.memory:  # of the worker, which a slow machine may save later
            await asyncio.sleep(0.001)

    async def rise(self):
        self.masters, made = self.masters + 1, asyncio.Event()
        self.rose_at = time.time()
        self.job_dir = JobDir(self.folder / str(self.masters) / "digits")
        self.job_dir.path.mkdir(parents=True)
        self.api = Route(self.object)
        state = ClusterState(self.api, "digits", f"master-{self.masters}", self.job_dir.journal)

        def make_launcher(report, limits):
            self.report, launcher = report, OnePlace(report)
            made.set()
            launcher.launched = self.launched
            launcher.launching = lambda: report(e.WorkerPlaced(self.launched[-1], "h", 7, place="slot 0"))
            return launcher

        master = Master(SPEC, self.job_dir, NoServer(), state, make_launcher)
        self.serving = asyncio.create_task(master.run())
        await made.wait()
        await self.settle()

    async def restart(self):
        self.api.closed = True
        self.serving.cancel()
        with suppress(asyncio.CancelledError):
            await self.serving
        self.note_told()
        await self.rise()
        back = e.FromWorker(0, m.Hello("h", 7, 1))
        await self.post(back, *self.reporting.again(), *self.kept.unsaved())

    def note_told(self):
        """What the master that has just gone told, as somebody has seen it who asked after the last entry that it knew."""
        last = max(self.told, default=0)
        for entry in read_journal(self.job_dir.journal):
            if entry["number"] > last:
                self.told.append(entry["number"])
            else:
                assert entry["time"] < self.rose_at, "an entry of its own that nobody would be told"

    async def post(self, *said):
        for each in said:
            self.report(each if isinstance(each, e.FromWorker) else e.FromWorker(0, each))
        await self.settle()

    async def settle(self):
        for _ in range(SETTLED):
            await asyncio.sleep(0)
        await asyncio.sleep(0.002)

    async def act(self, action):
        match action:
            case "step":
                self.step += 1
                progress, ends = Progress(step=self.step, samples=8 * self.step), self.step % 3 == 0
                self.reporting.count(progress, 0.5, 8, 0.1, 0.05 * self.step, ends_epoch=ends)
                await self.post(*self.reporting.flush())
            case "say":
                self.said.append(f"/{len(self.said)}")
                await self.post(self.kept.add(m.Notice("checkpoint", {"step": self.step, "path": self.said[-1]})))
            case "close" | "open":
                self.api.closed = action == "close"
                await self.settle()
            case "kill":
                await self.restart()

    async def end(self):
        self.api.closed = False
        self.report(e.FromWorker(0, m.Finished(self.step, 1, {})))
        self.report(e.WorkerExited(0, e.ExitCause.CLEAN, 0, ""))
        await asyncio.wait_for(self.serving, 30)
        self.note_told()
        return list(read_journal(self.job_dir.journal))


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setattr(loop_module, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(state_module, "NEWS_SECONDS", 0.0)
    monkeypatch.setattr(loop_module, "RETRY_SECONDS", 0.001)
    monkeypatch.setattr(loop_module, "CLOSE_SECONDS", 0.001)


async def journal_of(*actions):
    with TemporaryDirectory() as folder:
        town = Town(folder)
        await town.begin()
        for action in actions:
            await town.act(action)
        return town, await town.end()


ACTIONS = st.lists(st.sampled_from(["step", "step", "say", "close", "open", "kill"]), max_size=14)


@settings(max_examples=30, deadline=None)
@given(ACTIONS)
@example(["close", "step", "say", "step", "kill", "open", "step"])
@example(["step", "step", "close", "step", "step", "say", "kill", "kill"])
def test_each_step_and_each_word_is_in_the_journal_once_whenever_its_masters_die(actions):
    town, entries = asyncio.run(journal_of(*actions))
    steps = [entry for entry in entries if entry["event"] == "steps"]
    sums = [sum(entry[name] for entry in steps) for name in ("steps", "again", "samples")]
    assert sums == [town.step, 0, 8 * town.step]
    assert [entry["path"] for entry in entries if entry["event"] == "checkpoint"] == town.said
    assert all(one["number"] < next_["number"] for one, next_ in pairwise(entries)), "whatever was told and not saved"
    assert len(town.told) == len(set(town.told))
    epochs = [entry["epoch"] for entry in entries if entry["event"] == "epoch_finished"]
    assert len(epochs) == len(set(epochs))
    assert (entries[0]["event"], entries[-1]["event"]) == ("job_started", "job_finished")
    assert json.loads(town.object.state.memory)["generation"] == town.masters


def test_the_first_step_that_another_master_hears_of_is_no_first_step_of_a_world():
    """Else it counted without its time, as if it ended a pause."""
    _, entries = asyncio.run(journal_of("step", "step", "step", "kill", "step", "step"))
    seconds = sum(entry["seconds"] for entry in entries if entry["event"] == "steps")
    assert seconds == pytest.approx(4 * 0.05), json.dumps(entries)


reading = st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=4)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 200), reading)
def test_whoever_reads_a_journal_misses_nothing_and_is_told_nothing_twice(before, later, chunk, readers):
    """They follow it or not, and know some of it already; the loop goes on between two pieces, in which it grows."""

    async def read(journal, after, follow):
        return [number_of(line) async for line in journal.entries(after, follow=follow)]

    async def write(journal, count):
        for _ in range(count):
            await asyncio.sleep(0)
            journal.append("warning", {"message": ""})

    async def grow(journal):
        await write(journal, later)
        journal.close()

    async def run(journal):
        await write(journal, before)
        *found, _ = await asyncio.gather(*(read(journal, *who) for who in readers), grow(journal))
        for each, (after, to_the_end) in zip(found, readers, strict=True):
            last = before + later if to_the_end else max(before, *each, 0)
            assert each == [*range(after + 1, last + 1)]
        assert await read(journal, 0, True) == [*range(1, before + later + 1)], "of one that is over, too"

    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_file, "CHUNK_BYTES", chunk)
        asyncio.run(asyncio.wait_for(run(Journal(Path(folder) / "journal.jsonl")), 30))
