"""What every launcher must do, checked on this machine's, and on the same one over places and a starter without processes."""

import asyncio
import sys
from contextlib import asynccontextmanager
from functools import partial

import psutil
import pytest
from agent_kit import acting, place
from fork_kit import launcher_here
from places_kit import FakePlaces, FakeStarter

from elasticdl.common.environment import WORKER_ID
from elasticdl.master.state.events import ExitCause, StacksFound, WorkerExited, WorkerPending, WorkerPlaced
from elasticdl.places.fork_server import ForkServer
from elasticdl.places.launcher import PlaceLauncher
from elasticdl.places.local import WorkerCommand
from elasticdl.places.worker_process import Spawner

PLACES = 2
DEADLINE = 30.0


class Bench:
    """A launcher with room for two workers, each of which ends when the test says so."""

    def __init__(self, end):
        self.end = end  # makes a worker end by itself: (worker_id, code)
        self.launcher = None
        self.reports = asyncio.Queue()
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
    ports = []

    def make_places(report):
        ports.append(FakePlaces(report, PLACES))
        return ports[0]

    def make_starter(report):
        ports.append(FakeStarter(report, ports[0]))
        return ports[1]

    bench = Bench(lambda worker_id, code: ports[1].exit(worker_id, code))
    bench.launcher = PlaceLauncher(make_places, make_starter, bench.reports.put_nowait)
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
async def local_bench(tmp_path, modules=()):
    def end(worker_id, code):
        (tmp_path / f".{worker_id}").write_text(str(code))
        (tmp_path / f".{worker_id}").rename(tmp_path / str(worker_id))

    common = {"PATH": "/usr/bin:/bin", "WORK": str(tmp_path)}
    argv = (sys.executable, "-c", ENDS_WHEN_TOLD)
    server = ForkServer(argv, common, modules, tmp_path / "master.log") if modules else None
    command = WorkerCommand(
        Spawner(argv, server),
        environment=lambda worker_id, place: {**common, WORKER_ID: str(worker_id)},
        log=lambda worker_id: tmp_path / f"worker-{worker_id}.log",
    )
    bench = Bench(end)
    bench.launcher = launcher_here(command, tmp_path, bench.reports.put_nowait, PLACES)
    yield bench
    await bench.launcher.close()
    assert not [r for r in bench.seen if isinstance(r, WorkerPlaced) and psutil.pid_exists(r.pid)]


@asynccontextmanager
async def agent_bench(tmp_path):
    """Places that have agents."""
    async with acting(tmp_path, ENDS_WHEN_TOLD) as scene:
        bench, master = Bench(scene.tell), await scene.master()
        starter, ports = master.agents.reporting_to, []

        def make_places(report):
            ports.append(FakePlaces(report, PLACES))
            return ports[0]

        bench.launcher = PlaceLauncher(make_places, starter, bench.reports.put_nowait)
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
async def test_where_a_worker_stands_and_what_it_has_printed_is_told_while_it_runs(bench):
    await bench.launcher.launch(0)
    await bench.next(WorkerPlaced)
    for read in (bench.launcher.read_stacks, bench.launcher.read_log):
        read(0)
        found = await bench.next(StacksFound)
        assert found.worker_id == 0
    bench.end(0, 0)
    await bench.next(WorkerExited)
    for worker_id in (0, 7):  # gone, and unknown
        for ask in (bench.launcher.read_stacks, bench.launcher.read_log, bench.launcher.kill, bench.launcher.terminate):
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
