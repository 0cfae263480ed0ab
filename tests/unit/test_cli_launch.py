"""A whole ``elasticdl train`` with a pretended master and check: what is shown, how it ends, and that nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from elasticdl.cli.folder_job import FolderJob
from elasticdl.cli.signals import ECHO_SECONDS, FINGER_SECONDS, SignalLog
from elasticdl.job.jobdir import JobDir, MasterAddress, create_job_dir, jobs_root
from elasticdl.job.spec import JobSpec
from elasticdl.master.shell import serve
from elasticdl.master.shell.serve import LocalWorkers

TIMEOUT = 60.0

DRIVER = """
import sys
from elasticdl.cli.__main__ import main
from cli_fake_master import PlayedMaster
from elasticdl.cli import folder_run
from elasticdl.master.shell import serve

serve.local_master = PlayedMaster
folder_run.CLOSING_TIME = 2.0
folder_run.CHECK_MODULE = "pretend_check"
sys.exit(main(sys.argv[1:]))
"""

CHECK = "import sys; sys.stdin.read()"


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A function that starts `elasticdl` with the pretended parts and returns the process."""
    (tmp_path / "pretend_check.py").write_text(CHECK)
    monkeypatch.setenv("ELASTICDL_HOME", str(tmp_path / "home"))
    paths = [str(tmp_path), str(Path(__file__).parent)]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200", "TMPDIR": str(temporary)}
    started: list[subprocess.Popen[str]] = []

    def start(*argv: str, **settings: object) -> subprocess.Popen[str]:
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **settings}
        settings["env"] = {**env, **settings.get("env", {})}
        started.append(subprocess.Popen([sys.executable, "-c", DRIVER, *argv], **settings))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
    assert list(temporary.iterdir()) == []


def end_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=TIMEOUT)
    return process.returncode, out, err


def assert_was_interrupted(process: subprocess.Popen[str]) -> None:
    code, out, err = end_of(process)
    assert (code, out) == (130, "")
    assert re.fullmatch(r"job [-\w]+ was interrupted before it had begun: nothing is left of it\n", err)


def read_until(process: subprocess.Popen[str], text: str) -> str:
    seen = ""
    while text not in seen:
        line = process.stderr.readline()
        assert line, f"ended before it said {text!r}; it said {seen!r}"
        seen += line
    return seen


def jobs() -> list[Path]:
    return list(jobs_root().iterdir()) if jobs_root().is_dir() else []


def masters() -> list[int]:
    """Processes of masters of this test's jobs."""
    found = psutil.process_iter(["cmdline"])
    return [each.pid for each in found if str(jobs_root()) in " ".join(each.info["cmdline"] or ())]


