"""What is checked before anything starts."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_common_manifests import parts

from elasticdl.cli import folder_run
from elasticdl.cli.cluster_run import Submission
from elasticdl.common.errors import JobFailedError, UnreachableError, UserError
from elasticdl.common.reason import shown
from elasticdl.job import jobdir
from elasticdl.job.spec import JobSpec
from elasticdl.kube import manifests
from elasticdl.kube.client import FORBIDDEN, NoAnswerError, NotDoneError, path_of


def test_a_present_directory_that_is_gone_is_told_in_one_line(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert shown(tmp_path / "train.py") == str(tmp_path / "train.py")
    with pytest.raises(UserError, match="the folder in which this was typed is gone: change to one that is there"):
        folder_run.checked_here(JobSpec(command=("true",)))


def test_folders_become_absolute(tmp_path):
    (tmp_path / "train.csv").touch()
    spec = JobSpec(model_zoo="zoo", output="../out", training_data="train.csv", validation_data="synthetic:8")
    absolute = folder_run.with_absolute_paths(spec, tmp_path)
    assert absolute.model_zoo == str(tmp_path / "zoo")
    assert absolute.output == str(tmp_path.parent / "out")
    assert absolute.training_data == str(tmp_path / "train.csv")
    assert absolute.validation_data == "synthetic:8", "not a file, so dataset() has to know what it means"
    assert absolute.checkpoint_dir == ""


def test_every_option_that_is_a_folder_is_treated_as_one():
    described = {name for name, field in JobSpec.model_fields.items() if str(field.description).startswith("folder")}
    assert described == {*folder_run.FOLDERS_READ, *jobdir.WRITTEN}


def test_a_file_is_no_folder_and_one_that_can_be_made_is_well(tmp_path):
    jobdir.require_writable("--output", tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=r"^--output .* must be a folder"):
            jobdir.require_writable("--output", folder)


def test_an_unwritable_folder_is_refused_and_nothing_is_left(tmp_path, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(jobdir.tempfile, "TemporaryFile", refuse)
    with pytest.raises(
        UserError, match=r"^--output .*/a/b can't be written: Permission denied; choose another folder$"
    ):
        jobdir.require_writable("--output", tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    with pytest.raises(UserError, match="the program no-such-program is not found"):
        folder_run.require_executable(("no-such-program",))
    with pytest.raises(UserError, match=r"did you mean `python train\.py`\?"):
        folder_run.require_executable(("train.py",))
    folder_run.require_executable(("sh", "-c", "true"))


def test_a_folder_is_a_program_only_with_a_main(tmp_path):
    with pytest.raises(
        UserError, match=f"^{tmp_path} is a folder without __main__.py: name the script as it is called"
    ):
        folder_run.require_executable((sys.executable, str(tmp_path)))
    (tmp_path / "__main__.py").touch()
    folder_run.require_executable((sys.executable, str(tmp_path)))


def test_a_bare_python_is_the_one_that_has_elasticdl():
    assert folder_run.with_this_python(("python", "train.py")) == (sys.executable, "train.py")
    for command in (("/usr/bin/python", "train.py"), ("sh", "-c", "python train.py")):
        assert folder_run.with_this_python(command) == command


@pytest.fixture
def check_that(tmp_path, monkeypatch):
    """Replace the worker's check by the given lines of Python."""

    def install(code: str) -> None:
        (tmp_path / "pretend_check.py").write_text(code)
        monkeypatch.setattr(folder_run, "CHECK_MODULE", "pretend_check")
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    return install


def test_a_check_that_breaks_is_not_the_users_mistake(check_that):
    check_that("raise RuntimeError('broken')")
    with (
        pytest.raises(JobFailedError, match=r"(?s)the check of the job broke \(exit code 1\).*broken"),
        folder_run.checked_as_worker(JobSpec()),
    ):
        pass


