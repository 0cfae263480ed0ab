"""Commands that ask several masters, or read several logs."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest
from cli_fake_jobs import ended_job, new_job, run
from cli_fake_master import DEADLINE, FakeMaster, serving
from rich.console import Console

from elasticdl.cli.commands.jobs import show_all
from elasticdl.cli.job_handle import AT_ONCE, JobHandle, statuses_of
from elasticdl.job.jobdir import JobDir
from elasticdl.proto import elasticdl_pb2 as pb


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ELASTICDL_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")


class Slow(JobHandle):
    """Of a job whose master answers once all ``others`` are asked, which may be as many as threads."""

    name, namespace = "", ""

    def __init__(self, name, others):
        self.name, self._others = name, others

    def status(self):
        assert sum(thread.name == "ask" for thread in threading.enumerate()) <= AT_ONCE
        self._others.wait(DEADLINE)
        return pb.JobStatus(job_name=self.name, phase="running")


def test_many_masters_are_asked_some_at_a_time_and_shown_in_their_order(capsys):
    names = [f"job-{number:02}" for number in range(3 * AT_ONCE)]
    barrier = threading.Barrier(AT_ONCE)
    show_all(Console(), [Slow(name, barrier) for name in names])
    assert [line.split()[:2] for line in capsys.readouterr()[0].splitlines()[1:]] == [[n, "running"] for n in names]


def test_a_job_that_can_not_be_asked_hides_no_other():
    class Broken(Slow):
        def status(self):
            raise ZeroDivisionError(self.name)

    found = statuses_of([Broken("first", None), Slow("second", threading.Barrier(1))])
    assert [(each.phase, each.reason) for each in found] == [("unreachable", "first"), ("running", "")]
    assert statuses_of([]) == []


PATIENT = (
    "import sys; from elasticdl.cli import entry, job_handle; job_handle.CALL_TIMEOUT = 600.0; sys.exit(entry.main())"
)


def test_who_is_interrupted_does_not_wait_for_masters_that_do_not_answer():
    asked, over, master = threading.Semaphore(0), threading.Event(), FakeMaster("any")

    def hang(request, context):
        asked.release()
        over.wait(DEADLINE)

    master.Status = hang
    with serving(master) as address:
        for name in ("one", "two"):
            address.write(new_job(name).master)
        with subprocess.Popen([sys.executable, "-c", PATIENT, "status"], stderr=subprocess.PIPE) as process:
            assert all(asked.acquire(timeout=DEADLINE) for _ in range(2))
            process.send_signal(signal.SIGINT)
            try:
                assert process.communicate(timeout=DEADLINE)[1] == b""
                assert process.returncode == 130
            finally:
                process.kill()
                over.set()


def write_logs(job: JobDir) -> None:
    job.master_log.write_text("2026-01-01 00:00:01,000 start\n2026-01-01 00:00:04,000 end\n")
    job.worker_log(0).write_text("2026-01-01 00:00:02,000 zero\nTraceback\n")
    job.worker_log(10).write_text("2026-01-01 00:00:03,000 ten\nunfinished")


def test_logs_are_interleaved_by_time_under_their_writers_names(capsys):
    write_logs(ended_job("done"))
    assert run(capsys, "logs", "done")[1].splitlines() == [
        "master    | 2026-01-01 00:00:01,000 start",
        "worker-0  | 2026-01-01 00:00:02,000 zero",
        "worker-0  | Traceback",
        "worker-10 | 2026-01-01 00:00:03,000 ten",
        "master    | 2026-01-01 00:00:04,000 end",
        "worker-10 | unfinished",
    ]
    assert run(capsys, "logs", "done", "--worker", "0")[1] == "2026-01-01 00:00:02,000 zero\nTraceback\n"
    told = "elasticdl logs: job done has no worker 7; it has logs of master, worker-0, worker-10\n"
    assert run(capsys, "logs", "done", "--worker", "7") == (2, "", told)
    ended_job("bare").logs.rmdir()
    assert run(capsys, "logs", "bare") == (0, "", "job bare has no logs: it has ended\n")
