"""The commands against a real master whose workers count instead of training, and what is refused before anything starts."""

from __future__ import annotations

import json
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

import psutil
import pytest
from running_job import DEADLINE, run_cli, start

from tests.waiting import wait_until

SIMULATED = (sys.executable, str(Path(__file__).with_name("simulated_worker.py")))


def test_a_running_job_is_looked_at_scaled_and_stopped_from_another_terminal(tmp_path):
    with start(tmp_path, "run", "--num_workers", "1-2", "--", *SIMULATED) as job:
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
        assert "elasticdl run: job job was stopped (elasticdl stop)" in job.output
        assert job.processes() == []

    assert "job job: stopped" in run_cli(tmp_path, "status", "job").stdout
    entries = [json.loads(line) for line in run_cli(tmp_path, "events", "job", "--json").stdout.splitlines()]
    assert [entries[0]["event"], entries[-1]["event"]] == ["job_started", "job_finished"]
    again = run_cli(tmp_path, "stop", "job")
    assert (again.returncode, again.stderr) == (2, "elasticdl stop: job job is not running: it has stopped\n")


def test_ctrl_c_stops_the_job_and_a_command_that_is_killed_leaves_no_process(tmp_path):
    (temporary := tmp_path / "temporary").mkdir()
    arguments = ("run", "--num_workers", "2", "--", *SIMULATED)
    with start(tmp_path, *arguments, name="stopped", TMPDIR=str(temporary)) as job:
        job.wait_for_world(size=2)
        job.process.send_signal(signal.SIGINT)
        assert job.finish() == 130
        assert "stopping after this step" in job.output
        assert "job stopped stopped: " in job.output
        assert (job.processes(), list(temporary.iterdir())) == ([], [])
    with start(tmp_path, *arguments, name="killed") as job:
        job.wait_for_world(size=2)
        processes = job.processes()
        job.process.kill()
        assert psutil.wait_procs(processes, timeout=DEADLINE)[1] == []
        assert job.processes() == []
    assert json.loads(run_cli(tmp_path, "status", "killed", "--json").stdout)["phase"] == "lost"


def test_sigterm_stops_the_job_and_a_second_signal_at_once(tmp_path):
    with start(tmp_path, "run", "--num_workers", "2", "--stop_grace", "1000", "--", *SIMULATED) as job:
        world = job.wait_for_world(size=2)
        job.signal(world["members"][1], signal.SIGSTOP)  # it would use up the grace period
        job.process.send_signal(signal.SIGTERM)
        job.wait_for("the end to be decided", lambda: "stopping" in [e["phase"] for e in job.entries("phase")])
        job.process.send_signal(signal.SIGINT)  # several of the others within a second would count as one
        assert job.finish() == 143
        assert job.processes() == []


FILLS = "import os, time\nif os.environ['ELASTICDL_WORKER_ID'] == '0': b'1' * (1 << 30)\ntime.sleep(1000)"


@pytest.fixture
def group():
    """A control group with half a gigabyte of memory."""
    groups = Path("/sys/fs/cgroup", "memory" if Path("/sys/fs/cgroup/memory").is_dir() else "")
    try:
        made = Path(mkdtemp(prefix="elasticdl-", dir=groups))
        limit = made / ("memory.limit_in_bytes" if groups.name == "memory" else "memory.max")
        limit.write_text(str(1 << 29))
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    yield made
    # The kernel may be busy with it for a moment, once its last process is gone.
    wait_until(lambda: _is_removed(made), (made / "cgroup.procs").read_text, 5.0)


def _is_removed(group):
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


def test_a_worker_out_of_memory_is_told_and_replaced(tmp_path, group):
    with start(tmp_path, "run", "--num_workers", "1", "--stop_grace", "1", "--", sys.executable, "-c", FILLS) as job:
        (group / "cgroup.procs").write_text(str(job.process.pid))
        job.wait_for("another worker", lambda: any(each["worker"] == 1 for each in job.entries("worker_started")))
        assert job.entries("worker_left")[0]["cause"] == "out_of_memory", job.describe()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("train", "--model_zoo", "{tmp}", "--model_def", "broken"), "broken at import"),
        (("train", "--model_zoo", "model_zoo", "--model_def", "digits.cnn_torch", "--checkpoint_dir", "/proc/no"), "can't be written"),
        (("run", "--", "python", "-m", "torch.distributed.run", "train.py"), "torch.distributed.run starts workers of its own"),
        (("run", "--port", "{port}", "--", "python", "-m", "http"), "port {port} of 127.0.0.1 is taken"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_starts_nothing(arguments, part, tmp_path):
    (tmp_path / "broken.py").write_text("raise RuntimeError('broken at import')\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        known = {"tmp": tmp_path, "port": taken.getsockname()[1]}
        done = run_cli(tmp_path / "home", *(argument.format(**known) for argument in arguments))
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith(f"elasticdl {arguments[0]}: ")
    assert (done.stderr.count("\n"), part.format(**known) in done.stderr) == (1, True), done.stderr
    assert not list((tmp_path / "home").glob("jobs/*")), "something was started"
