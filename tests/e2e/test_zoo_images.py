"""``elasticdl zoo`` with the real buildah of this machine: what is in the image, and which images it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.cluster.full.builder import ImageBuilder

BUILDAH = Path("/usr/bin/buildah")
BASE, IMAGE = "local.test/base:1", "local.test/zoo:1"
DEADLINE = 120

pytestmark = [
    pytest.mark.skipif(not BUILDAH.exists(), reason=f"no {BUILDAH}: apt-get install buildah"),
    pytest.mark.skipif(os.geteuid() != 0, reason="buildah builds in a folder of the test's own only as root"),
]


@pytest.fixture
def builder(tmp_path):
    (tmp_path / "builder").mkdir()
    return ImageBuilder.make(tmp_path / "builder", root=Path("/"))


@pytest.fixture
def programs(tmp_path):
    """All of PATH: buildah alone, whatever else is on this machine."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "buildah").symlink_to(BUILDAH)
    return tmp_path / "bin"


@pytest.fixture
def zoo(builder, programs):
    def run(*arguments):
        env = {**os.environ, **builder.environment, "PATH": str(programs)}
        command = [sys.executable, "-m", "elasticdl.cli", "zoo", *map(str, arguments)]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE, check=False)

    return run


def folder_with(folder: Path, dockerfile: str = "") -> Path:
    folder.mkdir()
    (folder / "cnn.py").write_text("# a module\n")
    if dockerfile:
        (folder / "Dockerfile").write_text(dockerfile)
    return folder


def names_in(archive: Path) -> set[str]:
    """The files of all layers."""
    names: set[str] = set()
    with tarfile.open(archive) as layers:
        for member in layers:
            if member.isfile() and member.name.endswith(".tar"):
                with tarfile.open(fileobj=layers.extractfile(member)) as layer:
                    names.update(layer.getnames())
    return names


def test_the_image_of_a_zoo_has_its_modules(builder, programs, zoo, tmp_path):
    base = folder_with(tmp_path / "base", "FROM scratch\nUSER 1000:1000\n")
    mine = folder_with(tmp_path / "mine")
    for line in (
        ["build", base, "--image", BASE],
        ["init", "--model_zoo", mine, "--base_image", BASE],
        ["build", mine, "--image", IMAGE],
    ):
        done = zoo(*line)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.startswith(f"{programs}/buildah bud --tag {IMAGE} --file {mine}/Dockerfile {mine}\n")
    builder.save(IMAGE, tmp_path / "image.tar")
    names = names_in(tmp_path / "image.tar")
    assert "model_zoo/cnn.py" in names
    assert "model_zoo/Dockerfile" not in names


@pytest.mark.parametrize(("user", "named"), [("", "root"), ("USER elasticdl\n", "elasticdl"), ("USER 0\n", "0")])
def test_an_image_that_would_run_as_root_is_refused(zoo, tmp_path, user, named):
    folder = folder_with(tmp_path / "mine", f"FROM scratch\nCOPY . /\n{user}")
    done = zoo("build", folder, "--image", IMAGE)
    assert done.returncode == 2, done.stderr
    assert f"elasticdl zoo: {IMAGE} is built, but its user is {named}, and pods" in done.stderr.splitlines()[-1]


def test_a_base_image_that_nobody_made_is_told(zoo, tmp_path):
    folder = folder_with(tmp_path / "mine")
    assert zoo("init", "--model_zoo", folder).returncode == 0
    done = zoo("build", folder, "--image", IMAGE)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert " is not here; once, in a checkout of elasticdl: buildah bud -f docker/Dockerfile.cpu " in done.stderr


def test_a_docker_that_does_not_answer_is_passed_over(programs, zoo, tmp_path):
    (programs / "docker").write_text("#!/bin/sh\necho Cannot connect to the Docker daemon >&2\nexit 1\n")
    (programs / "docker").chmod(0o755)
    folder = folder_with(tmp_path / "mine", "FROM scratch\nCOPY . /\nUSER 1000\n")
    done = zoo("build", folder, "--image", IMAGE)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"{programs}/buildah bud ")
