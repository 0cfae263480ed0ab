"""What is checked before a job starts, on this machine, on a cluster whose answers are given, and with Slurm, whose programs are scripts."""

from __future__ import annotations

import errno
import sys
from types import SimpleNamespace

import pytest
import yaml
from cli_kit import scene_in
from refusal_kit import refused
from test_common_manifests import parts

from elasticdl.cli import folder_run
from elasticdl.cli.__main__ import main
from elasticdl.cli.cluster_run import Submission
from elasticdl.cli.folder_job import handle_of
from elasticdl.common.errors import UnreachableError
from elasticdl.common.reason import shown
from elasticdl.job import jobdir
from elasticdl.job.jobdir import JobDir, MasterAddress, jobs_root
from elasticdl.job.spec import JobSpec
from elasticdl.kube.client import FORBIDDEN, NoAnswerError, NotDoneError


def test_a_present_directory_that_is_gone_is_told_in_one_line(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert shown(tmp_path / "train.py") == str(tmp_path / "train.py")
    told = "the folder in which this was typed is gone: change to one that is there"
    refused(told, lambda: folder_run.checked_here(JobSpec(command=("true",))))


def test_folders_become_absolute_and_a_bare_python_the_one_that_has_elasticdl(tmp_path):
    (tmp_path / "train.csv").touch()
    spec = JobSpec(model_zoo="zoo", output="../out", training_data="train.csv", validation_data="synthetic:8")
    absolute = folder_run.with_absolute_paths(spec, tmp_path)
    assert (absolute.model_zoo, absolute.output) == (str(tmp_path / "zoo"), str(tmp_path.parent / "out"))
    assert (absolute.training_data, absolute.checkpoint_dir) == (str(tmp_path / "train.csv"), "")
    assert absolute.validation_data == "synthetic:8", "not a file, so dataset() has to know what it means"
    described = {name for name, field in JobSpec.model_fields.items() if str(field.description).startswith("folder")}
    assert described == {*folder_run.FOLDERS_READ, *jobdir.WRITTEN}
    assert folder_run.with_this_python(("python", "train.py")) == (sys.executable, "train.py")
    for command in (("/usr/bin/python", "train.py"), ("sh", "-c", "python train.py")):
        assert folder_run.with_this_python(command) == command


# ---- on a cluster ----


def cluster(**answers):
    """It takes everything, and has nothing of what may be there, if it does not answer otherwise."""
    usual = {"may": lambda *_: True, "serves": lambda group: True, "find": lambda *_: None}
    usual["create"] = lambda manifest, dry_run=False: manifest
    return SimpleNamespace(**{"namespace": "lab", **usual, **answers})


@pytest.mark.parametrize("there", [True, False, None], ids=["there", "missing", "whoever may not look can use it"])
def test_a_queue_that_volcano_does_not_have_is_refused(there):
    def find(kind, name):
        if kind == "Queue" and there is None:
            raise NotDoneError(FORBIDDEN, f'queues "{name}" is forbidden: User "you" cannot get resource "queues"')
        return {"metadata": {"name": name}} if kind == "Queue" and there else None

    check = Submission(cluster(find=find), parts(queue="volcano=team"), pytest.fail).check
    check() if there is not False else refused(r"^--queue: there is no Queue team in the cluster$", check)


def test_what_a_cluster_that_fails_does_not_delete_is_told_with_what_does():
    def fail(*_):
        raise NoAnswerError(503, "the cluster failed")

    submission = Submission(cluster(create=fail, delete=fail), parts(), (said := []).append)
    refused("the cluster failed", submission.make, UnreachableError)
    line = "warning: Job digits-master could not be deleted again: the cluster failed; `elasticdl delete digits --namespace lab` removes"
    assert said == [f"{line} what is left"]


def test_manifests_are_written_for_others_to_apply_and_only_for_the_owner_to_read(tmp_path, capsys):
    file = tmp_path / "job.yaml"
    file.write_text("old")
    file.chmod(0o644)
    argv = ["train", "--image", "i", "--model_def", "m", "--job_name", "digits", "--namespace", "lab"]
    assert main([*argv, "--yaml", str(file)]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"job digits written to {file}, with its secret keys: ")
    assert file.stat().st_mode & 0o777 == 0o600
    made = list(yaml.safe_load_all(file.read_text()))
    assert (made[-1]["kind"], made[-1]["spec"]["parallelism"]) == ("Job", 1)
    assert {each["metadata"]["namespace"] for each in made} == {"lab"}
    assert [each["immutable"] for each in made if each["kind"] == "Secret"] == [True] * 4
    (spec,) = [each for each in made if each["metadata"]["name"] == "digits-spec"]
    assert JobSpec.from_json(spec["data"]["job.json"]).model_def == "m"


# ---- with Slurm; its sessions: `test_cli_sessions.py` ----


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


def test_what_is_wrong_with_slurm_or_the_arguments_for_workers_is_told_before_a_master_is_submitted(slurm, monkeypatch):
    slurm.program("sbatch printf 'sbatch: error: no such partition\\nallocation failure: bad\\n' >&2; exit 1")
    told = r"^--slurm_args: Slurm refuses sbatch: no such partition; allocation failure: bad$"
    refused(told, submit(slurm_args="--partition=x"))
    assert len(slurm.asked()) == 1
    monkeypatch.setenv("PATH", "")
    refused(r"^--launcher slurm: can't run sbatch: No such file or directory; is this ", submit())


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
