"""What is particular to workers on this machine: logs, temporary files, children."""

import asyncio
import signal
import subprocess
import sys
import tempfile

import psutil
import pytest
from fork_kit import launcher_here

from elasticdl.common.tether import tethered
from elasticdl.master.state.events import ExitCause, StacksFound, WorkerExited, WorkerPlaced
from elasticdl.places.base import PlaceState
from elasticdl.places.exits import judge_exit
from elasticdl.places.local import WorkerCommand
from elasticdl.places.slots import Slots
from elasticdl.places.worker_process import Spawner

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
        'Fatal Python error: Segmentation fault\n  File "/venv/site-packages/triton/__init__.py", line 8 in <module>'
    )

    assert "put `import triton` above" in judge_exit(code, stacks)[1]
    assert judge_exit(code, "step 1")[1] == ("SIGABRT" if code == -signal.SIGABRT else "SIGSEGV")
    assert "triton" not in judge_exit(1, stacks)[1]


def run_worker(tmp_path, script):
    """Run one worker to its end; returns the report of it."""

    async def run():
        reports = asyncio.Queue()
        command = WorkerCommand(
            Spawner((sys.executable, "-c", script)),
            environment=lambda worker_id, place: {"PYTHONUNBUFFERED": "1"},
            log=lambda worker_id: tmp_path / f"worker-{worker_id}.log",
        )
        launcher = launcher_here(command, tmp_path, reports.put_nowait)
        await launcher.launch(0)
        while not isinstance(report := await asyncio.wait_for(reports.get(), DEADLINE), WorkerExited):
            continue
        await launcher.close()
        return report

    return asyncio.run(run())


def test_what_a_worker_prints_is_in_its_log_and_its_end_in_the_report(tmp_path):
    script = "import sys; [print(n) for n in range(1000)]; sys.exit('the last word')"
    report = run_worker(tmp_path, script)
    log = tmp_path / "worker-0.log"
    assert len(log.read_text().splitlines()) == 1001
    assert report.output.splitlines()[-1] == "the last word"
    assert report.detail == f"exit code 1; its log: {log}"


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("1 / 0", "exit code 1: ZeroDivisionError: division by zero"),
        ("exit(2) if print('no', file=__import__('sys').stderr) else exit(2)", "exit code 2: no"),
    ],
)
def test_why_a_worker_has_ended_is_told_as_it_has_said_it(tmp_path, script, told):
    assert run_worker(tmp_path, script).detail == f"{told}; its log: {tmp_path / 'worker-0.log'}"


def test_what_a_worker_has_printed_so_far_can_be_asked_for(tmp_path):
    log = tmp_path / "worker-0.log"
    log.write_text("its first words\n")

    async def run():
        reports = asyncio.Queue()
        command = WorkerCommand(
            Spawner(("sleep", "600")), lambda worker_id, place: {"PATH": "/usr/bin:/bin"}, lambda _: log
        )
        launcher = launcher_here(command, tmp_path, reports.put_nowait)
        await launcher.launch(0)
        await asyncio.wait_for(reports.get(), DEADLINE)
        launcher.read_log(0)
        found = await asyncio.wait_for(reports.get(), DEADLINE)
        await launcher.close()
        return found

    assert asyncio.run(run()) == StacksFound(0, "its first words")


def test_a_replacement_has_the_gpu_of_the_one_before_though_another_job_waits_for_it(tmp_path):
    async def run():
        reports, others = asyncio.Queue(), []
        command = WorkerCommand(
            Spawner(("sh", "-c", "echo $CUDA_VISIBLE_DEVICES; exec sleep 600")),
            lambda worker_id, place: {"PATH": "/usr/bin:/bin", **place.environment},
            lambda worker_id: tmp_path / f"{worker_id}.log",
        )
        launcher = launcher_here(command, tmp_path, reports.put_nowait, gpus=["GPU-a"])
        other = Slots(0, ["GPU-a"], tmp_path, others.append)
        await launcher.launch(0)
        assert isinstance(await asyncio.wait_for(reports.get(), DEADLINE), WorkerPlaced)
        other.want(1, frozenset())
        launcher.kill(0)
        assert isinstance(await asyncio.wait_for(reports.get(), DEADLINE), WorkerExited)
        other.want(2, frozenset())  # whatever could be had would be
        await launcher.launch(1)
        assert isinstance(await asyncio.wait_for(reports.get(), DEADLINE), WorkerPlaced)
        while not (tmp_path / "1.log").read_text():
            await asyncio.sleep(0.01)
        assert {report.place.state for report in others} == {PlaceState.WAITING}
        await launcher.close()
        other.want(3, frozenset())
        assert PlaceState.READY in {report.place.state for report in others}
        await other.close()

    asyncio.run(run())
    assert (tmp_path / "1.log").read_text() == "GPU-a\n"


def test_children_that_a_worker_leaves_behind_are_ended_with_it(tmp_path):
    script = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
    report = run_worker(tmp_path, script)
    child = int(report.output)
    if psutil.pid_exists(child):  # killed, and not yet reaped by its new parent
        psutil.wait_procs([psutil.Process(child)], timeout=DEADLINE)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_the_temporary_files_of_a_worker_that_is_killed_go_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)  # it keeps the first answer
    (tmp_path / "tmp").mkdir()
    script = "import os, tempfile; print(tempfile.mkstemp()[1]); os.kill(os.getpid(), 9)"
    report = run_worker(tmp_path, script)
    assert report.output.startswith(str(tmp_path / "tmp" / "0-"))
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_worker_starts_also_where_the_temporary_folder_was_tidied_away(tmp_path, monkeypatch):
    """As on a machine that empties /tmp of what is old, while a job runs for weeks."""
    folder = tmp_path / "gone" / "of-the-job"
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    report = run_worker(tmp_path, "import tempfile; print(tempfile.mkstemp()[1])")
    assert report.cause is ExitCause.CLEAN, report.detail
    assert report.output.startswith(str(folder))
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_worker_that_gets_no_temporary_folder_says_which(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    report = run_worker(tmp_path, "pass")
    assert report.cause is ExitCause.CRASHED
    assert report.detail.startswith(f"can't start it: {tmp_path}/file/0-"), report.detail
    assert report.detail.endswith(": Not a directory")


def test_a_process_tethered_to_another_parent_does_not_start():
    command = tethered(["echo", "started"])
    command[command.index(str(psutil.Process().pid))] = "1"
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert (done.returncode, done.stdout) == (1, "")
