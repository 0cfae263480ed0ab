"""What every launcher must do, checked on this machine's, and on the same one over places and a starter without processes."""

import asyncio
import sys
from contextlib import asynccontextmanager
from functools import partial

import psutil
import pytest
from agent_kit import acting, place
from fork_kit import launcher_of
from places_kit import FakePlaces, FakeStarter

from elasticdl.master.core.events import ExitCause, StacksFound, WorkerExited, WorkerPending, WorkerPlaced
from elasticdl.places.launcher import PlaceLauncher

PLACES = 2
DEADLINE = 30.0


class Bench:
    """A launcher with room for two workers, each of which ends when the test says so."""

    def __init__(self, end, launcher=None, reports=None):
        self.end = end  # makes a worker end by itself: (worker_id, code)
        self.launcher, self.reports = launcher, reports or asyncio.Queue()
        self.seen = []

    async def next(self, kind):
        """The next report, which must be of this kind."""
        report = await asyncio.wait_for(self.reports.get(), DEADLINE)
        self.seen.append(report)
        assert isinstance(report, kind), report
        return report

    def nothing_more(self):
        return self.reports.empty()


@asynccontextmanager
async def fake_bench(tmp_path):
    """Places and a starter without processes."""
    places = FakePlaces(room=PLACES)
    starter = FakeStarter(places)
    bench = Bench(starter.exit)
    bench.launcher = PlaceLauncher(places.reporting_to, starter.reporting_to, bench.reports.put_nowait)
    yield bench
    await bench.launcher.close()


ENDS_WHEN_TOLD = """
import os, sys, time
told = os.path.join(os.environ["WORK"], os.environ["ELASTICDL_WORKER_ID"])
while not os.path.exists(told):
    time.sleep(0.02)
print("ends")
sys.exit(int(open(told).read()))
"""


@asynccontextmanager
async def local_bench(tmp_path, modules=None):
    def end(worker_id, code):
        (tmp_path / f".{worker_id}").write_text(str(code))
        (tmp_path / f".{worker_id}").rename(tmp_path / str(worker_id))

    environ = {"PATH": "/usr/bin:/bin", "WORK": str(tmp_path)}
    async with launcher_of((sys.executable, "-c", ENDS_WHEN_TOLD), tmp_path, modules, environ, PLACES) as made:
        bench = Bench(end, made.launcher, made.reports)
        yield bench
    assert not [r for r in bench.seen if isinstance(r, WorkerPlaced) and psutil.pid_exists(r.pid)]


@asynccontextmanager
async def agent_bench(tmp_path):
    """Places that have agents."""
    async with acting(tmp_path, ENDS_WHEN_TOLD) as scene:
        bench, master = Bench(scene.tell), await scene.master()
        ports = FakePlaces(room=PLACES).reporting_to, master.agents.reporting_to
        bench.launcher = PlaceLauncher(*ports, bench.reports.put_nowait)
        names = [f"place-{number}" for number in range(PLACES)]
        for name in names:
            await scene.agent(master.port, name)
        await master.agents.found([place(name) for name in names], {-1: ""})
        yield bench
        await bench.launcher.close()


BENCHES = {"fake": fake_bench, "local": local_bench, "forked": partial(local_bench, modules=["json"]), "agents": agent_bench}  # fmt: skip


def contract(check):
    """Run a check on each launcher."""

    @pytest.mark.parametrize("make", BENCHES.values(), ids=BENCHES)
    def test(make, tmp_path):
        async def run():
            async with make(tmp_path) as bench:
                await check(bench)

        asyncio.run(run())

    return test


@contract
async def test_a_worker_is_placed_and_its_end_is_told_once(bench):
    await bench.launcher.launch(0)
    with pytest.raises(ValueError, match="0"):
        await bench.launcher.launch(0)
    placed = await bench.next(WorkerPlaced)
    assert (placed.worker_id, placed.pid > 0) == (0, True)
    bench.end(0, 0)
    exited = await bench.next(WorkerExited)
    assert (exited.worker_id, exited.cause, exited.code) == (0, ExitCause.CLEAN, 0)
    await bench.launcher.launch(1)
    await bench.next(WorkerPlaced)
    bench.end(1, 3)
    exited = await bench.next(WorkerExited)
    assert (exited.cause, exited.code) == (ExitCause.CRASHED, 3)
    bench.launcher.kill(0)
    await bench.launcher.close()
    assert bench.nothing_more()


@contract
async def test_terminate_and_kill_end_a_worker_from_outside(bench):
    for worker_id, end in enumerate([bench.launcher.terminate, bench.launcher.kill]):
        await bench.launcher.launch(worker_id)
        await bench.next(WorkerPlaced)
        end(worker_id)
        exited = await bench.next(WorkerExited)
        assert (exited.worker_id, exited.cause) == (worker_id, ExitCause.KILLED)


@contract
async def test_a_worker_without_a_place_is_pending_until_one_is_free(bench):
    for worker_id in range(PLACES):
        await bench.launcher.launch(worker_id)
        await bench.next(WorkerPlaced)  # before the next: who comes first is not the launcher's to say
    await bench.launcher.launch(PLACES)
    pending = await bench.next(WorkerPending)
    assert pending.worker_id == PLACES
    assert pending.reason
    bench.end(0, 0)
    await bench.next(WorkerExited)
    assert (await bench.next(WorkerPlaced)).worker_id == PLACES


@contract
async def test_where_a_worker_stands_is_told_while_it_runs(bench):
    await bench.launcher.launch(0)
    await bench.next(WorkerPlaced)
    bench.launcher.read_stacks(0)
    assert (await bench.next(StacksFound)).worker_id == 0
    bench.end(0, 0)
    await bench.next(WorkerExited)
    for worker_id in (0, 7):  # gone, and unknown
        for ask in (bench.launcher.read_stacks, bench.launcher.kill, bench.launcher.terminate):
            ask(worker_id)
    await bench.launcher.close()
    assert bench.nothing_more()


@contract
async def test_close_ends_everything_and_tells_each_end(bench):
    for worker_id in range(PLACES + 1):
        await bench.launcher.launch(worker_id)
        await bench.next(WorkerPlaced if worker_id < PLACES else WorkerPending)
    await bench.launcher.close()
    ended = {(await bench.next(WorkerExited)).worker_id for _ in range(PLACES + 1)}
    assert ended == set(range(PLACES + 1))
    assert bench.nothing_more()