@pytest.mark.parametrize("columns", [80, 0])  # some pseudo-terminals have no size
@pytest.mark.parametrize("given", [{}, {"COLUMNS": "200", "TQDM_NCOLS": "70"}])
def test_workers_know_how_wide_the_terminal_is_unless_the_user_says(monkeypatch, tmp_path, columns, given):
    monkeypatch.setenv("ELASTICDL_HOME", str(tmp_path))
    environments = []
    monkeypatch.setattr(serve, "Spawner", lambda *args: environments.append(args[3]))
    monkeypatch.setattr(os, "isatty", lambda descriptor: descriptor == 2)
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((columns, 24)))
    for name in ("COLUMNS", "LINES", "TQDM_NCOLS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    address = MasterAddress("127.0.0.1:1", "secret", 1)
    LocalWorkers(JobSpec(command=("true",)), create_job_dir("one"), address)
    known = {"COLUMNS": "80", "LINES": "24", "TQDM_NCOLS": "79"} if columns else {}
    (found,) = environments
    assert {name: found[name] for name in ("COLUMNS", "LINES", "TQDM_NCOLS") if name in found} == known | given


def test_a_job_from_start_to_end(command, tmp_path):
    output = tmp_path / "output"
    code, out, err = end_of(
        command(
            "train", "--model_def=ok", "--log_loss_steps=10", f"--output={output}", "--job_name=one", "--num_workers=2"
        )
    )
    assert (code, out) == (0, "printed by worker 0\n")
    lines = err.splitlines()
    assert lines[0] == f"job one started; in another terminal: ELASTICDL_HOME={tmp_path / 'home'} elasticdl status one"
    assert "world 1: 2 workers (0, 1): 2 workers are ready" in lines
    assert [line.split(",")[1] for line in lines if line.startswith("epoch ")] == [" step 10/20", " step 20/20"]
    assert "evaluation at step 20: accuracy 0.5" in lines
    assert any(line.startswith("job one succeeded: 20 steps, epoch 2/2") for line in lines)
    assert lines[-1] == f"  output   {output}"
    spec = JobSpec.from_json((jobs_root() / "one" / "job.json").read_text())
    assert (spec.job_name, spec.model_zoo) == ("one", os.getcwd())
    assert masters() == []
    assert not output.exists(), "the check of the folder left it behind"


def test_what_a_check_finds_leaves_all_as_it_was(command, tmp_path):
    assert end_of(command("train", "--model_def=ok", "--job_name=one"))[0] == 0
    journal = jobs_root() / "one" / "journal.jsonl"
    before = journal.read_text()
    (tmp_path / "pretend_check.py").write_text("import sys; print('no such module', file=sys.stderr); sys.exit(2)")
    for name in ("one", "two"):
        code, out, err = end_of(command("train", "--model_def=ok", f"--job_name={name}"))
        assert (code, out, err) == (2, "", "elasticdl train: no such module\n")
    (tmp_path / "pretend_check.py").write_text("1 / 0")
    assert end_of(command("train", "--model_def=ok", "--job_name=one"))[0] == 1
    assert [path.name for path in jobs_root().iterdir()] == ["one"]
    assert journal.read_text() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_check_whose_command_is_interrupted_or_killed(command, tmp_path, number):
    checked = tmp_path / "checked"
    text = f"import pathlib, time; pathlib.Path({str(checked)!r}).touch(); time.sleep(600)"
    (tmp_path / "pretend_check.py").write_text(text)
    process = command("train", "--model_def=ok", "--job_name=one")
    deadline = time.monotonic() + TIMEOUT
    while not checked.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    if number == signal.SIGINT:
        assert_was_interrupted(process)
        assert list(jobs_root().iterdir()) == []
    assert len(children) == 1
    assert psutil.wait_procs(children, TIMEOUT)[1] == []


def test_the_next_job_of_a_name_is_given_what_the_last_was_stopped_with(command, tmp_path):
    assert end_of(command("train", "--model_def=ok", "--job_name=again"))[0] == 0
    folder = jobs_root() / "again"
    (folder / "stopped-0000000040.state").write_text("the state")
    assert end_of(command("train", "--model_def=refuses", "--job_name=again"))[0] == 2
    for options in (["--model_def=ok"], ["--model_def=ok", "--num_workers=2"]):
        assert end_of(command("train", *options, "--job_name=again"))[0] == 0
        assert [path.read_text() for path in folder.glob("*-00*")] == ["the state"]
    assert end_of(command("train", "--model_def=ok", "--job_name=again", "--no_resume"))[0] == 0
    assert not list(folder.glob("stopped-*"))


def test_a_training_that_was_stopped_has_one_journal_and_one_that_has_succeeded_gives_way_with_a_word(command):
    def started(*options):
        return end_of(command("train", "--model_def=ok", "--job_name=one", *options))

    assert started()[0] == 0
    folder = JobDir(jobs_root() / "one")
    gave_way = "the job one that has succeeded gave way, with its journal and logs: another --job_name keeps a job\n"
    assert started()[2].startswith(gave_way)
    first = folder.journal.read_text()
    for text in (first, first + first):
        folder.status.write_text('{"phase": "stopped"}')
        (folder.path / "stopped-0000000040.state").touch()
        _, _, err = started()
        assert gave_way not in err
        assert folder.earlier.read_text() == text
        folder.journal.write_text(first)
    assert "".join(f"{line}\n" for line in FolderJob(folder).journal()) == first * 3
    folder.status.write_text('{"phase": "stopped"}')
    started("--no_resume")
    assert not folder.earlier.exists()


def test_a_name_that_is_taken(command):
    running = command("train", "--model_def=forever", "--job_name=busy")
    read_until(running, "evaluation")
    code, _, err = end_of(command("train", "--model_def=ok", "--job_name=busy"))
    assert code == 2
    assert err.startswith("elasticdl train: there is a job named busy already")
    running.send_signal(signal.SIGINT)
    assert end_of(running)[0] == 130


def test_a_failed_job_shows_the_traceback_once_then_the_reason(command):
    code, _, err = end_of(command("train", "--model_def=fails", "--job_name=bad"))
    assert code == 1
    assert err.splitlines()[2:] == [
        "Traceback",
        "ValueError: bad",
        f"elasticdl train: job bad failed: worker 1: ValueError: bad sample; all logs: {jobs_root() / 'bad' / 'logs'}",
    ]


def test_a_master_that_refuses_is_relayed_and_leaves_nothing(command):
    code, out, err = end_of(command("train", "--model_def=refuses"))
    assert (code, out, err) == (2, "", "elasticdl train: --port 80: the port is taken; choose another\n")
    assert jobs() == []


def test_a_master_that_vanishes(command):
    code, _, err = end_of(command("train", "--model_def=vanishes"))
    assert code == 1
    log = next(jobs_root().glob("*/logs/master.log"))
    told = f"elasticdl train: the master ended before the job had: RuntimeError('last words'); its log: {log}"
    assert err.splitlines()[-1] == told
    assert log.read_text().endswith("RuntimeError: last words\n")


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=lambda value: str(value),
)
def test_a_signal_stops_cleanly(command, number, code):
    process = command("train", "--model_def=forever", "--job_name=long")
    read_until(process, "evaluation")
    process.send_signal(number)
    assert "stopping after this step; press Ctrl-C again to stop at once" in read_until(process, "stopping after")
    ended, _, err = end_of(process)
    assert ended == code
    assert err.startswith("job long stopped: 20 steps")
    assert masters() == []


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


