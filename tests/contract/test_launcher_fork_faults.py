"""Workers that are forked, when something dies, can't be forked, or is not wanted any more."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
from fork_kit import DEADLINE, forking, launcher_of, run_all, written

from elasticdl.master.core.events import ExitCause, WorkerExited
from tests.stories import on

MASTER = """
import asyncio, sys
from pathlib import Path
from fork_kit import forking

async def run():
    async with forking(Path(sys.argv[1])) as scene:
        print((await scene.placed(0)).pid, scene.template.pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(run())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@on(forking)
async def test_workers_outlive_the_process_they_were_forked_from_and_another_takes_its_place(
    scene, tmp_path, caplog, number
):
    worker, first = psutil.Process((await scene.placed(0)).pid), scene.template
    first.send_signal(number)
    await asyncio.to_thread(psutil.wait_procs, [first], DEADLINE)
    await scene.placed(1)  # nobody had noticed
    assert scene.template.pid != first.pid, "it imports before the next worker is launched"
    await scene.placed(2)
    assert worker.is_running()
    while not (tmp_path / "2.log").read_text().endswith("\n"):
        await asyncio.sleep(0.02)
    assert (tmp_path / "2.log").read_text().split()[1] == "True"
    scene.launcher.kill(0)
    exited = await scene.next(WorkerExited)
    assert (exited.worker_id, exited.cause, exited.code) == (0, ExitCause.KILLED, -9)
    assert ["is gone" in record.message for record in caplog.records] == [True]


def test_nothing_outlives_a_master_that_is_killed(tmp_path):
    master = subprocess.Popen(
        [sys.executable, "-c", MASTER, str(tmp_path)],
        cwd=Path(__file__).parent,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # it leaves its worker's folder in it
        stdout=subprocess.PIPE,
        text=True,
    )
    left = [psutil.Process(int(pid)) for pid in master.stdout.readline().split()]
    assert len(left) == 2
    master.kill()
    master.wait(DEADLINE)
    _, alive = psutil.wait_procs(left, DEADLINE)
    assert alive == []


@on(partial(forking, modules=["this"]))
async def test_a_worker_that_is_killed_does_not_wait_for_a_process_to_fork_from_that_hangs(scene):
    """Its end is told at once, and the next is started once there is something to fork from again."""
    first, template = await scene.placed(0), scene.template
    template.suspend()
    await scene.launcher.launch(1)
    await asyncio.sleep(0.3)
    scene.launcher.kill(1)
    exited = await scene.next(WorkerExited)
    assert (exited.worker_id, exited.cause, exited.detail) == (1, ExitCause.KILLED, "SIGKILL")
    template.resume()
    await scene.placed(2)
    assert psutil.pid_exists(first.pid)
    template.suspend()
    await scene.launcher.launch(3)
    await asyncio.sleep(0.1)
    await scene.launcher.close()
    assert {(await scene.next(WorkerExited)).worker_id for _ in range(3)} == {0, 2, 3}
    assert scene.reports.empty()


# What a module does that is imported before workers are forked, and what is told of it, once.
THREAD = "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
UNSAFE = {
    "threads": (THREAD, "threads"),
    "ends": ("import os; os._exit(1)", "is gone"),
    "raises": ("1 / 0", "is gone"),
    "is killed": ("import os; os.kill(os.getpid(), 9)", "is gone"),
}


@pytest.mark.parametrize(("text", "reason"), UNSAFE.values(), ids=UNSAFE)
def test_where_forks_are_not_safe_workers_start_plainly_and_it_is_not_tried_again(tmp_path, caplog, text, reason):
    count = f"import pathlib; pathlib.Path({str(tmp_path / 'count')!r}).open('a').write('x')\n"
    written(tmp_path, count + text, "unsafe.py")

    async def run():
        async with forking(tmp_path, ["unsafe"], "import sys; print('unsafe' in sys.modules)") as scene:
            ends = [(log, end.code) for log, end in await scene.ends_of(3)]
            assert ends == [("False\n", 0)] * 3
            assert scene.spawner._template is None

    asyncio.run(run())
    assert (tmp_path / "count").read_text() == "x"
    assert [reason in record.message for record in caplog.records] == [True], caplog.text


def test_a_module_beside_the_script_with_the_name_of_an_imported_one_is_the_script_s(tmp_path, caplog):
    written(tmp_path, "MINE = True", "colorsys.py")
    path = written(tmp_path, "import colorsys; print(colorsys.MINE)")
    ((printed, exited),) = run_all([sys.executable, str(path)], tmp_path / "work", ["colorsys"])
    assert (printed, exited.code) == ("True\n", 0)
    assert f"{tmp_path / 'colorsys.py'} beside the program" in caplog.text


SLEEPS = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); time.sleep(float(sys.argv[1])); sys.exit(5)"


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_random_ends_are_each_told_once_and_leave_nothing(tmp_path, seed):
    """Workers, their children, and the process they are forked from are killed at any moment."""
    rng = random.Random(seed)

    async def run():
        async with launcher_of((sys.executable, "-c", SLEEPS, "0.05"), tmp_path, ["random"]) as scene:
            for number in range(40):
                await scene.launcher.launch(number)
                await asyncio.sleep(rng.random() * 0.03)
                if rng.random() < 0.3:
                    rng.choice([scene.launcher.kill, scene.launcher.terminate])(number)
                elif rng.random() < 0.2 and scene.spawner._template:
                    scene.spawner._template.kill()
        ends = [scene.reports.get_nowait() for _ in range(scene.reports.qsize())]
        assert sorted(end.worker_id for end in ends if isinstance(end, WorkerExited)) == list(range(40))

    asyncio.run(run())
