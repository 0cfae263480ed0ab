"""A whole ``elasticdl train`` with a pretended master and check: what is shown, how it ends, and that nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
from cli_kit import CalledMaster, play, scene_in, serving, sessions, signal_command
from google.protobuf import json_format

from elasticdl.cli import folder_run
from elasticdl.cli.folder_job import FolderJob
from elasticdl.cli.signals import ECHO_SECONDS, FINGER_SECONDS, SignalLog
from elasticdl.common.errors import UserError
from elasticdl.job.jobdir import JobDir, jobs_root, write_aside
from elasticdl.master.shell import serve
from tests.waiting import wait_until

TIMEOUT = 60.0
INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


class PlayedMaster:
    """In place of `elasticdl.master.shell.serve.Master` on this machine; ``--model_def`` says which part it plays."""

    def __init__(self, spec, job, make_launcher):
        self._part, self._job, self._stopped, self.is_up = spec.model_def, job, threading.Event(), asyncio.Event()
        if self._part == "refuses":
            raise UserError("--port 80: the port is taken; choose another")

    def post(self, event):
        """That it is to stop."""
        if self._part not in ("stubborn", "unheard"):
            self._stopped.set()

    async def run(self):
        if self._part == "slow":
            self._job.journal.touch()
            signal_command(INT)
            await asyncio.sleep(TIMEOUT)
        master = CalledMaster(self._job.name)
        master.at_stop = self._stopped.set
        with serving(master) as address:
            address.write(self._job.master)
            self.is_up.set()
            if self._part == "vanishes":
                raise RuntimeError("last words")
            await asyncio.to_thread(master.watched.wait, TIMEOUT)
            if self._part == "unheard":
                signal_command(INT)
                await asyncio.sleep(TIMEOUT)
            while self._part == "stubborn":  # as a person does who is not heard
                signal_command(INT)
                await asyncio.sleep(2 * FINGER_SECONDS)
            await asyncio.to_thread(self._play, master)
        write_aside(self._job.status, json_format.MessageToJson(master.statuses[-1]))
        self._job.master.unlink()

    def _play(self, master):
        self._job.worker_out(0).write_text("printed by worker 0\n")
        master.update(phase="running", step=0, total_steps=20, total_epochs=2)
        self._tell(1, "world_formed", world=1, members=[0, 1], step=0, reason="2 workers are ready")
        if self._part == "fails":
            why = "worker 1: ValueError: bad sample"
            master.update(phase="failed", reason=why, traceback="Traceback\nValueError: bad")
            return
        for step in range(1, 21):
            master.update(step=step, epoch=(step - 1) // 10, loss=1 / step, samples=32 * step, samples_per_second=1e3)
        self._tell(2, "evaluation", step=20, epoch=1, samples=64, metrics={"accuracy": 0.5})
        if self._part == "ok":
            master.update(phase="succeeded", metrics={"accuracy": 0.5})
            return
        if self._part != "forever":
            signal_command(signal.Signals[self._part])
        assert self._stopped.wait(TIMEOUT), "nobody stopped this job"
        master.update(phase="stopped", reason="interrupted")

    def _tell(self, number, event, **fields):
        with self._job.journal.open("a") as journal:
            print(json.dumps({"number": number, "time": 0.0, "event": event, **fields}), file=journal)


STARTS = r"""
# a job from start to end
$ train --model_def=ok --log_loss_steps=10 --output=output --job_name=one --num_workers=2
> printed by worker 0
! job one started; in another terminal: ELASTICDL_HOME=HOME elasticdl status one
! ...
! world 1: 2 workers (0, 1): 2 workers are ready
! ...
! evaluation at step 20: accuracy 0.5
! ...
! job one succeeded: 20 steps, epoch 2/2, ...
! ...
!   output   HOME/output
+ holds jobs/one/job.json ..."job_name": "one"...
+ holds jobs/one/job.json ..."model_zoo": "HOME"...
+ lacks output
# what a check finds leaves all as it was
$ train --model_def=ok --job_name=one  > printed by worker 0  !! ...
+ check import sys; print('no such module', file=sys.stderr); sys.exit(2)
$ train --model_def=ok --job_name=one  ! no such module
+ check 1 / 0
$ train --model_def=ok --job_name=one
! elasticdl train: the check of the job broke (exit code 1); it said:
! ...
! ZeroDivisionError: division by zero
? 1
+ holds jobs/one/journal.jsonl ..."event": "world_formed"...
# one that has succeeded gives way with a word, and a training that was stopped has one journal
$ train --model_def=ok --job_name=one  > printed by worker 0  !! job one started; ...  !! ...
$ train --model_def=ok --job_name=one
> printed by worker 0
! the job one that has succeeded gave way, with its journal and logs: another --job_name keeps a job
! ...
+ lacks jobs/one/earlier.jsonl + stopped one + file jobs/one/journal.jsonl first\n
$ train --model_def=ok --job_name=one  > printed by worker 0  !! job one started; ...  !! ...
+ holds jobs/one/earlier.jsonl {"number": 1, ...first...
+ holds jobs/one/stopped-0000000040.state
+ stopped one + file jobs/one/journal.jsonl second\n
$ train --model_def=refuses --job_name=one  ! --port 80: the port is taken; choose another
$ train --model_def=ok --job_name=one  > printed by worker 0  !! job one started; ...  !! ...
+ holds jobs/one/earlier.jsonl ...first...second...
+ stopped one
$ train --model_def=ok --job_name=one --no_resume  > printed by worker 0  !! ...
+ lacks jobs/one/earlier.jsonl + lacks jobs/one/stopped-0000000040.state
# a failed job shows the traceback once, then the reason
$ train --model_def=fails --job_name=bad
> printed by worker 0
! job bad started; ...
! world 1: 2 workers (0, 1): 2 workers are ready
! Traceback
! ValueError: bad
! elasticdl train: job bad failed: worker 1: ValueError: bad sample; all logs: HOME/jobs/bad/logs
? 1
# a master that vanishes
$ train --model_def=vanishes --job_name=one
! ...
! elasticdl train: the master ended before the job had: RuntimeError('last words'); its log: HOME/jobs/one/logs/master.log
? 1
+ holds jobs/one/logs/master.log ...RuntimeError: last words\n
# what is wrong is told before anything starts
$ run -- no-such-program  ! the program no-such-program is not found, or not executable: check its name and PATH
+ file train.py + folder zoo
$ run -- train.py  ! the program train.py is not found, or not executable: did you mean `python train.py`?
$ run -- python zoo  ! HOME/zoo is a folder without __main__.py: name the script as it is called from HOME
$ train --model_def=ok --output=train.py/below  ! --output HOME/train.py/below must be a folder...
+ lacks jobs/one + deaf busy
$ train --model_def=ok --job_name=busy  ! there is a job named busy already...
+ env HOROVOD_CYCLE_TIME=1
$ train --model_def=ok --job_name=one  ! HOROVOD_CYCLE_TIME is set in the environment...
# a check may take as long as a worker may to start
+ check import time; time.sleep(60)
$ train --model_def=ok --start_timeout=0.1
! elasticdl train: the check of the model and the data took longer than a worker's start may, 0.1 s: --start_timeout gives it more
# the second and third Ctrl-C kill a master that does not stop
$ train --model_def=stubborn --stop_grace=1000 --job_name=one
! job one started; ...
! ...
! stopping after this step; press Ctrl-C again to stop at once
! ...
! stopping at once; press Ctrl-C again to kill all workers
! ...
! killing all workers
! job one was stopped before it could say how far it got; its logs: HOME/jobs/one/logs
? 130
# a master that does not stop in time is killed
$ train --model_def=unheard --stop_grace=0.1 --job_name=one
! job one started; ...
! ...
! stopping after this step; press Ctrl-C again to stop at once
! ...
! killing all workers
! job one was stopped before it could say how far it got; its logs: HOME/jobs/one/logs
? 130
# Ctrl-C while the master starts brings back the old job of the name
+ ended one reason=old
$ train --model_def=slow --job_name=one  !! job one was interrupted before it had begun: nothing is left of it  ? 130
+ holds jobs/one/status.json ..."reason": "old"...
# a terminal that closes stops cleanly, as other signals do
$ train --model_def=SIGHUP --job_name=long
> printed by worker 0
! ...
! stopping after this step; press Ctrl-C again to stop at once
! ...
! job long stopped: 20 steps...
! ...
? 129
"""


@pytest.fixture
def scene(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with scene_in(tmp_path, monkeypatch) as made:
        made.check("import sys; sys.stdin.read()")
        yield made
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("session", sessions(STARTS))
def test_a_session_of_a_job(session, scene, capfd, monkeypatch):
    monkeypatch.setattr(serve, "local_master", PlayedMaster)
    monkeypatch.setattr(folder_run, "CLOSING_TIME", 2.0)
    monkeypatch.setattr(folder_run, "CHECK_MODULE", "pretend_check")
    monkeypatch.setattr(tempfile, "tempdir", None)
    play(session, scene, capfd)


# ---- processes of their own, as they are killed, or their streams end ----

DRIVER = """
import sys
from elasticdl.cli.__main__ import main
from test_cli_launch import PlayedMaster
from elasticdl.cli import folder_run
from elasticdl.master.shell import serve

serve.local_master = PlayedMaster
folder_run.CHECK_MODULE = "pretend_check"
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def command(scene):
    """A function that starts `elasticdl` with the pretended parts and returns the process."""
    tests = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (scene.home, tests, tests.parents[1])))}
    started = []

    def start(*argv, stdout=subprocess.PIPE):
        words = [sys.executable, "-c", DRIVER, *argv]
        started.append(subprocess.Popen(words, stdout=stdout, stderr=subprocess.PIPE, text=True, env=env))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_check_whose_command_is_interrupted_or_killed(command, scene, number):
    checked = scene.home / "checked"
    scene.check(f"import pathlib, time; pathlib.Path({str(checked)!r}).touch(); time.sleep(600)")
    process = command("train", "--model_def=ok", "--job_name=one")
    wait_until(checked.exists)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    if number == signal.SIGINT:
        told = "job one was interrupted before it had begun: nothing is left of it\n"
        assert (*process.communicate(timeout=TIMEOUT), process.returncode) == ("", told, 130)
        assert list(jobs_root().iterdir()) == []
    assert len(children) == 1
    assert psutil.wait_procs(children, TIMEOUT)[1] == []


