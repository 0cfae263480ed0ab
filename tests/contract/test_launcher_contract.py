"""What every launcher must do, checked on this machine's, and on the same one over places and a starter without processes."""

import asyncio
import sys
from contextlib import asynccontextmanager
from functools import partial

import psutil
import pytest
from agent_kit import acting, place
from fork_kit import Scene, launcher_of
from places_kit import FakePlaces, FakeStarter

from elasticdl.master.core.events import ExitCause, StacksFound, WorkerExited, WorkerPending, WorkerPlaced

PLACES = 2
ENDS_WHEN_TOLD = """
import os, sys, time
told = os.path.join(os.environ["WORK"], os.environ["ELASTICDL_WORKER_ID"])
while not os.path.exists(told):
    time.sleep(0.02)
print("ends")
sys.exit(int(open(told).read()))
"""


# Each is a launcher with room for two workers, each of which ends when the test says so: ``end(worker_id, code)``.


@asynccontextmanager
async def fake_bench(tmp_path):
    """Places and a starter without processes."""
    places = FakePlaces(room=PLACES)
    starter = FakeStarter(places)
    bench = Scene((places.reporting_to, starter.reporting_to), tmp_path)
    bench.end = starter.exit
    yield bench
    await bench.launcher.close()


@asynccontextmanager
async def local_bench(tmp_path, modules=None):
    def end(worker_id, code):
        (tmp_path / f".{worker_id}").write_text(str(code))
        (tmp_path / f".{worker_id}").rename(tmp_path / str(worker_id))

    environ = {"PATH": "/usr/bin:/bin", "WORK": str(tmp_path)}
    async with launcher_of((sys.executable, "-c", ENDS_WHEN_TOLD), tmp_path, modules, environ, PLACES) as bench:
        bench.end = end
        yield bench
    assert not [r for r in bench.seen if isinstance(r, WorkerPlaced) and psutil.pid_exists(r.pid)]


@asynccontextmanager
async def agent_bench(tmp_path):
    """Places that have agents."""
    async with acting(tmp_path, ENDS_WHEN_TOLD) as scene:
        master = await scene.master()
        bench = Scene((FakePlaces(room=PLACES).reporting_to, master.agents.reporting_to), tmp_path)
        bench.end = scene.tell
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
    assert (await bench.placed(0)).pid > 0
    with pytest.raises(ValueError, match="0"):
        await bench.launcher.launch(0)
    bench.end(0, 0)
    assert await bench.ended(0) == (ExitCause.CLEAN, 0)
    await bench.placed(1)
    bench.end(1, 3)
    assert await bench.ended(1) == (ExitCause.CRASHED, 3)
    bench.launcher.kill(0)
    await bench.launcher.close()
    assert bench.reports.empty()


@contract
async def test_terminate_and_kill_end_a_worker_from_outside(bench):
    for worker_id, end in enumerate([bench.launcher.terminate, bench.launcher.kill]):
        await bench.placed(worker_id)
        end(worker_id)
        assert (await bench.ended(worker_id))[0] is ExitCause.KILLED


@contract
async def test_a_worker_without_a_place_is_pending_until_one_is_free(bench):
    for worker_id in range(PLACES):
        await bench.placed(worker_id)  # before the next: who comes first is not the launcher's to say
    await bench.launcher.launch(PLACES)
    pending = await bench.next(WorkerPending)
    assert (pending.worker_id, bool(pending.reason)) == (PLACES, True)
    bench.end(0, 0)
    await bench.ended(0)
    assert (await bench.next(WorkerPlaced)).worker_id == PLACES


@contract
async def test_where_a_worker_stands_is_told_while_it_runs(bench):
    await bench.placed(0)
    bench.launcher.read_stacks(0)
    assert (await bench.next(StacksFound)).worker_id == 0
    bench.end(0, 0)
    await bench.ended(0)
    for worker_id in (0, 7):  # gone, and unknown
        for ask in (bench.launcher.read_stacks, bench.launcher.kill, bench.launcher.terminate):
            ask(worker_id)
    await bench.launcher.close()
    assert bench.reports.empty()


@contract
async def test_close_ends_everything_and_tells_each_end(bench):
    for worker_id in range(PLACES):
        await bench.placed(worker_id)
    await bench.launcher.launch(PLACES)
    await bench.next(WorkerPending)
    await bench.launcher.close()
    assert {(await bench.next(WorkerExited)).worker_id for _ in range(PLACES + 1)} == set(range(PLACES + 1))
    assert bench.reports.empty()
