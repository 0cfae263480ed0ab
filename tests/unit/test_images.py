"""The Dockerfiles of docker/: their versions, and that what they copy and name exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from dockerfile_kit import Line, read, stages

from elasticdl.cli.commands.zoo_image import BASE_IMAGE, ZOO_FOLDER

ROOT = Path(__file__).resolve().parents[2]
CPU, GPU = ROOT / "docker" / "Dockerfile.cpu", ROOT / "docker" / "Dockerfile.gpu"
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))

each_dockerfile = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


@each_dockerfile
def test_every_base_image_is_of_one_exact_version_and_the_last_without_a_compiler(path):
    lines = read(path.read_text())
    images = [line.operands[0] for line in lines if line.word == "FROM"]
    assert all(re.search(r":\d+\.\d+\.\d+-|@sha256:[0-9a-f]{64}$", image) for image in images), images
    assert "build" in stages(lines)
    assert images[-1] == images[-2].replace("-bookworm", "-slim-bookworm"), "the same Python"
    user = [line.rest for line in lines if line.word == "USER"][-1]
    assert re.fullmatch(r"[1-9]\d*(:\d+)?", user), "Kubernetes' runAsNonRoot takes a number only"


@each_dockerfile
def test_python_is_that_of_the_pins(path):
    text = path.read_text()
    wanted = re.search(r"for Python (\d+\.\d+)", (ROOT / "requirements" / "lock.txt").read_text())
    assert wanted
    assert set(re.findall(r"python:?(\d+\.\d+)", text)) == {wanted[1]}


@each_dockerfile
def test_every_package_is_of_the_pinned_version_and_looked_for_in_one_index(path):
    installs = [command for line in read(path.read_text()) for command in pip_installs(line)]
    assert installs
    assert all("-c requirements/lock.txt" in command or "--no-deps" in command for command in installs), installs
    assert "extra-index" not in path.read_text()


@each_dockerfile
def test_what_is_copied_exists_and_is_not_ignored(path):
    sources = [source for line in read(path.read_text()) for source in copied_from_here(line)]
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {source.rstrip("/") for source in sources if (ROOT / source).exists()} == let_in
    assert all((ROOT / source).exists() for source in sources), sources


@each_dockerfile
def test_the_extras_that_are_installed_exist(path):
    extras = re.search(r"'\.\[([\w,]+)\]'", path.read_text())
    assert extras
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"kubernetes", "zoo"} <= set(extras[1].split(",")) <= set(known)


def test_the_extra_for_the_zoo_is_all_that_its_modules_need_beside_a_framework():
    modules = [path.read_text() for path in (ROOT / "model_zoo").rglob("*.py")]
    imported = {name for text in modules for name in re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)}
    assert imported - sys.stdlib_module_names <= {"elasticdl", "keras", "numpy", "tensorflow", "torch"}
    needed = {name for text in modules for name in re.findall(r"distribution\(\"([\w-]+)\"\)", text)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert needed == {re.split("[<>=]", line)[0] for line in project["optional-dependencies"]["zoo"]}


@each_dockerfile
def test_a_zoo_is_put_where_the_image_looks_for_it(path):
    assert [line.rest for line in read(path.read_text()) if line.word == "WORKDIR"][-1] == ZOO_FOLDER


@pytest.mark.parametrize(
    ("requires", "allow", "code"),
    [("filelock, sympy", "0", 0), ("filelock, nvidia-nccl-cu13", "0", 1), ("filelock, nvidia-nccl-cu13", "1", 0)],
)
def test_torch_for_cuda_is_refused_in_the_image_for_cpus(tmp_path, requires, allow, code):
    (tmp_path / "pip").write_text(f"#!/bin/sh\necho Name: torch\necho 'Requires: {requires}'\n")
    (tmp_path / "pip").chmod(0o755)
    [check] = [line.rest for line in read(CPU.read_text()) if line.word == "RUN" and "pip show torch" in line.rest]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TORCH_INDEX_URL": "https://a/b", "ALLOW_CUDA": allow}
    done = subprocess.run(["sh", "-c", check], env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == done.stderr.count("\n") == code
    assert done.stderr.startswith("torch from https://a/b is made for CUDA (7 GB): " if code else "")


@each_dockerfile
def test_horovod_is_tried_with_what_it_is_built_for(path):
    tried = set(re.findall(r"import horovod\.(\w+) as hvd; assert hvd\.gloo_built", path.read_text()))
    without = "HOROVOD_WITHOUT_TENSORFLOW=1" in path.read_text()
    assert tried == ({"torch"} if without else {"torch", "tensorflow"})


def test_only_the_image_for_gpus_has_nccl_and_is_not_built_against_tensorflow_for_cpus():
    """With which `import horovod.tensorflow` ends with an undefined symbol."""
    has_nccl = {path.suffix: "HOROVOD_GPU_OPERATIONS=NCCL" in path.read_text() for path in DOCKERFILES}
    assert has_nccl == {".cpu": False, ".gpu": True}
    assert "HOROVOD_WITHOUT_TENSORFLOW=1" in GPU.read_text()
    assert not [name for name in ("dev.txt", "tensorflow-cpu") if name in GPU.read_text()]
    assert "tensorflow" not in (ROOT / "requirements" / "horovod.txt").read_text().lower()


def test_the_image_that_zoos_are_based_on_is_the_one_that_is_told_how_to_make():
    assert f"-t {BASE_IMAGE} ." in (ROOT / "docker" / "Dockerfile.cpu").read_text()
    assert f"-t {BASE_IMAGE} ." in (ROOT / "docs" / "images.md").read_text()


def pip_installs(line: Line) -> list[str]:
    commands = line.rest.split("&&") if line.word == "RUN" else []
    return [" ".join(command.split()) for command in commands if command.split()[:2] == ["pip", "install"]]


def copied_from_here(line: Line) -> list[str]:
    return line.operands[:-1] if line.word == "COPY" and "from" not in line.flags else []
