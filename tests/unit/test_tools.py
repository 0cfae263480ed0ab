"""The developers' tools, in small: how an environment is made, a cluster that is not to be had, the pins, the images."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import psutil
import pytest

from elasticdl.cli.commands.zoo_image import BASE_IMAGE

ROOT = Path(__file__).resolve().parents[2]


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


GO = "#!/bin/sh\n[ $1 = env ] && echo go1.99.0 && exit\necho 'dial tcp: no such host'\nexit 1\n"
CASE = 'pytest_plugins = ["tests.cluster.fixtures"]\ndef test_one(cluster): pass\ndef test_none(): pass\n'


def test_without_programs_tests_on_a_cluster_are_skipped_and_counted(tmp_path):
    """As where a Go is missing what it needs."""
    (tmp_path / "go").write_text(GO)
    (tmp_path / "go").chmod(0o755)
    (tmp_path / "conftest.py").write_text("from tests.cluster.session import pytest_terminal_summary\n")
    (tmp_path / "test_case.py").write_text(CASE)
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    env |= {"PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "-p", "no:cacheprovider", "test_case.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert "1 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "tests on a cluster that were skipped: 1: Go's modules are not to be had: dial tcp: no such" in done.stdout


def pins(name):
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_all_that_a_release_or_an_environment_is_made_with_is_pinned():
    locked = pins("lock.txt")
    assert locked
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.!]*", pin) for pin in locked), "local, or a range"
    assert {pin for pin in pins("release.txt") if "==" not in pin} <= {pin.partition("==")[0] for pin in locked}
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert (oldest, "sys.version_info < (3, 11, 2)" in (ROOT / "scripts/setup.sh").read_text()) == (">=3.11.2", True)


IMAGES = {path.suffix: path.read_text() for path in sorted((ROOT / "docker").glob("Dockerfile.*"))}


def rests(text, word):
    """Of the instructions that begin with the word, their continuation lines joined and comments left out."""
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    split = [line.split(None, 1) for line in kept.replace("\\\n", " ").splitlines() if line.strip()]
    return [rest.strip() for first, rest in split if first == word]


@pytest.mark.parametrize("text", IMAGES.values(), ids=IMAGES)
def test_an_image_is_of_exact_versions_has_a_user_by_number_and_copies_what_exists(text):
    bases = [line.partition("=")[2] for line in rests(text, "ARG") if line.startswith("BASE")]
    assert bases
    assert all(re.search(r":\d+\.\d+\.\d+-|@sha256:[0-9a-f]{64}$", base) for base in bases), bases
    assert re.fullmatch(r"[1-9]\d*(:\d+)?", rests(text, "USER")[-1]), "Kubernetes' runAsNonRoot takes a number only"
    commands = [each.strip() for run in rests(text, "RUN") for each in run.split("&&")]
    installs = [each for each in commands if each.startswith("pip install")]
    assert installs
    assert all("-c requirements/lock.txt" in command or "--no-deps" in command for command in installs), installs
    copied = [line.split()[:-1] for line in rests(text, "COPY") if "--from" not in line]
    sources = {word.rstrip("/") for line in copied for word in line if not word.startswith("--")}
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources == let_in
    assert all((ROOT / source).exists() for source in sources), sources


def test_the_image_that_zoos_are_based_on_is_told_how_to_make():
    assert all(f"-t {BASE_IMAGE} ." in text for text in (IMAGES[".cpu"], (ROOT / "docs" / "images.md").read_text()))
