"""A job whose master is a batch job, as the commands see it; Slurm's commands are scripts of the test's."""

from __future__ import annotations

import pytest

from elasticdl.cli.local import batch_master
from elasticdl.cli.local.folder_home import BatchHome
from elasticdl.common.errors import UnreachableError
from elasticdl.job.jobdir import JobDir, MasterAddress


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Sets what it prints; returns how often it was asked so far."""
    asked, programs = tmp_path / "asked", tmp_path / "programs"
    programs.mkdir()
    asked.touch()
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setattr(batch_master, "_answers", {})

    def say(line: str, code: int = 0) -> int:
        program = programs / "squeue"
        program.write_text(f"#!/bin/sh\necho x >> {asked}\necho '{line}'\nexit {code}\n")
        program.chmod(0o755)
        batch_master._answers.clear()
        return len(asked.read_text().split())

    return say


@pytest.fixture
def job(tmp_path):
    job = JobDir(tmp_path / "job")
    job.path.mkdir()
    job.batch.write_text("17")
    return job


def test_whoever_waits_for_a_master_in_the_queue_asks_slurm_seldom(squeue, job):
    squeue("PENDING|Resources")
    home = BatchHome(job)
    for _ in range(10):
        assert (home.over(), home.absence()) == ("", "its master waits in Slurm's queue: Resources")
    assert squeue("") == 1


def test_a_slurm_that_does_not_answer_hides_no_master(squeue, job):
    squeue("", code=1)
    home = BatchHome(job)
    with pytest.raises(UnreachableError):
        batch_master.state_of(job)
    assert (home.over(), home.absence()) == ("", "Slurm refuses squeue: ")
    job.write_master(MasterAddress("host:1", "", 1))
    assert (home.over(), home.absence()) == ("", "")
