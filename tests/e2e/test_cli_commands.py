"""The commands against a real master, and every mistake that is refused before anything starts."""

from __future__ import annotations

import json
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest
from running_job import DEADLINE, run_cli, start

SIMULATED = (sys.executable, str(Path(__file__).with_name("simulated_worker.py")))
FOREVER = "1000000"
DIGITS = ("train", "--model_zoo", "model_zoo", "--model_def", "digits.cnn_torch")


def test_a_running_job_is_looked_at_scaled_and_stopped_from_another_terminal(tmp_path):
    with start(tmp_path, "run", "--num_workers", "1-2", "--", *SIMULATED, FOREVER) as job:
        job.wait_for_world(size=2)
        assert "job job: running" in run_cli(tmp_path, "status", "job").stdout
        listed = run_cli(tmp_path, "status").stdout.splitlines()
        assert listed[1].split()[:5] == ["job", "running", "2", "of", "1-2"]
        assert "job_started" in run_cli(tmp_path, "events").stdout
        assert "master    |" in run_cli(tmp_path, "logs").stdout

        scaled = run_cli(tmp_path, "scale", "1")
        assert (scaled.returncode, scaled.stderr) == (0, "")
        job.wait_for_world(size=1, after=1)

        stopped = run_cli(tmp_path, "stop")
        assert (stopped.returncode, stopped.stderr) == (0, "")
        assert stopped.stdout.startswith("job job stopped at step ")
        assert job.finish() == 1, "somebody else stopped it"
        assert "elasticdl run: job job was stopped by `elasticdl stop`" in job.output
        assert job.processes() == []

    assert "job job: stopped" in run_cli(tmp_path, "status", "job").stdout
    entries = [json.loads(line) for line in run_cli(tmp_path, "events", "job", "--json").stdout.splitlines()]
    assert [entries[0]["event"], entries[-1]["event"]] == ["job_started", "job_finished"]
    again = run_cli(tmp_path, "stop", "job")
    assert (again.returncode, again.stderr) == (2, "elasticdl stop: job job is not running: it has stopped\n")


def test_ctrl_c_stops_the_job_and_takes_everything_along(tmp_path):
    with start(tmp_path, "run", "--num_workers", "2", "--", *SIMULATED, FOREVER) as job:
        job.wait_for_world(size=2)
        job.process.send_signal(signal.SIGINT)
        assert job.finish() == 130
        assert "stopping after this step" in job.output
        assert "job job stopped: " in job.output
        assert job.processes() == []


def test_a_killed_command_leaves_nothing(tmp_path):
    with start(tmp_path, "run", "--num_workers", "2", "--", *SIMULATED, FOREVER) as job:
        job.wait_for_world(size=2)
        processes = job.processes()
        job.process.kill()
        _, left = psutil.wait_procs(processes, timeout=DEADLINE)
        assert left == []
        assert job.processes() == []


def test_the_result_of_a_job_is_shown(tmp_path):
    with start(tmp_path, "run", "--num_workers", "2", "--", *SIMULATED, "20") as job:
        assert job.finish() == 0
        assert "job job succeeded: 20 steps" in job.output
        assert "metrics  accuracy 0.9" in job.output


def test_a_port_that_is_taken(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_cli(tmp_path, "run", "--port", str(port), "--", *SIMULATED, "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"elasticdl run: port {port} of 127.0.0.1 is taken")
    assert done.stderr.count("\n") == 1
    assert list((tmp_path / "jobs").iterdir()) == []


BROKEN_MODULE = "raise RuntimeError('broken at import')\n"
INCOMPLETE_MODULE = "def custom_model():\n    pass\n"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("train", "--model_zoo", "{tmp}/nowhere", "--model_def", "a"), ["{tmp}/nowhere"]),
        (("train", "--model_zoo", "{tmp}", "--model_def", "nosuch"), ["nosuch"]),
        (("train", "--model_zoo", "{tmp}", "--model_def", "broken"), ["broken at import"]),
        (("train", "--model_zoo", "{tmp}", "--model_def", "incomplete"), ["incomplete.py"]),
        ((*DIGITS[:-1], "digits.cnn_torch.nosuch"), ["nosuch"]),
        (("train", "--model_zoo", "model_zoo", "--model_def", "cifar10.resnet20_torch", "--training_data", "{tmp}/no"), ["{tmp}/no"]),
        ((*DIGITS, "--output", "{tmp}/broken.py"), ["--output {tmp}/broken.py must be a folder"]),
        ((*DIGITS, "--checkpoint_dir", "/proc/nowhere"), ["--checkpoint_dir /proc/nowhere can't be written"]),
        ((*DIGITS, "--global_batch_size", "0"), ["--global_batch_size 0: must be at least 1"]),
        ((*DIGITS, "--num_workers", "4-2"), ["--num_workers 4-2: the minimum is above the maximum"]),
        (("run", "--", "no-such-program"), ["no-such-program"]),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_a_mistake_is_one_line_and_starts_nothing(arguments, parts, tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN_MODULE)
    (tmp_path / "incomplete.py").write_text(INCOMPLETE_MODULE)
    done = run_cli(tmp_path / "home", *(argument.format(tmp=tmp_path) for argument in arguments))
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith(f"elasticdl {arguments[0]}: ")
    assert done.stderr.count("\n") == 1
    for part in parts:
        assert part.format(tmp=tmp_path) in done.stderr
    assert not list((tmp_path / "home").glob("jobs/*")), "something was started"
