"""The developers' tools, in small: how an environment is made, Horovod's wheel, the demo's sums, the images."""

from __future__ import annotations

import importlib
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import psutil
import pytest
from refusal_kit import refused

from elasticdl.cli.commands.zoo_image import BASE_IMAGE

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.fixture
def script(monkeypatch):
    """Imports a program of scripts/."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module


# ---- scripts/make_environment.py ----


def test_a_set_up_that_is_told_to_end_takes_its_programs_with_it(tmp_path):
    """A process of its own, as its signals are those of a whole process."""
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/lock.txt").touch()
    steps = 'm.Steps(lock.fileno(), m.Board(sys.stdout), m.LOG).run("a step", ["sleep", "600"])'
    begins = f"import signal, sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import make_environment as m"
    source = f"{begins}\nm.end_by_signals()\nwith m.alone() as lock:\n    {steps}\n"
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "cwd": tmp_path}
    with subprocess.Popen([sys.executable, "-c", source], **options) as process:
        assert b"a step" in process.stdout.readline()
        (running,) = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) != 0
    assert not running.is_running()


# ---- scripts/build_horovod.py ----

TORCH, BOTH = {"torch": "2.13.0"}, {"torch": "2.13.0", "tf": "2.21.0"}
WHEEL = "horovod-0.28.1-cp311.whl"


def put(cache, key):
    (cache / key).mkdir(parents=True)
    (cache / key / WHEEL).touch()
    return cache / key


def test_a_wheel_for_both_frameworks_serves_torch_alone_and_not_the_other_way_round(script, tmp_path):
    horovod = script("build_horovod")
    without = {"HOROVOD_WITHOUT_TENSORFLOW": "1"}
    assert [[each.label for each in horovod.wanted(given)] for given in ({}, without)] == [["torch", "tf"], ["torch"]]
    assert horovod.cached(tmp_path, TORCH, "") is None
    wider = put(tmp_path, horovod.cache_key(BOTH, ""))
    assert (horovod.cached(tmp_path, TORCH, ""), horovod.cached(tmp_path, TORCH, "NCCL")) == (wider, None)
    exact = put(tmp_path, horovod.cache_key(TORCH, ""))
    assert (horovod.cached(tmp_path, TORCH, ""), horovod.cached(tmp_path, TORCH, "NCCL")) == (exact, None)
    (wider / WHEEL).unlink()
    assert horovod.cached(tmp_path, BOTH, "") is None, "a folder without a wheel is none"


# ---- scripts/demo.py ----


def test_what_the_demo_says_of_the_steps_is_what_the_journal_counts(script):
    def said(made, again):
        return script("demo").steps_line(
            [{"event": "steps", "steps": made, "again": again}, {"event": "epoch_finished", "step": 20}]
        )

    assert said(20, 0).endswith("none was lost or made twice")
    assert said(21, 1).endswith("none was lost, 1 made again")
    refused("counts 19 steps, and the last one has the number 20", lambda: said(19, 0), ValueError)


# ---- releases and pins ----


def pins(name):
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_all_that_a_release_or_an_environment_is_made_with_is_pinned():
    locked = pins("lock.txt")
    assert locked
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.!]*", pin) for pin in locked), (
        "no local versions, no ranges"
    )
    assert {pin for pin in pins("release.txt") if "==" not in pin} <= {pin.partition("==")[0] for pin in locked}
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert (oldest, "sys.version_info < (3, 11, 2)" in (ROOT / "scripts/setup.sh").read_text()) == (">=3.11.2", True)


# ---- docker/ ----

IMAGES = {path.suffix: path.read_text() for path in sorted((ROOT / "docker").glob("Dockerfile.*"))}


def rests(text, word):
    """Of the instructions that begin with the word, their continuation lines joined and comments left out."""
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    split = [line.split(None, 1) for line in kept.replace("\\\n", " ").splitlines() if line.strip()]
    return [rest.strip() for first, rest in split if first == word]


@pytest.mark.parametrize("text", IMAGES.values(), ids=IMAGES)
def test_an_image_is_of_exact_versions_and_copies_what_exists(text):
    defaults = dict(line.split("=", 1) for line in rests(text, "ARG") if "=" in line)
    images = [
        re.sub(r"\$(\w+)", lambda name: defaults.get(name[1], ""), each).split()[0] for each in rests(text, "FROM")
    ]
    assert all(re.search(r":\d+\.\d+\.\d+-|@sha256:[0-9a-f]{64}$", image) for image in images), images
    assert re.fullmatch(r"[1-9]\d*(:\d+)?", rests(text, "USER")[-1]), "Kubernetes' runAsNonRoot takes a number only"
    installs = [
        each for run in rests(text, "RUN") for each in run.split("&&") if each.strip().startswith("pip install")
    ]
    assert installs
    assert all("-c requirements/lock.txt" in command or "--no-deps" in command for command in installs), installs
    copied = [line.split()[:-1] for line in rests(text, "COPY") if "--from" not in line]
    sources = {word.rstrip("/") for line in copied for word in line if not word.startswith("--")}
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources == let_in
    assert all((ROOT / source).exists() for source in sources), sources


def test_the_image_that_zoos_are_based_on_is_told_how_to_make_and_has_what_the_zoo_needs():
    for text in (IMAGES[".cpu"], (ROOT / "docs" / "images.md").read_text()):
        assert f"-t {BASE_IMAGE} ." in text
    modules = "\n".join(path.read_text() for path in (ROOT / "model_zoo").rglob("*.py"))
    imported = set(re.findall(r"^(?:import|from) (\w+)", modules, re.MULTILINE)) - sys.stdlib_module_names
    assert imported <= {"elasticdl", "keras", "numpy", "tensorflow", "torch"}
    needed = set(re.findall(r"distribution\(\"([\w-]+)\"\)", modules))
    assert needed == {re.split("[<>=]", line)[0] for line in EXTRAS["zoo"]}
