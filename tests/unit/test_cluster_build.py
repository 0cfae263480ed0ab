"""The build of the cluster's programs, with a Go that does what a test tells it to: what becomes of it when it goes wrong."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import build
from tests.cluster.build import CLUSTER
from tests.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE = 60.0
# Its words go to the file `asked`; what it does instead of working is in the file `obey`, as a line of shell.
GO = """#!/bin/sh
echo "$@" >> "{folder}/asked"
[ "$1" != env ] || {{ echo go1.99.0; exit; }}
[ ! -e "{folder}/obey" ] || . "{folder}/obey"
[ "$1" = build ] || exit 0
while [ "$1" != -o ]; do shift; done
touch "$2kubernetes"
"""
FAILS = "echo 'dial tcp: no such host'; exit 1"


class Go:
    """The one that is found on PATH."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        (folder / "bin/go").write_text(GO.format(folder=folder))
        (folder / "bin/go").chmod(0o755)

    def obey(self, line):
        (self.folder / "obey").write_text(line)

    def until_it_builds(self):
        asked = self.folder / "asked"
        wait_until(lambda: asked.exists() and re.search("^build", asked.read_text(), re.MULTILINE))


@pytest.fixture
def go(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("PATH", f"{tmp_path}/go/bin{os.pathsep}{os.environ['PATH']}")
    return Go(tmp_path / "go")


def left():
    return sorted(path.name for path in build.cache_folder().glob("kubernetes-*") if path.is_dir())


@pytest.mark.parametrize(("number", "tidy"), [(signal.SIGKILL, False), (signal.SIGTERM, True)])
def test_half_of_a_build_is_never_taken_for_whole(go, number, tidy):
    go.obey("[ $1 = mod ] || exec sleep 1000")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-m", "tests.cluster.build"], **pipes) as process:
        go.until_it_builds()
        process.send_signal(number)
        process.communicate(timeout=DEADLINE)
    assert (left() == []) == tidy
    assert not CLUSTER.folder().exists()
    go.obey("")
    build.require([CLUSTER], print)
    assert left() == [CLUSTER.folder().name], "the next build removes what the killed one has left"


CASE = """
pytest_plugins = ["tests.cluster.fixtures"]
def test_one(cluster): pass
def test_two(cluster): pass
def test_none(): pass
"""


def test_without_programs_tests_on_a_cluster_are_skipped_and_counted(go, tmp_path, monkeypatch):
    go.obey(FAILS)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "conftest.py").write_text("from tests.cluster.session import pytest_terminal_summary\n")
    (tmp_path / "test_case.py").write_text(CASE)
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "-p", "no:cacheprovider", "test_case.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert "1 passed, 2 skipped" in done.stdout, done.stdout + done.stderr
    assert "tests on a cluster that were skipped: 2: Go's modules are not to be had: dial tcp: no such" in done.stdout
