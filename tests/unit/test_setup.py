"""`scripts/setup.sh` with pretended interpreters: which it takes, when it makes the environment anew, what it asks for."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Keeps a record of what it was asked to do, and pretends to have done it.
INTERPRETER = """#!/bin/bash
case "$*" in
    *version_info*) exit {too_old} ;;
    *"import ensurepip"*) exit {without_venv} ;;
    *Python.h*) exit {without_headers} ;;
    "scripts/make_environment.py --is-made"*) exit {is_made} ;;
    scripts/make_environment.py*) echo "{name}: $*" >>record ;;
esac
"""
TOO_OLD, BARE = {"too_old": 1}, {"without_venv": 1, "without_headers": 1}
INSTALL = "apt-get install -y -q --no-install-recommends python3-venv python3-dev"
MISSING, INSTALLING = (
    "setup: these are missing: python3-venv python3-dev; install them",
    "setup: installing python3-venv",
)


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("python", "exits", "more", "code", "said", "did"),
    [
        ("one", {}, "demo", 0, "", ["one: scripts/make_environment.py demo"]),
        ("checkout/.venv/bin/python", {}, "", 0, "", ["checkout/.venv/bin/python: scripts/make_environment.py"]),
        ("old", TOO_OLD, "", 1, "3.11.2 or newer is needed: set PYTHON to one", []),
        ("bare", {**BARE, "is_made": 0}, "root", 0, "", []),
        ("bare", {**BARE, "is_made": 2}, "root", 2, "", []),
        ("bare", BARE, "", 1, MISSING, []),
        ("bare", BARE, "root", 0, INSTALLING, ["apt-get update -q", INSTALL, "bare: scripts/make_environment.py"]),
        ("bare", BARE, "root no-apt", 1, "could not be installed; apt-get says why above\n", ["apt-get update -q"]),
    ],
    ids=[
        "named",
        "that of the environment",
        "too old",
        "made",
        "a wrong word",
        "told to a user",
        "installed by root",
        "not to be had",
    ],
)
def test_the_interpreter_that_is_named_or_there_makes_the_environment(tmp_path, python, exits, more, code, said, did):
    """As a pretended user, with a pretended apt-get."""
    checkout = tmp_path / "checkout"
    (checkout / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", checkout / "scripts")
    codes = {"too_old": 0, "without_venv": 0, "without_headers": 0, "is_made": 1, **exits}
    path = program(tmp_path / python, INTERPRETER.format(name=python, **codes))
    program(tmp_path / "bin/apt-get", f'#!/bin/bash\necho "apt-get $*" >>record; exit {100 * ("no-apt" in more)}')
    program(tmp_path / "bin/id", f"#!/bin/bash\necho {0 if 'root' in more else 1000}")
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", **({} if ".venv" in python else {"PYTHON": str(path)})}
    command = ["scripts/setup.sh", *(word for word in more.split() if word == "demo")]
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=280, check=False)
    record = checkout / "record"
    assert (done.returncode, record.read_text().splitlines() if record.exists() else []) == (code, did), done.stderr
    assert said in done.stderr
    assert bool(done.stderr) == bool(said)
    assert said != MISSING or (done.stderr.count("\n"), "sudo apt-get install python3" in done.stderr) == (1, True)


def test_the_oldest_python_is_the_same_everywhere():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"] == ">=3.11.2"
    assert "sys.version_info < (3, 11, 2)" in (ROOT / "scripts" / "setup.sh").read_text()
