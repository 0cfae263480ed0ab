"""`scripts/make_environment.py`: what it makes, when there is nothing to do, and what it says when something is wrong."""

from __future__ import annotations

import fcntl
import io
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from refusal_kit import refused

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch, tmp_path):
    """In a checkout of its own, with an environment whose interpreter works."""
    monkeypatch.syspath_prepend(SCRIPTS)
    for name in ("build_horovod", "make_environment", "setup_steps"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("TMPDIR", "PIP_NO_CACHE_DIR", "PIP_DISABLE_PIP_VERSION_CHECK"):  # it sets these
        monkeypatch.setenv(name, os.environ.get(name, ""))
    import make_environment

    monkeypatch.setattr(make_environment, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("requirements/lock.txt", "pyproject.toml", *make_environment.INPUTS[1:]):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    (make_environment.VENV / "bin").mkdir(parents=True)
    (make_environment.VENV / "bin" / "python").symlink_to(sys.executable)
    return make_environment


class Record:
    """Stands for the programs of a set-up: which it would run, and what happens meanwhile."""

    def __init__(self, meanwhile=lambda title: None) -> None:
        self.titles: list[str] = []
        self._meanwhile = meanwhile

    def run(self, title, command):
        self.titles.append(title)
        self._meanwhile(title)

    @contextmanager
    def beside(self, title, command, variables):
        yield SimpleNamespace(result=lambda: "horovod.whl")


@pytest.fixture
def roomy(script, monkeypatch):
    """A disk with room, and an interpreter that is taken for what it is called."""
    monkeypatch.setattr(script, "enough_disk", lambda *demand: None)
    monkeypatch.setattr(script, "identity", lambda python: "python 3.11.2")
    monkeypatch.setattr(script, "works", lambda *command: True)


def test_an_environment_is_made_once_until_something_that_it_is_made_from_changes(script, monkeypatch):
    made = lambda kind: script.is_made(kind, script.inputs_hash())  # noqa: E731
    assert not made(script.DEMO)
    script.stamp(script.DEMO).write_text(script.inputs_hash())
    assert made(script.DEMO)
    assert not made(script.ALL)
    monkeypatch.setenv("TORCH_INDEX_URL", "https://example.com/cpu")
    assert not made(script.DEMO)
    monkeypatch.delenv("TORCH_INDEX_URL")
    script.stamp(script.DEMO).rename(script.stamp(script.ALL))
    assert made(script.DEMO), "the whole environment serves the demo"
    python = script.VENV / "bin" / "python"
    python.rename(script.VENV / "aside")
    assert not made(script.DEMO)
    (script.VENV / "aside").rename(python)
    Path("requirements/lock.txt").write_text("torch==2.14.0\n")
    assert not made(script.DEMO)


def test_whether_it_is_made_can_be_asked_and_a_wrong_word_is_one_line(script, capsys):
    assert script.main(["--is-made", "demo"]) == 1
    script.stamp(script.DEMO).write_text(script.inputs_hash())
    calls = {"--is-made demo": 0, "demo": 0, "--is-made": 1, "demos": 2, "--is-made demos": 2}
    assert {words: script.main(words.split()) for words in calls} == calls
    assert capsys.readouterr().err == 2 * "setup: demos: expected demo, or nothing\n"


def test_a_set_up_that_fails_half_way_leaves_no_stamp_and_no_temporary_files(script, roomy):
    script.stamp(script.DEMO).write_text("of an earlier one")

    def breaks(title):
        (Path(os.environ["TMPDIR"]) / "pip-unpack").mkdir()
        raise script.SetupError(title)

    refused(r"\w", lambda: script.make(script.DEMO, "inputs", Record(breaks)), script.SetupError)
    assert (script.stamp(script.DEMO).exists(), script.SCRATCH.exists()) == (False, False)


def test_torch_from_another_index_is_another_environment(script, roomy, monkeypatch):
    """pip would keep the torch that is there, and all that it has brought."""
    begun = []
    for url in ("", "", "https://example.com/cpu", ""):
        monkeypatch.setenv("TORCH_INDEX_URL", url)
        record = Record()
        script.make(script.DEMO, "inputs", record)
        begun.append(record.titles[0])
    anew = "making .venv with python 3.11.2"
    assert begun == [anew, "tools to build with", anew, anew]


def test_what_a_kill_has_left_half_installed_is_not_taken_for_installed(script, roomy):
    script.MADE_FOR.write_text("")
    assert script.is_sound("python 3.11.2", "")
    packages = script.VENV / "lib/python3.11/site-packages"
    whole, half = (packages / f"{name}-1.0.dist-info" for name in ("whole", "half"))
    for file in (whole / "METADATA", half / "METADATA", whole / "INSTALLER"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    script.make(script.DEMO, "inputs", Record())
    assert (whole.exists(), half.exists()) == (True, False)
    (packages / "~orch").mkdir()  # between two versions
    assert not script.is_sound("python 3.11.2", "")


@pytest.mark.parametrize(
    ("free", "held", "demand", "told", "kept"),
    [
        (0.1, 5.0, (5.0, 2.0), "", True),  # it is there already
        (5.9, 1.0, (5.0, 1.9), "", False),
        (5.9, 1.0, (5.0, 2.0, "; advice"), r"has 5.9 GB left, and 6.0 are needed for a while; advice$", False),
        (7.5, 1.0, (4.0, 2.0), "", True),
        (7.5, 1.0, (5.0, 2.0), "", False),
    ],
)
def test_a_disk_that_is_too_small_is_told_before_and_downloads_are_kept_only_if_there_is_room(
    script, monkeypatch, free, held, demand, told, kept
):
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "")
    monkeypatch.setattr(script, "size", lambda folder: held)
    monkeypatch.setattr(script.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free * script.GIGABYTE))
    if told:
        refused(told, lambda: script.enough_disk(*demand), script.SetupError)
    else:
        script.enough_disk(*demand)
        assert os.environ["PIP_NO_CACHE_DIR"] == ("" if kept else "1")


# ---- its steps ----


@pytest.fixture
def steps(script):
    shown = io.StringIO()
    made = script.Steps(os.open(os.devnull, os.O_RDONLY), script.Board(shown), script.LOG)
    return SimpleNamespace(run=made.run, beside=made.beside, shown=shown.getvalue, error=script.SetupError)


def test_a_step_that_fails_says_its_own_reason_and_where_to_read_on(steps):
    steps.run("a step", ["echo", "ERROR: of an earlier step"])
    assert re.search(r"a step \d:\d\d done\n$", steps.shown())
    with pytest.raises(steps.error, match=r"ended with 1\n"):
        steps.run("another", ["false"])
    says = "import sys; print('ERROR: No matching distribution found for torch'); sys.exit(1)"
    with pytest.raises(steps.error) as error:
        steps.run("torch itself", [sys.executable, "-c", says])
    first, second = str(error.value).splitlines()
    assert re.fullmatch(r"torch itself: .*ended with 1: ERROR: No matching distribution found for torch", first)
    assert second == "what it said is in build/setup.log; run the same again: what is installed is kept"
    assert "ERROR: No matching" in Path("build/setup.log").read_text()
    assert re.search(r"torch itself \d:\d\d failed\n$", steps.shown())


def test_what_is_built_beside_ends_when_a_step_fails_and_the_other_way_round(steps):
    before, building = {*psutil.Process().children()}, []

    def run_beside(building_does, does):
        with steps.beside("building", building_does, {}):
            building.append(({*psutil.Process().children()} - before).pop())
            steps.run("a step", does)

    with pytest.raises(steps.error, match=r"^a step: .*ended with 1"):
        run_beside(["sleep", "600"], ["false"])
    with pytest.raises(steps.error, match=r"^no compiler$"):
        run_beside(["sh", "-c", "sleep 0.1; echo no compiler >&2; exit 1"], ["sleep", "600"])
    assert not any(each.is_running() for each in building)
    steps.run("a step without it", ["true"])


def test_two_at_once_come_one_after_the_other(script, capsys):
    with Path("requirements/lock.txt").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        told = r"another set-up of .* has run for 0 s; end it first"
        refused(told, script.alone(0.3).__enter__, script.SetupError)
    assert "waiting for another set-up of this checkout" in capsys.readouterr().err
    with script.alone(0.0):
        pass


def test_a_set_up_that_is_told_to_end_takes_its_programs_with_it(script):
    """A process of its own, as its signals are those of a whole process."""
    program = f"""
import signal, sys
sys.path.insert(0, {str(SCRIPTS)!r})
import make_environment as m
m.end_by_signals()
with m.alone() as lock:
    m.Steps(lock.fileno(), m.Board(sys.stdout), m.LOG).run("a step", ["sleep", "600"])
"""
    command, quiet = [sys.executable, "-c", program], subprocess.DEVNULL
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=quiet) as process:
        assert b"a step" in process.stdout.readline()
        (running,) = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) != 0
    assert not running.is_running()
