"""`scripts/setup.sh` with pretended interpreters: which it takes, when it makes the environment anew, what it asks for.
And `make coverage`, with a pretended tool."""

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


@pytest.fixture
def checkout(tmp_path):
    """As much of one as the script looks at."""
    made = tmp_path / "checkout"
    (made / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", made / "scripts")
    return made


def interpreter(checkout: Path, name: str, **exits: int) -> Path:
    """``exits``: with which code it ends when it is asked for one of these; 1 is no."""
    path = checkout.parent / name
    codes = {"too_old": 0, "without_venv": 0, "without_headers": 0, "is_made": 1, **exits}
    path.write_text(INTERPRETER.format(name=name, **codes))
    path.chmod(0o755)
    return path


def set_up(
    checkout: Path, python: Path | None, *arguments: str, user: int = 1000, apt: int = 0
) -> subprocess.CompletedProcess[str]:
    """As a pretended user, with a pretended apt-get, which ends with ``apt``."""
    programs = checkout.parent / "bin"
    programs.mkdir(exist_ok=True)
    for name, does in (("apt-get", f'echo "apt-get $*" >>record; exit {apt}'), ("id", f"echo {user}")):
        (programs / name).write_text(f"#!/bin/bash\n{does}\n")
        (programs / name).chmod(0o755)
    env = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", **({"PYTHON": str(python)} if python else {})}
    (checkout / "record").write_text("")
    command = ["scripts/setup.sh", *arguments]
    return subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=280, check=False)


def record(checkout: Path) -> list[str]:
    return (checkout / "record").read_text().splitlines()


def test_the_interpreter_that_is_named_makes_the_environment(checkout):
    done = set_up(checkout, interpreter(checkout, "one"), "demo")
    assert (done.returncode, done.stderr) == (0, "")
    assert record(checkout) == ["one: scripts/make_environment.py demo"]


def test_who_names_no_interpreter_keeps_that_of_the_environment(checkout):
    (checkout / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(interpreter(checkout, "kept"), checkout / ".venv" / "bin" / "python")
    assert set_up(checkout, None).returncode == 0
    assert record(checkout) == ["kept: scripts/make_environment.py"]


INSTALL = "apt-get install -y -q --no-install-recommends python3-venv python3-dev"


@pytest.mark.parametrize(
    ("more", "code", "said", "did"),
    [
        ({}, 1, "setup: these are missing: python3-venv python3-dev; install them", []),
        ({"user": 0}, 0, "setup: installing python3-venv python3-dev", ["apt-get update -q", INSTALL]),
        ({"user": 0, "apt": 100}, 1, "setup: installing python3-venv python3-dev", ["apt-get update -q"]),
    ],
    ids=["told to a user", "installed by root", "not to be had"],
)
def test_what_is_missing_of_debians_packages_is_told_or_installed(checkout, more, code, said, did):
    done = set_up(checkout, interpreter(checkout, "bare", without_venv=1, without_headers=1), **more)
    assert (done.returncode, record(checkout)[: len(did)]) == (code, did), done.stderr
    assert done.stderr.startswith(said)
    assert "user" in more or (done.stderr.count("\n"), "sudo apt-get install python3" in done.stderr) == (1, True)
    assert "apt" not in more or done.stderr.endswith("could not be installed; apt-get says why above\n")


@pytest.mark.parametrize(("is_made", "meaning"), [(0, "made"), (2, "a wrong argument")], ids=["made", "wrong"])
def test_where_nothing_is_to_be_made_nothing_is_asked_for(checkout, is_made, meaning):
    done = set_up(checkout, interpreter(checkout, "bare", without_venv=1, is_made=is_made), user=0)
    assert (done.returncode, done.stderr, record(checkout)) == (is_made, "", []), meaning


def test_an_interpreter_that_is_too_old_is_refused(checkout):
    done = set_up(checkout, interpreter(checkout, "old", too_old=1))
    assert done.returncode == 1
    assert "3.11.2 or newer is needed: set PYTHON to one" in done.stderr
    assert record(checkout) == []


def test_the_oldest_python_is_the_same_everywhere():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"] == ">=3.11.2"
    assert "sys.version_info < (3, 11, 2)" in (ROOT / "scripts" / "setup.sh").read_text()
