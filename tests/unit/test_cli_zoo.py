"""``elasticdl zoo``: the Dockerfile that is written, and what docker or buildah is asked to do."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import click
import pytest
from dockerfile_kit import read

from elasticdl.cli.__main__ import dispatch, main
from elasticdl.cli.commands import zoo_image as zoo
from elasticdl.common.errors import UserError

IMAGE = "registry.example.com:5000/team/zoo:1"


def zoo_command(argv):
    return dispatch(["zoo", *argv])


@pytest.fixture
def folder(tmp_path):
    """A model zoo with one module."""
    made = tmp_path / "zoo"
    made.mkdir()
    (made / "cnn.py").write_text("")
    return made


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """An empty folder that is all of PATH."""
    made = tmp_path / "bin"
    made.mkdir()
    monkeypatch.setenv("PATH", str(made))
    return made


def fake(programs: Path, name: str, code: int = 0) -> Path:
    """A program that builds and pushes nothing, but keeps the arguments in the file that is returned, and ends with ``code``."""
    record = programs.parent / f"{name}.json"
    program = programs / name
    program.write_text(
        f"#!{sys.executable} -IS\nimport json, sys\njson.dump(sys.argv[1:], open({str(record)!r}, 'w'))\nsys.exit({code})\n"
    )
    program.chmod(0o755)
    return record


def init(folder: Path, *options: str) -> str:
    assert zoo_command(["init", "--model_zoo", str(folder), *options]) == 0
    return (folder / "Dockerfile").read_text()


def test_the_fullest_dockerfile(folder):
    (folder / "requirements.txt").write_text("scikit-learn==1.9.1\n")
    text = init(folder, "--base_image=python:3.11.14")
    assert [(line.word, line.rest) for line in read(text)] == [
        ("FROM", "python:3.11.14"),
        ("USER", "root"),
        ("COPY", "requirements.txt /requirements/"),
        ("RUN", "pip install --no-cache-dir -r /requirements/requirements.txt"),
        ("COPY", "--chown=1000:1000 . /model_zoo"),
        ("WORKDIR", "/model_zoo"),
        ("USER", "1000:1000"),
    ]


def test_the_least_dockerfile_and_that_the_folder_may_be_an_argument(folder, capsys):
    assert main(["zoo", "init", str(folder)]) == 0
    text = (folder / "Dockerfile").read_text()
    lines = [(line.word, line.rest) for line in read(text)]
    assert lines[:3] == [("FROM", zoo.BASE_IMAGE), ("USER", "root"), ("COPY", "--chown=1000:1000 . /model_zoo")]
    assert f"next: elasticdl zoo build {folder} --image IMAGE" in capsys.readouterr().out
    assert main(["zoo", "init", str(folder)]) == 0
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"cnn.py": "", "Dockerfile": text}


def test_another_dockerfile_is_not_overwritten(folder):
    (folder / "Dockerfile").write_text("FROM mine:1\n")
    with pytest.raises(UserError, match="Dockerfile is there and differs"):
        init(folder)
    assert (folder / "Dockerfile").read_text() == "FROM mine:1\n"


@pytest.mark.parametrize("name", ["docker", "buildah"])
def test_build_and_push(folder, programs, name, capfd):
    record = fake(programs, name)
    init(folder)
    assert main(["zoo", "build", str(folder), "--image", IMAGE]) == 0
    arguments = ["build", "--tag", IMAGE, "--file", str(folder / "Dockerfile"), str(folder)]
    assert json.loads(record.read_text()) == arguments
    assert capfd.readouterr().err == f"{shlex.join([str(programs / name), *arguments])}\n"
    assert main(["zoo", "push", IMAGE]) == 0
    assert json.loads(record.read_text()) == ["push", IMAGE]


def test_docker_comes_first_and_without_a_program_nothing_is_done(programs):
    with pytest.raises(UserError, match="neither docker nor buildah is here: install one of them"):
        zoo_command(["push", IMAGE])
    buildah, docker = fake(programs, "buildah"), fake(programs, "docker")
    assert zoo_command(["push", IMAGE]) == 0
    assert docker.exists()
    assert not buildah.exists()


def test_a_failure_of_the_program_is_told(programs, capsys):
    fake(programs, "docker", code=3)
    assert main(["zoo", "push", IMAGE]) == 1
    assert capsys.readouterr().err.splitlines()[1:] == ["elasticdl zoo: `docker push` ended with 3; see above why"]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["init", "nowhere"], "'nowhere' does not exist"),
        (["init", "--model_zoo=nowhere"], "'nowhere' does not exist"),
        (["build", "docs", "--image=a"], "elasticdl zoo init docs"),
        (["build", "nowhere", "--image=a"], "'nowhere' does not exist"),
        (["push", "-x"], "No such option"),
    ],
)
def test_mistakes_do_not_reach_the_program(programs, argv, line):
    record = fake(programs, "docker")
    with pytest.raises((UserError, click.UsageError)) as raised:
        zoo_command(argv)
    assert line in str(raised.value)
    assert not record.exists()
