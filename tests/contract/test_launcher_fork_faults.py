"""Workers that are forked, when something dies, can't be forked, or is not wanted any more."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from fork_kit import DEADLINE, MODULES, launcher_of, next_of, run_one, written

from elasticdl.master.core.events import ExitCause, WorkerExited, WorkerPlaced

WAITING = "import os, time; print(os.getpid(), 'numpy' in __import__('sys').modules, flush=True); time.sleep(600)"


MASTER = """
import asyncio, sys
from fork_kit import MODULES, launcher_of, next_of
from test_launcher_fork_faults import WAITING, template_of
from elasticdl.master.core.events import WorkerPlaced
from pathlib import Path

async def run():
    async with launcher_of([sys.executable, "-c", WAITING], Path(sys.argv[1]), MODULES) as (launcher, reports):
        await launcher.launch(0)
        print((await next_of(reports, WorkerPlaced)).pid, template_of(launcher).pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(run())
"""


def template_of(launcher):
    return psutil.Process(launcher.spawner._template.pid)


@pytest.fixture
def forking(tmp_path):
    """A launcher whose workers wait, forked from what has imported these modules; a module with this text is to be found."""

    def opened(modules=MODULES, **texts):
        for name, text in texts.items():
            written(tmp_path, text, f"{name}.py")
        environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return launcher_of([sys.executable, "-c", WAITING], tmp_path, modules, environ)

    return opened


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_outlive_the_process_they_were_forked_from_and_another_takes_its_place(
    forking, tmp_path, caplog, number
):
    async def run():
        async with forking() as (launcher, reports):
            await launcher.launch(0)
            worker = psutil.Process((await next_of(reports, WorkerPlaced)).pid)
            first = template_of(launcher)
            first.send_signal(number)
            await asyncio.to_thread(psutil.wait_procs, [first], DEADLINE)
            await launcher.launch(1)  # nobody had noticed
            await next_of(reports, WorkerPlaced)
            assert template_of(launcher).pid != first.pid, "it imports before the next worker is launched"
            await launcher.launch(2)
            await next_of(reports, WorkerPlaced)
            assert worker.is_running()
            while not (tmp_path / "2.log").read_text().endswith("\n"):
                await asyncio.sleep(0.02)
            assert (tmp_path / "2.log").read_text().split()[1] == "True"
            launcher.kill(0)
            exited = await next_of(reports, WorkerExited)
            assert (exited.worker_id, exited.cause, exited.code) == (0, ExitCause.KILLED, -9)

    asyncio.run(run())
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


FATAL = """
import os, pathlib, signal
pathlib.Path({count!r}).open("a").write("x")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_to_fork_from_that_is_killed_while_it_imports_is_not_started_again(forking, tmp_path):
    async def run():
        async with forking(["fatal_import"], fatal_import=FATAL.format(count=str(tmp_path / "count"))) as (
            launcher,
            reports,
        ):
            for worker in range(3):
                await launcher.launch(worker)
                await next_of(reports, WorkerPlaced)
            assert launcher.spawner._template is None

    asyncio.run(run())
    assert (tmp_path / "count").read_text() == "x"


def test_a_worker_that_is_killed_does_not_wait_for_a_process_to_fork_from_that_hangs(forking):
    """Its end is told at once, and the next is started once there is something to fork from again."""

    async def run():
        async with forking(["this"]) as (launcher, reports):
            await launcher.launch(0)
            first = await next_of(reports, WorkerPlaced)
            template = template_of(launcher)
            template.suspend()
            await launcher.launch(1)
            await asyncio.sleep(0.3)
            launcher.kill(1)
            exited = await next_of(reports, WorkerExited)
            assert (exited.worker_id, exited.cause, exited.detail) == (1, ExitCause.KILLED, "SIGKILL")
            template.resume()
            await launcher.launch(2)
            assert (await next_of(reports, WorkerPlaced)).worker_id == 2
            assert psutil.pid_exists(first.pid)
            template.suspend()
            await launcher.launch(3)
            await asyncio.sleep(0.1)
        ended = {(await next_of(reports, WorkerExited)).worker_id for _ in range(3)}
        assert ended == {0, 2, 3}
        assert reports.empty()

    asyncio.run(run())


UNSAFE = {
    "threads": (
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "threads",
    ),
    "ends": ("import os; os._exit(1)", "is gone"),
    "raises": ("1 / 0", "is gone"),
}


@pytest.mark.parametrize(("text", "reason"), UNSAFE.values(), ids=UNSAFE)
def test_where_forks_are_not_safe_workers_start_plainly_and_it_is_told_once(tmp_path, caplog, text, reason):
    written(tmp_path, text, "unsafe.py")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}

    async def run():
        command = [sys.executable, "-P", "-c", "import sys; print('unsafe' in sys.modules)"]
        async with launcher_of(command, tmp_path / "work", ["unsafe"], environ) as (launcher, reports):
            for number in range(2):
                await launcher.launch(number)
                await next_of(reports, WorkerPlaced)
                assert (await next_of(reports, WorkerExited)).code == 0
                assert (tmp_path / "work" / f"{number}.log").read_text() == "False\n"

    asyncio.run(run())
    assert [reason in record.message for record in caplog.records] == [True], caplog.text


def test_a_module_beside_the_script_with_the_name_of_an_imported_one_is_the_script_s(tmp_path, caplog):
    written(tmp_path, "MINE = True", "colorsys.py")
    path = written(tmp_path, "import colorsys; print(colorsys.MINE)")
    printed, exited = run_one([sys.executable, str(path)], tmp_path / "work", ["colorsys"])
    assert (printed, exited.code) == ("True\n", 0)
    assert f"{tmp_path / 'colorsys.py'} beside the program" in caplog.text


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_random_ends_are_each_told_once_and_leave_nothing(tmp_path, seed):
    """Workers, their children, and the process they are forked from are killed at any moment."""
    rng = random.Random(seed)
    code = (
        "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); time.sleep(float(sys.argv[1])); sys.exit(5)"
    )

    async def run():
        async with launcher_of([sys.executable, "-c", code, "0.05"], tmp_path, ["random"]) as (launcher, reports):
            for number in range(40):
                await launcher.launch(number)
                await asyncio.sleep(rng.random() * 0.03)
                if rng.random() < 0.3:
                    rng.choice([launcher.kill, launcher.terminate])(number)
                elif rng.random() < 0.2 and launcher.spawner._template:
                    launcher.spawner._template.kill()
        ends = [reports.get_nowait() for _ in range(reports.qsize())]
        assert sorted(end.worker_id for end in ends if isinstance(end, WorkerExited)) == list(range(40))

    asyncio.run(run())