@pytest.mark.parametrize("ending", ["", "sys.exit(2)"])
def test_what_the_users_module_starts_does_not_outlive_the_check(check_that, tmp_path, ending):
    alive = tmp_path / "alive"
    os.mkfifo(alive)
    reader = os.open(alive, os.O_RDONLY | os.O_NONBLOCK)
    start = f"subprocess.Popen(['sleep', '60'], stdout=open({str(alive)!r}, 'w'), stderr=subprocess.DEVNULL)"
    check_that(f"import subprocess, sys; {start}; print('wrong', file=sys.stderr); {ending}")
    try:
        with pytest.raises(UserError) if ending else contextlib.nullcontext(), folder_run.checked_as_worker(JobSpec()):
            pass
        closed, _, _ = select.select([reader], [], [], 10)
        assert closed, "the process still has its end of the pipe"
    finally:
        os.close(reader)


def test_a_check_may_take_as_long_as_a_worker_may_to_start(check_that):
    check_that("import time; time.sleep(60)")
    with (
        pytest.raises(UserError, match=r"longer than a worker's start may, 0\.1 s: --start_timeout gives it more$"),
        folder_run.checked_as_worker(JobSpec(start_timeout=0.1)),
    ):
        pass


def test_without_volcano_a_gang_is_warned_of_and_has_no_group():
    said, made = [], []
    place = SimpleNamespace(
        namespace="lab",
        may=lambda *_: True,
        serves=lambda group: group != "scheduling.volcano.sh",
        create=lambda manifest, dry_run=False: made.append(manifest) or manifest,
        find=lambda *_: None,
    )
    gang = parts(gang=True, queue="volcano=lab", num_workers="3")
    submission = Submission(place, gang, said.append)
    submission.check()
    assert said == ["warning: --queue volcano=lab: the cluster has no Volcano to heed it"]
    assert "PodGroup" not in {each["kind"] for each in manifests.companions(submission.parts)}
    (worker,) = [each for each in made if each["metadata"]["labels"].get("elasticdl.org/role") == "worker"]
    assert "scheduling.k8s.io/group-name" not in worker["metadata"]["annotations"], "its group may not be there yet"


@pytest.mark.parametrize("gang", [{}, {"gang": True, "num_workers": "3"}])
@pytest.mark.parametrize("there", [True, False])
def test_a_queue_that_volcano_does_not_have_is_refused(gang, there):
    found = []
    place = SimpleNamespace(
        namespace="lab",
        may=lambda *_: True,
        serves=lambda _: True,
        create=lambda manifest, dry_run=False: manifest,
        find=lambda kind, name: (kind == "Queue" and (found.append(name) or there)) or None,
    )
    submission = Submission(place, parts(queue="volcano=team", **gang), pytest.fail)
    refused = pytest.raises(UserError, match=r"^--queue: there is no Queue team in the cluster$")
    with contextlib.nullcontext() if there else refused:
        submission.check()
    assert found == ["team"]


def test_whoever_may_not_look_at_volcanos_queues_can_use_them():
    def forbid(kind, name):
        if kind == "Job":
            return
        raise NotDoneError(
            FORBIDDEN, 'queues.scheduling.volcano.sh "team" is forbidden: User "you" cannot get resource "queues"'
        )

    place = SimpleNamespace(may=lambda *_: True, serves=lambda _: True, create=lambda manifest, dry_run=False: manifest)
    place.namespace, place.find = "lab", forbid
    Submission(place, parts(queue="volcano=team"), pytest.fail).check()


def test_what_a_cluster_that_fails_does_not_delete_is_told_with_what_does():
    said = []

    def fail(*_):
        raise NoAnswerError(503, "the cluster failed")

    place = SimpleNamespace(namespace="lab", create=fail, delete=fail)
    with pytest.raises(UnreachableError, match="the cluster failed"):
        Submission(place, parts(), said.append).make()
    line = "warning: Job digits-master could not be deleted again: the cluster failed; `elasticdl delete digits --namespace lab` removes"
    assert said == [f"{line} what is left"]


def test_the_queues_of_volcano_are_in_no_namespace():
    assert path_of("Queue", "lab", "team") == "/apis/scheduling.volcano.sh/v1beta1/queues/team"
    assert path_of("PodGroup", "lab", "g") == "/apis/scheduling.volcano.sh/v1beta1/namespaces/lab/podgroups/g"
