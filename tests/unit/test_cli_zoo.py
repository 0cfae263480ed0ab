"""``elasticdl zoo init``: the Dockerfile that is written. What docker is asked to do is in `test_cli_sessions.py`."""

from __future__ import annotations

import pytest
from dockerfile_kit import read
from refusal_kit import refused

from elasticdl.cli.__main__ import dispatch
from elasticdl.cli.commands import zoo_image as zoo


@pytest.fixture
def folder(tmp_path):
    """A model zoo with one module."""
    (tmp_path / "cnn.py").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("options", "requirements", "lines"),
    [
        ((), "", ["COPY --chown=1000:1000 . /model_zoo", "WORKDIR /model_zoo", "USER 1000:1000"]),
        (
            ("--base_image=python:3.11.14",),
            "scikit-learn==1.9.1\n",
            [
                "COPY requirements.txt /requirements/",
                "RUN pip install --no-cache-dir -r /requirements/requirements.txt",
                "COPY --chown=1000:1000 . /model_zoo",
                "WORKDIR /model_zoo",
                "USER 1000:1000",
            ],
        ),
    ],
    ids=["the least", "the fullest"],
)
def test_the_dockerfile_and_that_it_is_written_again_as_it_is(folder, options, requirements, lines):
    if requirements:
        (folder / "requirements.txt").write_text(requirements)
    base = options[0].partition("=")[2] if options else zoo.BASE_IMAGE
    before = {path.name: path.read_text() for path in folder.iterdir()}
    for place in ([f"--model_zoo={folder}"], [str(folder)]):
        assert dispatch(["zoo", "init", *place, *options]) == 0
        text = (folder / "Dockerfile").read_text()
        assert [f"{line.word} {line.rest}" for line in read(text)] == [f"FROM {base}", "USER root", *lines]
        assert {path.name: path.read_text() for path in folder.iterdir()} == {**before, "Dockerfile": text}


def test_another_dockerfile_is_not_overwritten(folder):
    (folder / "Dockerfile").write_text("FROM mine:1\n")
    refused("Dockerfile is there and differs", lambda: dispatch(["zoo", "init", str(folder)]))
    assert (folder / "Dockerfile").read_text() == "FROM mine:1\n"
