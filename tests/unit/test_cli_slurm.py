"""What the commands make of a job on a Slurm cluster, whose programs are scripts here that note how they were called."""

from __future__ import annotations

import errno

import pytest

from elasticdl.cli import folder_job, folder_run
from elasticdl.cli.__main__ import main
from elasticdl.cli.folder_job import SlurmJob, handle_of
from elasticdl.common.errors import UserError
from elasticdl.job.jobdir import JobDir, MasterAddress, create_job_dir
from elasticdl.job.spec import JobSpec


class Slurm:
    """``says``: what one of its programs does, as a shell script."""

    def __init__(self, folder):
        self.folder, self.called = folder, folder / "called"
        for name in ("sbatch", "squeue", "scancel"):
            self.says(name, "")

    def says(self, name: str, script: str) -> None:
        program = self.folder / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.called}\n{script}\n')
        program.chmod(0o755)

    def calls(self, name: str) -> list[str]:
        return [line for line in self.called.read_text().splitlines() if line.startswith(name)]


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Slurm:
    monkeypatch.setenv("ELASTICDL_HOME", str(tmp_path / "home"))
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return Slurm(tmp_path / "bin")


@pytest.fixture
def job(slurm) -> JobDir:
    made = create_job_dir("mine")
    made.spec.write_text(JobSpec(job_name="mine").to_json())
    made.batch.write_text("7")
    return made


def test_a_job_whose_master_waits_is_stopped_and_who_waits_for_it_asks_slurm_seldom(slurm, job, capsys):
    slurm.says("squeue", "echo 'PENDING|Resources'")
    home = handle_of(job)
    for _ in range(10):
        assert (home.over(), home.look(None)[1]) == ("", "its master waits in Slurm's queue: Resources")
    assert len(slurm.calls("squeue")) == 1
    assert main(["stop", "mine"]) == 0
    assert capsys.readouterr().out == "job mine stopped before it had begun\n"
    assert slurm.calls("scancel") == ["scancel --quiet 7", "scancel --quiet --me --name=elasticdl-mine-7-worker"]
    assert main(["status", "mine"]) == 0
    assert "job mine: stopped: elasticdl stop" in capsys.readouterr().out


def test_what_is_trained_is_not_given_up_while_the_next_master_waits(slurm, job, capsys):
    slurm.says("squeue", "echo 'PENDING|None'")
    job.journal.write_text('{"time": 1.0, "event": "steps", "step": 5}\n')
    assert main(["stop", "mine"]) == 2
    waits = "job mine has no master at the moment: its master waits in Slurm's queue; `elasticdl status mine` tells when it has\n"
    assert waits in capsys.readouterr().err
    assert slurm.calls("scancel") == []
    assert main(["stop", "mine", "--now"]) == 0
    assert capsys.readouterr().out == "job mine stopped at step 5\n"


def test_the_workers_of_a_lost_job_are_ended(slurm, job, capsys):
    slurm.says("squeue", 'case "$*" in *--name=*) echo 8;; *) echo "FAILED|None";; esac')
    assert main(["stop", "mine"]) == 0
    assert "its workers are ended" in capsys.readouterr().out
    assert slurm.calls("scancel") == ["scancel --quiet --me --name=elasticdl-mine-7-worker"]


def test_a_master_may_answer_though_slurm_does_not(slurm, job, capsys):
    slurm.says("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    job.master.write_text('{"address": "127.0.0.1:1", "token": "", "pid": 1}')
    assert main(["stop", "mine"]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_a_machine_without_slurm_is_one_line(job, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"^--launcher slurm: can't run sbatch: No such file or directory; is this "):
        folder_run.submit(job, JobSpec(launcher="slurm"))


def test_what_is_wrong_with_the_arguments_for_workers_is_told_before_a_master_is_submitted(slurm, job):
    slurm.says("sbatch", "printf 'sbatch: error: no such partition\\nallocation failure: bad\\n' >&2; exit 1")
    with pytest.raises(UserError) as told:
        folder_run.submit(job, JobSpec(launcher="slurm", slurm_args="--partition=x"))
    assert str(told.value) == "--slurm_args: Slurm refuses sbatch: no such partition; allocation failure: bad"
    assert len(slurm.calls("sbatch")) == 1


@pytest.mark.parametrize("scancel", ["", "echo 'scancel: error: no controller' >&2; exit 1"])
def test_a_batch_job_whose_number_can_not_be_kept_is_cancelled(slurm, job, monkeypatch, capsys, scancel):
    """As on a full disk: the job's folder goes then."""

    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    slurm.says("sbatch", "echo 7")
    slurm.says("scancel", scancel)
    monkeypatch.setattr(folder_run, "write_aside", full)
    with pytest.raises(OSError, match="No space left"):
        folder_run.submit(job, JobSpec(launcher="slurm"))
    assert slurm.calls("scancel") == ["scancel --quiet 7"]
    assert ("warning: Slurm's job 7 could not be cancelled: " in capsys.readouterr().err) == bool(scancel)


def test_whoever_looks_on_is_told_why_there_is_no_master_and_by_the_exit_code_that_the_job_is_lost(
    slurm, job, monkeypatch, capsys
):
    monkeypatch.setattr(folder_job, "LOOK_SECONDS", -1.0)
    monkeypatch.setattr(SlurmJob, "look_seconds", 0.0)
    slurm.says("squeue", f'[ $(wc -l < {slurm.called}) -gt 40 ] && echo "FAILED|None" || echo "PENDING|Resources"')
    assert main(["status", "mine", "--follow"]) == 1
    assert capsys.readouterr().err == (
        "its master waits in Slurm's queue: Resources\n"
        f"elasticdl status: job mine lost: its master died without saving a final status; all logs: {job.logs}\n"
    )


@pytest.mark.parametrize(
    ("squeue", "over"),
    [("echo 'RUNNING|None'", ""), ("echo 'CANCELLED|None'", "it has ended"), ("exit 1", "it has ended")],
)
def test_a_job_goes_on_while_its_master_closes_its_places(slurm, job, squeue, over):
    slurm.says("squeue", squeue)
    job.status.write_text('{"phase": "stopped"}')
    MasterAddress("host:1", "", 1).write(job.master)
    assert handle_of(job).over() == over
    job.master.unlink()
    assert handle_of(job).over() == "it has ended"


def test_what_could_not_be_cancelled_is_to_be_tried_again(slurm, job, capsys):
    slurm.says("squeue", "echo 'PENDING|Resources'")
    slurm.says("scancel", "echo 'scancel: error: Unable to contact slurm controller' >&2; exit 1")
    assert main(["stop", "mine"]) == 1
    assert "the job may still run: try again once `squeue` answers" in capsys.readouterr().err
    assert not job.status.exists()
