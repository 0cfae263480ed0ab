"""What is particular to workers on this machine: logs, temporary files, children."""

import asyncio
import signal
import subprocess
import sys
import tempfile
from functools import partial

import psutil
import pytest
from fork_kit import forking, run_all

from elasticdl.common.process_group import tethered
from elasticdl.job.jobdir import JobDir, MasterAddress
from elasticdl.job.spec import JobSpec, WorkerRange
from elasticdl.master.core.events import ExitCause, LauncherFailed, WorkerExited
from elasticdl.master.shell.serve import LocalWorkers
from elasticdl.places.worker_process import judge_exit
from tests.stories import on

DEADLINE = 30.0


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (0, ExitCause.CLEAN),
        (1, ExitCause.CRASHED),
        (-signal.SIGKILL, ExitCause.KILLED),
        (-signal.SIGTERM, ExitCause.KILLED),
        (-signal.SIGSEGV, ExitCause.CRASHED),
        (128 + signal.SIGKILL, ExitCause.KILLED),
        (128 + signal.SIGABRT, ExitCause.CRASHED),
        (255, ExitCause.CRASHED),
    ],
)
def test_exit_codes_are_judged(code, cause):
    assert judge_exit(code)[0] is cause


@pytest.mark.parametrize("code", [-signal.SIGSEGV, 128 + signal.SIGSEGV, -signal.SIGABRT])
def test_a_crash_by_the_order_of_imports_is_told_with_what_to_change(code):
    stacks = (
        "Fatal Python error: Segmentation fault\n  File '/venv/site-packages/triton/__init__.py', line 8 in <module>"
    )
    assert "put `import triton` above" in judge_exit(code, stacks)[1]
    assert judge_exit(code, "step 1")[1] == ("SIGABRT" if code == -signal.SIGABRT else "SIGSEGV")
    assert "triton" not in judge_exit(1, stacks)[1]


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
    failed = await scene.next(LauncherFailed)
    assert failed.reason == "workers are looked after no longer: KeyError: 'a'"


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
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert (done.returncode, done.stdout) == (1, "")


def test_workers_share_the_cores_by_the_range_that_the_job_has_now(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    spec = JobSpec(command=["sh", "-c", "echo $OMP_NUM_THREADS"], num_workers="1-2", start_method="spawn")
    job_dir = JobDir(tmp_path)
    job_dir.logs.mkdir()
    limits = WorkerRange(minimum=1, maximum=2)

    async def run():
        nonlocal limits
        ended = asyncio.Queue()
        make = LocalWorkers(spec, job_dir, MasterAddress("127.0.0.1:1", "token", 1)).launcher
        launcher = make(lambda event: isinstance(event, WorkerExited) and ended.put_nowait(event), lambda: limits)
        for worker_id, maximum in enumerate((2, 8, 20)):
            limits = WorkerRange(minimum=1, maximum=maximum)
            await launcher.launch(worker_id)
            await asyncio.wait_for(ended.get(), 30)
        await launcher.close()

    asyncio.run(run())
    assert [job_dir.worker_log(each).read_text().strip() for each in range(3)] == ["4", "1", "1"]