@pytest.mark.parametrize(
    ("number", "code", "ignored"),
    [
        (signal.SIGHUP, 129, ()),
        (signal.SIGINT, 130, [signal.SIGINT]),  # as a shell starts it with &
        (signal.SIGTERM, 143, [signal.SIGHUP]),  # as nohup does: a SIGHUP changes nothing
    ],
)
def test_a_signal_to_a_command_that_only_looks_leaves_no_file(tmp_path, number, code, ignored):
    command = [sys.executable, "-c", HOLDS_KEYS]
    settings = {"env": {**os.environ, "TMPDIR": str(tmp_path)}, "stdout": subprocess.PIPE, "text": True}
    before = {each: signal.signal(each, signal.SIG_IGN) for each in ignored}
    process = subprocess.Popen(command, restore_signals=False, **settings)
    for each, handler in before.items():
        signal.signal(each, handler)
    with process:
        assert process.stdout.readline() == "looks\n"
        if signal.SIGHUP in ignored:
            process.send_signal(signal.SIGHUP)
        process.send_signal(number)
        assert process.wait(TIMEOUT) == code
    assert list(tmp_path.iterdir()) == []


def test_the_second_and_third_ctrl_c_kill_a_master_that_does_not_stop(command):
    process = command("train", "--model_def=stubborn", "--stop_grace=1000")
    read_until(process, "started")
    process.send_signal(signal.SIGINT)
    read_until(process, "stopping after")
    time.sleep(2 * FINGER_SECONDS)
    process.send_signal(signal.SIGINT)
    read_until(process, "stopping at once; press Ctrl-C again to kill all workers")
    time.sleep(2 * FINGER_SECONDS)
    process.send_signal(signal.SIGINT)
    read_until(process, "killing all workers")
    code, _, err = end_of(process)
    assert code == 130
    assert "was stopped before it could say how far it got" in err
    assert masters() == []


def test_ctrl_c_while_the_master_starts_brings_back_the_old_job_of_the_name(command):
    assert end_of(command("train", "--model_def=ok", "--job_name=slow"))[0] == 0
    before = (jobs_root() / "slow" / "status.json").read_text()
    process = command("train", "--model_def=slow", "--job_name=slow")
    while not (jobs_root() / "slow" / "starting").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert_was_interrupted(process)
    assert (jobs_root() / "slow" / "status.json").read_text() == before


def test_readers_that_go_away_are_no_matter_to_the_job(command):
    process = command("train", "--model_def=forever", "--log_loss_steps=1", "--job_name=one")
    process.stdout.close()
    assert "stdout can't be written (its reader is gone)" in read_until(process, "its reader is gone")
    process.stderr.close()
    with FolderJob(JobDir(jobs_root() / "one")).master() as master:
        master.stop("the test has seen enough")
    assert process.wait(TIMEOUT) == 1
    assert masters() == []


def test_a_full_disk_under_the_output_is_told_in_one_line(command):
    with open("/dev/full", "w", encoding="utf-8") as full:
        process = command("status", stdout=full)
        _, err = process.communicate(timeout=TIMEOUT)
    told = "elasticdl status: No space left on device: neither what it prints nor its files can be written\n"
    assert (process.returncode, err) == (1, told)


def test_horovod_settings_are_refused(command):
    code, out, err = end_of(command("train", "--model_def=ok", env={"HOROVOD_CYCLE_TIME": "1"}))
    assert (code, out) == (2, "")
    assert err.startswith("elasticdl train: HOROVOD_CYCLE_TIME is set in the environment")
    assert jobs() == []


INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.mark.parametrize(
    ("signals", "wishes"),
    [
        ([HUP, HUP], 1),  # the kernel's and the shell's, as a terminal closes
        ([TERM, TERM, HUP], 1),  # a service manager's
        ([INT, INT], 1),  # a terminal's, by `timeout` as well
        ([TERM, INT], 2),
    ],
)
def test_what_comes_twice_at_once_is_one_wish(signals, wishes):
    log = SignalLog(clock=lambda: 7.0)
    for number in signals:
        log.add(number)
    assert [log.take() for _ in range(4)].count(True) == wishes
    assert log.first == signals[0]


def test_ctrl_c_as_fast_as_a_person_can_is_another_wish():
    now = iter((7.0, 7.1))
    log = SignalLog(clock=lambda: next(now))
    log.add(INT)
    log.add(INT)
    assert [log.take() for _ in range(3)] == [True, True, False]


def test_what_comes_again_later_is_another_wish():
    now = [7.0]
    log = SignalLog(clock=lambda: now[0])
    log.add(HUP)
    log.add(HUP)
    now[0] += ECHO_SECONDS
    log.add(HUP)
    assert [log.take() for _ in range(3)] == [True, True, False]