def test_readers_that_go_away_are_no_matter_to_the_job(command):
    process = command("train", "--model_def=forever", "--log_loss_steps=1", "--job_name=one")
    process.stdout.close()
    lines = iter(process.stderr.readline, "")
    assert any("stdout can't be written (its reader is gone)" in line for line in lines)
    process.stderr.close()
    with FolderJob(JobDir(jobs_root() / "one")).master() as master:
        master.stop("the test has seen enough")
    assert process.wait(TIMEOUT) == 1


HOLDS_KEYS = """
import sys, tempfile, time
from elasticdl.cli import __main__ as cli

def look(argv):
    with tempfile.TemporaryDirectory():
        print("looks", flush=True)
        while True:  # a long sleep would not end if the signal came just before it
            time.sleep(0.1)

cli.dispatch = look
sys.exit(cli.main([]))
"""


def test_a_signal_to_a_command_that_only_looks_leaves_no_file_and_under_nohup_a_sighup_changes_nothing(scene):
    command = ["/bin/sh", "-c", f"trap '' HUP; exec {sys.executable} -c '{HOLDS_KEYS}'"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "looks\n"
        process.send_signal(HUP)
        process.send_signal(TERM)
        assert process.wait(TIMEOUT) == 128 + TERM


@pytest.mark.parametrize(
    ("signals", "wishes"),
    [
        ([(0, HUP), (0, HUP)], 1),  # the kernel's and the shell's, as a terminal closes
        ([(0, TERM), (0, TERM), (0, HUP)], 1),  # a service manager's
        ([(0, INT), (0, INT)], 1),  # a terminal's, by `timeout` as well
        ([(0, INT), (0.1, INT)], 2),  # as fast as a person can
        ([(0, HUP), (0, HUP), (ECHO_SECONDS, HUP)], 2),
    ],
)
def test_what_comes_twice_at_once_is_one_wish(signals, wishes):
    moments = iter([moment for moment, _ in signals])
    log = SignalLog(clock=lambda: next(moments))
    for _, number in signals:
        log.add(number)
    assert [log.take() for _ in range(4)].count(True) == wishes
    assert log.first == signals[0][1]


@pytest.mark.parametrize(("columns", "told"), [(80, ("80", "24", "79")), (0, ())])  # some pseudo-terminals have no size
def test_workers_are_told_how_wide_the_terminal_is(monkeypatch, columns, told):
    monkeypatch.setattr(os, "isatty", lambda descriptor: descriptor == 2)
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((columns, 24)))
    assert tuple(serve._terminal_size().values()) == told
