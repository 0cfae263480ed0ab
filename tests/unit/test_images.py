"""The Dockerfiles of docker/: their versions, and that what they copy and name exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from elasticdl.cli.commands.zoo_image import BASE_IMAGE, ZOO_FOLDER

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {path.suffix: path.read_text() for path in sorted((ROOT / "docker").glob("Dockerfile.*"))}
CPU, GPU = TEXTS[".cpu"], TEXTS[".gpu"]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@dataclass(frozen=True, slots=True)
class Line:
    """One instruction, its continuation lines joined and the comments between them left out."""

    word: str
    rest: str

    @property
    def flags(self) -> dict[str, str]:
        return dict(re.findall(r"^--(\w+)=(\S+)", self.rest))

    @property
    def operands(self) -> list[str]:
        return [part for part in self.rest.split() if not part.startswith("--")]


def read(text: str) -> list[Line]:
    """The instructions; images by the names that they have unless somebody gives the argument that FROM names."""
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    split = [line.strip().split(None, 1) for line in kept.replace("\\\n", " ").splitlines() if line.strip()]
    lines = [Line(word.upper(), rest.strip()) for word, rest in split]
    defaults = dict(line.rest.split("=", 1) for line in lines if line.word == "ARG" and "=" in line.rest)

    def named(line: Line) -> Line:
        return Line(line.word, re.sub(r"\$(\w+)", lambda name: defaults.get(name[1], ""), line.rest))

    return [named(line) if line.word == "FROM" else line for line in lines]


def stages(lines: list[Line]) -> list[str]:
    return [line.operands[2] for line in lines if line.word == "FROM" and len(line.operands) == 3]


each_dockerfile = pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)


def rests(text: str, word: str) -> list[str]:
    return [line.rest for line in read(text) if line.word == word]


@each_dockerfile
def test_every_base_image_is_of_one_exact_version_and_the_last_without_a_compiler(text):
    images = [image.split()[0] for image in rests(text, "FROM")]
    assert all(re.search(r":\d+\.\d+\.\d+-|@sha256:[0-9a-f]{64}$", image) for image in images), images
    assert "build" in stages(read(text))
    assert images[-1] == images[-2].replace("-bookworm", "-slim-bookworm"), "the same Python"
    number = re.fullmatch(r"[1-9]\d*(:\d+)?", rests(text, "USER")[-1])
    assert number, "Kubernetes' runAsNonRoot takes a number only"
    wanted = re.search(r"for Python (\d+\.\d+)", (ROOT / "requirements" / "lock.txt").read_text())
    assert {wanted[1]} == set(re.findall(r"python:?(\d+\.\d+)", text))
    assert rests(text, "WORKDIR")[-1] == ZOO_FOLDER, "a zoo is put where the image looks for it"


@each_dockerfile
def test_every_package_is_of_the_pinned_version_and_looked_for_in_one_index(text):
    commands = [" ".join(command.split()) for run in rests(text, "RUN") for command in run.split("&&")]
    installs = [command for command in commands if command.startswith("pip install")]
    assert installs
    assert all("-c requirements/lock.txt" in command or "--no-deps" in command for command in installs), installs
    assert "extra-index" not in text
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", text)
    assert {"kubernetes", "zoo"} <= set(extras.split(",")) <= set(EXTRAS)


@each_dockerfile
def test_what_is_copied_exists_and_is_not_ignored(text):
    def copied(line: Line) -> list[str]:
        return line.operands[:-1] if line.word == "COPY" and "from" not in line.flags else []

    sources = {source.rstrip("/") for line in read(text) for source in copied(line)}
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources == let_in
    assert all((ROOT / source).exists() for source in sources), sources


def test_the_extra_for_the_zoo_is_all_that_its_modules_need_beside_a_framework():
    modules = "\n".join(path.read_text() for path in (ROOT / "model_zoo").rglob("*.py"))
    imported = set(re.findall(r"^(?:import|from) (\w+)", modules, re.MULTILINE))
    assert imported - sys.stdlib_module_names <= {"elasticdl", "keras", "numpy", "tensorflow", "torch"}
    needed = set(re.findall(r"distribution\(\"([\w-]+)\"\)", modules))
    assert needed == {re.split("[<>=]", line)[0] for line in EXTRAS["zoo"]}


@pytest.mark.parametrize(
    ("requires", "allow", "code"),
    [("filelock, sympy", "0", 0), ("filelock, nvidia-nccl-cu13", "0", 1), ("filelock, nvidia-nccl-cu13", "1", 0)],
)
def test_torch_for_cuda_is_refused_in_the_image_for_cpus(tmp_path, requires, allow, code):
    (tmp_path / "pip").write_text(f"#!/bin/sh\necho Name: torch\necho 'Requires: {requires}'\n")
    (tmp_path / "pip").chmod(0o755)
    [check] = [command for command in rests(CPU, "RUN") if "pip show torch" in command]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TORCH_INDEX_URL": "https://a/b", "ALLOW_CUDA": allow}
    done = subprocess.run(["sh", "-c", check], env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == done.stderr.count("\n") == code
    assert done.stderr.startswith("torch from https://a/b is made for CUDA (7 GB): " if code else "")


def test_horovod_is_tried_with_what_it_is_built_for_and_nccl_is_for_gpus_only():
    """Against TensorFlow for CPUs `import horovod.tensorflow` would end with an undefined symbol."""
    tried = {
        name: set(re.findall(r"import horovod\.(\w+) as hvd; assert hvd\.gloo_built", TEXTS[name])) for name in TEXTS
    }
    assert tried == {".cpu": {"torch", "tensorflow"}, ".gpu": {"torch"}}
    nccl, without = "HOROVOD_GPU_OPERATIONS=NCCL", "HOROVOD_WITHOUT_TENSORFLOW=1"
    assert [word in text for text in (CPU, GPU) for word in (nccl, without)] == [False, False, True, True]
    assert not [name for name in ("dev.txt", "tensorflow-cpu") if name in GPU]
    assert "tensorflow" not in (ROOT / "requirements" / "horovod.txt").read_text().lower()


def test_the_image_that_zoos_are_based_on_is_the_one_that_is_told_how_to_make():
    for text in (CPU, (ROOT / "docs" / "images.md").read_text()):
        assert f"-t {BASE_IMAGE} ." in text
