"""`scripts/demo.py`: what it concludes from the journal, and how the job ends if it does not by itself."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from refusal_kit import refused

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("demo")


@pytest.mark.parametrize(
    ("made", "again", "said"),
    [(20, 0, "none was lost or made twice"), (21, 1, "none was lost, 1 made again"), (19, 0, None)],
)
def test_what_is_said_of_the_steps_is_what_the_journal_counts(script, made, again, said):
    journal = [{"event": "steps", "steps": made, "again": again}, {"event": "epoch_finished", "step": 20}]
    if said is None:
        refused("counts 19 steps, and the last one has the number 20", lambda: script.steps_line(journal), ValueError)
    else:
        assert script.steps_line(journal).endswith(said)


def test_no_worker_of_a_job_that_has_ended_is_killed(script):
    """Its process number may be another's by then."""
    disturbance = script.Disturbance(None)
    disturbance._over.set()
    strike = {"rank": 1, "number": signal.SIGKILL, "what": "killed"}
    told = "ended before worker 7 was killed"
    refused(told, lambda: disturbance._strike({"members": [3, 7]}, **strike), TimeoutError)


@pytest.mark.parametrize("asked", [False, True])
def test_a_job_that_heeds_no_request_is_ended_by_force(script, monkeypatch, asked):
    monkeypatch.setattr(script, "STOP_SECONDS", 0.2)
    deaf = "trap '' INT TERM; echo ready; exec sleep 600"
    with subprocess.Popen(["sh", "-c", deaf], stdout=subprocess.PIPE) as job:
        try:
            assert job.stdout.readline() == b"ready\n"
            script.end(job, asked)
            assert job.poll() == -signal.SIGKILL
        finally:
            job.kill()


def test_a_job_that_takes_too_long_is_asked_to_stop_and_told_of(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "WHOLE_DEADLINE", 0.0)
    job = ["sleep", "601"]
    refused("was stopped after 0 s", lambda: script.run(job, str(tmp_path)), TimeoutError)
    left = [each.info for each in psutil.process_iter(["ppid", "cmdline"]) if each.info["cmdline"] == job]
    assert os.getpid() not in [each["ppid"] for each in left]


def test_a_demo_that_is_told_to_end_takes_its_job_with_it():
    """A process of its own, as its signals are those of a whole process."""
    program = f"""
import signal, sys
sys.path.insert(0, {str(SCRIPTS)!r})
import demo
signal.signal(signal.SIGTERM, demo.told_to_end)
demo.run(["sh", "-c", "echo runs; exec sleep 600"], "")
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"runs\n"
        (job,) = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not job.is_running()
