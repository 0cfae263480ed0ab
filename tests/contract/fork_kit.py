"""Launchers under test, and workers of theirs that run a program once."""

import asyncio
import os
from contextlib import asynccontextmanager
from functools import partial

import psutil

from elasticdl.common.credentials import WORKER_ID
from elasticdl.common.front_ends import python_path
from elasticdl.master.core.events import WorkerExited, WorkerPlaced
from elasticdl.places.launcher import PlaceLauncher
from elasticdl.places.local import TIMES, LocalStarter, Slots
from elasticdl.places.worker_process import Spawner

DEADLINE = 60.0
TESTED_BY = "TESTED_BY"  # in the environment of all that a launcher under test starts
MODULES = ("multiprocessing", "tempfile", "random", "logging", "numpy")


@asynccontextmanager
async def launcher_of(argv, folder, modules=None, environ=None, slots=0):
    """A launcher and what it reports; with ``modules`` its workers are forked."""
    folder.mkdir(exist_ok=True)
    before = set(psutil.Process().children(recursive=True))
    environ = {**(environ or os.environ), TESTED_BY: str(os.getpid())}
    common = {**environ, **python_path(environ)}
    spawner = Spawner(argv, modules or (), "", common, folder / "master.log")

    def log(number):
        return folder / f"{number}.log"

    starter = partial(LocalStarter, spawner, lambda number, place: {**common, WORKER_ID: str(number)}, log, log)
    reports = asyncio.Queue()
    slots = partial(Slots, slots, (), folder)
    launcher = PlaceLauncher(slots, starter, reports.put_nowait, seconds=TIMES)
    launcher.spawner = spawner
    try:
        yield launcher, reports
    finally:
        await launcher.close()
    left = set(psutil.Process().children(recursive=True)) - before
    assert not (left := [each for each in left if is_of_a_launcher(each)]), left


def is_of_a_launcher(process):
    """Not multiprocessing's, nor what a cluster of other tests starts meanwhile."""
    try:
        return process.environ().get(TESTED_BY) == str(os.getpid())
    except psutil.ZombieProcess:  # nothing is left of its environment: it is whose who has not waited for it
        parent = process.parent()
        return parent is not None and (parent.pid == os.getpid() or is_of_a_launcher(parent))
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


async def next_of(reports, kind):
    report = await asyncio.wait_for(reports.get(), DEADLINE)
    assert isinstance(report, kind), report
    return report


def run_one(argv, folder, modules=None, environ=None):
    """What a worker prints, and how its end is reported."""

    async def run():
        async with launcher_of(argv, folder, modules, environ) as (launcher, reports):
            await launcher.launch(0)
            while not isinstance(exited := await next_of(reports, WorkerPlaced | WorkerExited), WorkerExited):
                continue
            log = folder / "0.log"  # which one that can't be started has not
            return log.read_text() if log.exists() else "", exited

    return asyncio.run(run())


def both(argv, tmp_path, caplog, **more):
    """Of a worker started plainly, and of one that was forked."""
    plain = run_one(argv, tmp_path / "plain", **more)
    forked = run_one(argv, tmp_path / "forked", MODULES, **more)
    assert caplog.records == [], (tmp_path / "forked" / "master.log").read_text()
    return plain, forked


def written(tmp_path, text, name="program.py"):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path
