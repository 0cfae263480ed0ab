"""What every launcher must do: with workers that are processes of this machine, started plainly or forked, or of agents; and what is
particular to this machine: logs, temporary files, cores."""

import asyncio
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager
from functools import partial

import psutil
import pytest
from agent_kit import acting, place, tell
from fork_kit import Launching, forking, launcher_of, run_all

from elasticdl.common.process_group import tethered
from elasticdl.job.jobdir import JobDir, MasterAddress
from elasticdl.job.spec import JobSpec, WorkerRange
from elasticdl.master.core.events import (
    ExitCause,
    LauncherFailed,
    StacksFound,
    WorkerExited,
    WorkerPending,
    WorkerPlaced,
)
from elasticdl.master.shell.serve import LocalWorkers
from elasticdl.places.local import Slots
from elasticdl.places.worker_process import judge_exit
from tests.stories import on, on_each

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
async def local_bench(tmp_path, modules=None):
    environ = {"PATH": "/usr/bin:/bin", "WORK": str(tmp_path)}
    async with launcher_of((sys.executable, "-c", ENDS_WHEN_TOLD), tmp_path, modules, environ, PLACES) as bench:
        bench.end = partial(tell, tmp_path)
        yield bench
    assert not [r for r in bench.seen if isinstance(r, WorkerPlaced) and psutil.pid_exists(r.pid)]


@asynccontextmanager
async def agent_bench(tmp_path):
    async with acting(tmp_path, ENDS_WHEN_TOLD) as scene:
        master = await scene.master()
        bench = Launching((partial(Slots, PLACES, (), tmp_path), master.agents.reporting_to), tmp_path)
        bench.end = scene.tell
        names = [f"slot-{number}" for number in range(PLACES)]
        for name in names:
            await scene.agent(master.port, name)
        await master.agents.found([place(name) for name in names], {-1: ""})
        yield bench
        await bench.launcher.close()


BENCHES = {"plain": local_bench, "forked": partial(local_bench, modules=["json"]), "agents": agent_bench}


contract = on_each(BENCHES)


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
async def test_close_ends_everything_and_tells_each_end_and_of_who_is_gone_nothing_is_told(bench):
    await bench.placed(0)
    bench.launcher.read_stacks(0)
    assert (await bench.next(StacksFound)).worker_id == 0
    bench.end(0, 0)
    await bench.ended(0)
    for worker_id in (0, 7):  # gone, and unknown
        for ask in (bench.launcher.read_stacks, bench.launcher.kill, bench.launcher.terminate):
            ask(worker_id)
    for worker_id in range(1, PLACES + 1):
        await bench.placed(worker_id)
    await bench.launcher.launch(PLACES + 1)
    await bench.next(WorkerPending)
    await bench.launcher.close()
    assert {(await bench.next(WorkerExited)).worker_id for _ in range(PLACES + 1)} == {1, 2, 3}
    assert bench.reports.empty()


# ---- this machine ----


@pytest.mark.parametrize(
    ("code", "cause"),
    [(0, "clean"), (1, "crashed"), (-9, "killed"), (-11, "crashed"), (128 + 9, "killed"), (128 + 6, "crashed")],
)
def test_exit_codes_are_judged_and_a_crash_by_the_order_of_imports_is_told_with_what_to_change(code, cause):
    stacks = "Segmentation fault\n  File '/venv/site-packages/triton/__init__.py', line 8 in <module>"
    assert judge_exit(code)[0] == cause
    assert ("put `import triton` above" in judge_exit(code, stacks)[1]) == (code in (-11, 128 + 6))
    assert "triton" not in judge_exit(code, "step 1")[1]


def run_worker(tmp_path, script):
    """Run one worker to its end; returns the report of it."""
    ((_, report),) = run_all([sys.executable, "-u", "-c", script], tmp_path)
    return report


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("import sys; [print(n) for n in range(1000)]; sys.exit('the last word')", "exit code 1"),
        ("1 / 0", "exit code 1: ZeroDivisionError: division by zero"),
        ("import sys; print('no', file=sys.stderr); sys.exit(2)", "exit code 2: no"),
    ],
)
def test_what_a_worker_prints_is_in_its_log_and_why_it_has_ended_in_the_report(tmp_path, script, told):
    report, log = run_worker(tmp_path, script), tmp_path / "0.log"
    assert report.detail == f"{told}; its log: {log}"
    assert log.read_text().splitlines()[-1] == report.output.splitlines()[-1]


@on(partial(forking, modules=None))
async def test_a_mistake_of_our_own_ends_the_job_and_is_not_waited_for(scene):
    scene.launcher._starter._environment = lambda number, place: {}["a"]
    await scene.launcher.launch(0)
    assert (await scene.next(LauncherFailed)).reason == "workers are looked after no longer: KeyError: 'a'"


def test_the_temporary_files_of_a_worker_that_is_killed_go_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)  # it keeps the first answer
    (tmp_path / "tmp").mkdir()
    script = "import os, tempfile; print(tempfile.mkstemp()[1]); os.kill(os.getpid(), 9)"
    report = run_worker(tmp_path, script)
    assert report.output.startswith(str(tmp_path / "tmp" / "elasticdl-0-"))
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_worker_that_gets_no_temporary_folder_says_which(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    report = run_worker(tmp_path, "pass")
    assert report.cause is ExitCause.CRASHED
    assert report.detail.startswith(f"can't start it: {tmp_path}/file/elasticdl-0-"), report.detail
    assert report.detail.endswith(": Not a directory")


def test_a_process_tethered_to_another_parent_does_not_start():
    command = tethered(["echo", "started"])
    command[command.index(str(psutil.Process().pid))] = "1"
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (1, "")


def test_workers_share_the_cores_by_the_range_that_the_job_has_now(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    spec = JobSpec(command=["sh", "-c", "echo $OMP_NUM_THREADS"], num_workers="1-2", start_method="spawn")
    job_dir, ranges = JobDir(tmp_path), [WorkerRange(minimum=1, maximum=most) for most in (2, 2, 8, 20)]
    job_dir.logs.mkdir()

    async def run():
        ended, make = asyncio.Queue(), LocalWorkers(spec, job_dir, MasterAddress("127.0.0.1:1", "token", 1)).launcher
        launcher = make(lambda event: isinstance(event, WorkerExited) and ended.put_nowait(event), lambda: ranges[0])
        for worker_id in range(3):
            ranges.pop(0)
            await launcher.launch(worker_id)
            await asyncio.wait_for(ended.get(), 30)
        await launcher.close()

    asyncio.run(run())
    assert [job_dir.worker_log(each).read_text().strip() for each in range(3)] == ["4", "1", "1"]
