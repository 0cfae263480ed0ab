"""What is particular to workers on this machine: slots, GPUs, logs, children."""

import asyncio
import signal
import subprocess
import sys
import tempfile

import psutil
import pytest

from elasticdl.common.environment import SHARED_GPU
from elasticdl.common.tether import tethered
from elasticdl.master.state.events import ExitCause, StacksFound, WorkerExited
from elasticdl.places import devices
from elasticdl.places.devices import Slots, find_gpus
from elasticdl.places.exits import judge_exit
from elasticdl.places.local import LocalLauncher, WorkerCommand

GPUS = ["GPU-a", "GPU-b"]
LISTING = "GPU 0: NVIDIA H200 (UUID: GPU-a)\n  MIG 1g.18gb Device 0: (UUID: MIG-x)\nGPU 1: NVIDIA H200 (UUID: GPU-b)\n"
DEADLINE = 30.0


def visible(slot):
    return slot.environment.get("CUDA_VISIBLE_DEVICES")


def test_without_gpus_slots_are_as_many_as_asked_for(tmp_path):
    slots = Slots(0, [], tmp_path)
    taken = [slots.acquire() for _ in range(50)]
    assert [slot.index for slot in taken] == list(range(50))
    assert visible(taken[0]) is None
    slots.release(taken[3])
    assert slots.acquire().index == 3


def test_a_gpu_holds_one_worker(tmp_path):
    slots = Slots(0, GPUS, tmp_path)
    first, second = slots.acquire(), slots.acquire()
    assert [visible(first), visible(second)] == GPUS
    assert slots.acquire() == "every GPU is taken (2)"
    slots.release(first)
    assert visible(slots.acquire()) == "GPU-a"


def test_two_jobs_never_share_a_gpu_by_accident(tmp_path):
    mine, other = Slots(1, GPUS, tmp_path), Slots(0, GPUS, tmp_path)
    taken = mine.acquire()
    assert visible(other.acquire()) == "GPU-b"
    assert other.acquire() == "every GPU is taken, some by other jobs of yours"
    mine.release(taken)
    assert visible(other.acquire()) == "GPU-a"


def test_more_slots_than_gpus_share_them(tmp_path):
    slots = Slots(3, GPUS, tmp_path)
    taken = [slots.acquire() for _ in range(3)]
    assert [visible(slot) for slot in taken] == ["GPU-a", "GPU-b", "GPU-a"]
    assert slots.acquire() == "every slot is taken (3)"
    # also for the one that has a GPU to itself: all have to reduce in the same way
    assert [slot.environment.get(SHARED_GPU) for slot in taken] == ["1", "1", "1"]
    slots.release(taken[1])
    assert visible(slots.acquire()) == "GPU-b"


@pytest.mark.parametrize(("count", "gpus"), [(0, GPUS), (2, GPUS), (1, GPUS), (3, [])])
def test_who_has_a_gpu_to_itself_is_not_told_otherwise(tmp_path, count, gpus):
    assert SHARED_GPU not in Slots(count, gpus, tmp_path).acquire().environment


def test_only_jobs_that_share_gpus_share_them_with_others(tmp_path):
    first, second, alone = Slots(2, ["GPU-a"], tmp_path), Slots(2, ["GPU-a"], tmp_path), Slots(0, ["GPU-a"], tmp_path)
    taken = [first.acquire(), first.acquire(), second.acquire()]
    assert alone.acquire() == "every GPU is taken, some by other jobs of yours"
    for slots, slot in zip([first, first, second], taken, strict=True):
        slots.release(slot)
    held = alone.acquire()
    assert visible(held) == "GPU-a"
    assert first.acquire() == "every GPU is taken, some by other jobs of yours"


def test_a_folder_that_takes_no_leases_is_a_reason_to_wait(tmp_path):
    (tmp_path / "file").write_text("")
    reason = Slots(0, GPUS, tmp_path / "file" / "locks").acquire()
    assert reason == f"can't lease a GPU in {tmp_path / 'file' / 'locks'}: Not a directory"


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, GPUS),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["GPU-b"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-b,0"}, ["GPU-b", "GPU-a"]),
        ({"CUDA_VISIBLE_DEVICES": "7"}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, ["GPU-b"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_only_gpus_that_the_user_may_see_are_used(monkeypatch, environ, found):
    done = subprocess.CompletedProcess([], 0, stdout=LISTING)
    monkeypatch.setattr(devices.subprocess, "run", lambda *args, **more: done)
    assert find_gpus(environ) == found


def test_a_machine_without_driver_has_no_gpus(monkeypatch, caplog):
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_gpus({}) == []
    assert caplog.records == []


@pytest.mark.parametrize(("script", "why"), [("exit 9", "exit status 9"), ("exec sleep 600", "timed out")])
def test_a_driver_that_does_not_answer_counts_as_none_and_is_told(tmp_path, monkeypatch, caplog, script, why):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(devices, "QUERY_SECONDS", 0.5)
    assert find_gpus({}) == []
    assert why in caplog.text


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
            argv=(sys.executable, "-c", script),
            environment=lambda worker_id, slot: {"PYTHONUNBUFFERED": "1"},
            log=lambda worker_id: tmp_path / f"worker-{worker_id}.log",
        )
        launcher = LocalLauncher(command, Slots(0, [], tmp_path), reports.put_nowait)
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
        command = WorkerCommand(("sleep", "600"), lambda worker_id, slot: {"PATH": "/usr/bin:/bin"}, lambda _: log)
        launcher = LocalLauncher(command, Slots(0, [], tmp_path), reports.put_nowait)
        await launcher.launch(0)
        await asyncio.wait_for(reports.get(), DEADLINE)
        launcher.read_log(0)
        found = await asyncio.wait_for(reports.get(), DEADLINE)
        await launcher.close()
        return found

    assert asyncio.run(run()) == StacksFound(0, "its first words")


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
