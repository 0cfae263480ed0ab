"""A job that is submitted to Slurm, whose programs are scripts here that note how they were called. Its sessions: `test_cli_sessions.py`."""

from __future__ import annotations

import errno

import pytest
from cli_kit import scene_in
from refusal_kit import refused

from elasticdl.cli import folder_run
from elasticdl.cli.folder_job import handle_of
from elasticdl.job.jobdir import JobDir, MasterAddress, jobs_root
from elasticdl.job.spec import JobSpec


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    with scene_in(tmp_path, monkeypatch) as scene:
        for name in ("sbatch", "squeue", "scancel"):
            scene.program(name)
        scene.batch("mine")
        yield scene


def job() -> JobDir:
    return JobDir(jobs_root() / "mine")


def submit(**options):
    return lambda: folder_run.submit(job(), JobSpec(launcher="slurm", **options))


def test_who_waits_for_a_job_asks_slurm_seldom(slurm):
    slurm.program("squeue echo 'PENDING|Resources'")
    home = handle_of(job())
    for _ in range(10):
        assert (home.over(), home.look(None)[1]) == ("", "its master waits in Slurm's queue: Resources")
    assert (slurm.home / "called").read_text().count("squeue") == 1


def test_a_machine_without_slurm_is_one_line(slurm, monkeypatch):
    monkeypatch.setenv("PATH", "")
    refused(r"^--launcher slurm: can't run sbatch: No such file or directory; is this ", submit())


def test_what_is_wrong_with_the_arguments_for_workers_is_told_before_a_master_is_submitted(slurm):
    slurm.program("sbatch printf 'sbatch: error: no such partition\\nallocation failure: bad\\n' >&2; exit 1")
    told = r"^--slurm_args: Slurm refuses sbatch: no such partition; allocation failure: bad$"
    refused(told, submit(slurm_args="--partition=x"))
    assert len(slurm.asked()) == 1


@pytest.mark.parametrize("scancel", ["", "echo 'scancel: error: no controller' >&2; exit 1"])
def test_a_batch_job_whose_number_can_not_be_kept_is_cancelled(slurm, monkeypatch, capsys, scancel):
    """As on a full disk: the job's folder goes then."""

    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    slurm.program("sbatch echo 7")
    slurm.program(f"scancel {scancel}")
    monkeypatch.setattr(folder_run, "write_aside", full)
    refused("No space left", submit(), OSError)
    assert slurm.asked()[2:] == ["scancel --quiet 7"]
    assert ("warning: Slurm's job 7 could not be cancelled: " in capsys.readouterr().err) == bool(scancel)


@pytest.mark.parametrize(
    ("squeue", "over"),
    [("echo 'RUNNING|None'", ""), ("echo 'CANCELLED|None'", "it has ended"), ("exit 1", "it has ended")],
)
def test_a_job_goes_on_while_its_master_closes_its_places(slurm, squeue, over):
    slurm.program(f"squeue {squeue}")
    job().status.write_text('{"phase": "stopped"}')
    MasterAddress("host:1", "", 1).write(job().master)
    assert handle_of(job()).over() == over
    job().master.unlink()
    assert handle_of(job()).over() == "it has ended"
