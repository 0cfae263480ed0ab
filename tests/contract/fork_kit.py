"""Launchers under test, and workers of theirs that run a program once."""

import asyncio
import os
import sys
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
WAITING = "import os, time; print(os.getpid(), 'numpy' in __import__('sys').modules, flush=True); time.sleep(600)"


class Launching:
    """A launcher, and what it reports."""

    def __init__(self, make, folder, spawner=None, **options):
        self.spawner, self.reports, self.folder, self.seen = spawner, asyncio.Queue(), folder, []
        self.launcher = PlaceLauncher(*make, self.reports.put_nowait, **options)

    async def next(self, kind):
        """The next report, which must be of this kind."""
        report = await asyncio.wait_for(self.reports.get(), DEADLINE)
        self.seen.append(report)
        assert isinstance(report, kind), report
        return report

    async def placed(self, number):
        """Launch it; returns its report once it is placed."""
        await self.launcher.launch(number)
        report = await self.next(WorkerPlaced)
        assert report.worker_id == number
        return report

    async def ended(self, number):
        """How its end is reported, which is the next report."""
        report = await self.next(WorkerExited)
        assert report.worker_id == number
        return report.cause, report.code

    async def ends_of(self, count):
        """What each of so many workers printed, and how its end is reported, in the order of their numbers."""
        for number in range(count):
            await self.launcher.launch(number)
        ends = []
        while len(ends) < count:
            report = await self.next(WorkerPlaced | WorkerExited)
            ends += [report] if isinstance(report, WorkerExited) else []
        ends.sort(key=lambda end: end.worker_id)
        logs = [self.folder / f"{number}.log" for number in range(count)]  # which one that can't be started has not
        return [(log.read_text() if log.exists() else "", end) for log, end in zip(logs, ends, strict=True)]

    @property
    def template(self):
        """What workers are forked from."""
        return psutil.Process(self.spawner._template.pid)


@asynccontextmanager
async def launcher_of(argv, folder, modules=None, environ=None, slots=0):
    """With ``modules`` its workers are forked."""
    folder.mkdir(exist_ok=True)
    before = set(psutil.Process().children(recursive=True))
    environ = {**(environ or os.environ), TESTED_BY: str(os.getpid())}
    common = {**environ, **python_path(environ)}
    spawner = Spawner(argv, modules or (), "", common, folder / "master.log")

    def log(number):
        return folder / f"{number}.log"

    starter = partial(LocalStarter, spawner, lambda number, place: {**common, WORKER_ID: str(number)}, log, log)
    scene = Launching((partial(Slots, slots, (), folder), starter), folder, spawner, seconds=TIMES)
    try:
        yield scene
    finally:
        await scene.launcher.close()
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


def forking(tmp_path, modules=MODULES, code=WAITING):
    """Its workers are forked from what has imported these modules, which may be files in this folder."""
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    return launcher_of([sys.executable, "-P", "-c", code], tmp_path, modules, environ)


def run_all(argv, folder, modules=None, environ=None, count=1):
    async def run():
        async with launcher_of(argv, folder, modules, environ) as scene:
            return await scene.ends_of(count)

    return asyncio.run(run())


def both(argv, tmp_path, caplog, **more):
    """`run_all` of workers that are started plainly, and of such that are forked."""
    plain = run_all(argv, tmp_path / "plain", **more)
    forked = run_all(argv, tmp_path / "forked", MODULES, **more)
    assert caplog.records == [], (tmp_path / "forked" / "master.log").read_text()
    return plain, forked


def written(tmp_path, text, name="program.py"):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path
