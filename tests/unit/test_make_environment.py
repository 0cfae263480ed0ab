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

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch, tmp_path):
    """In a checkout of its own."""
    monkeypatch.syspath_prepend(SCRIPTS)
    for name in ("build_horovod", "make_environment", "setup_steps"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("TMPDIR", "PIP_NO_CACHE_DIR", "PIP_DISABLE_PIP_VERSION_CHECK"):  # it sets these
        monkeypatch.setenv(name, os.environ.get(name, ""))
    import make_environment

    monkeypatch.setattr(make_environment, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "lock.txt").write_text("torch==2.13.0\n")
    (tmp_path / "pyproject.toml").touch()
    for name in make_environment.INPUTS[1:]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return make_environment


@pytest.fixture
def venv(script):
    """One with an interpreter that works."""
    (script.VENV / "bin").mkdir(parents=True)
    (script.VENV / "bin" / "python").symlink_to(sys.executable)
    return script.VENV


def steps(script, shown: io.StringIO | None = None):
    return script.Steps(os.open(os.devnull, os.O_RDONLY), script.Board(shown or io.StringIO()), script.LOG)


class Record:
    """Stands for the programs of a set-up: which it would run, and what happens meanwhile."""

    def __init__(self, venv: Path, meanwhile=lambda title: None) -> None:
        self.titles: list[str] = []
        self._venv, self._meanwhile = venv, meanwhile

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


def test_an_environment_is_made_once_until_something_that_it_is_made_from_changes(script, venv, monkeypatch):
    assert not script.is_made(script.DEMO, script.inputs_hash())
    script.stamp(script.DEMO).write_text(script.inputs_hash())
    assert script.is_made(script.DEMO, script.inputs_hash())
    monkeypatch.setenv("TORCH_INDEX_URL", "https://example.com/cpu")
    assert not script.is_made(script.DEMO, script.inputs_hash())
    monkeypatch.delenv("TORCH_INDEX_URL")
    assert not script.is_made(script.ALL, script.inputs_hash())
    script.stamp(script.DEMO).rename(script.stamp(script.ALL))
    assert script.is_made(script.DEMO, script.inputs_hash()), "the whole environment serves the demo"
    (venv / "bin" / "python").rename(venv / "aside")
    assert not script.is_made(script.DEMO, script.inputs_hash())
    (venv / "aside").rename(venv / "bin" / "python")
    Path("requirements/lock.txt").write_text("torch==2.14.0\n")
    assert not script.is_made(script.DEMO, script.inputs_hash())


def test_whether_it_is_made_can_be_asked_and_a_wrong_word_is_one_line(script, venv, capsys):
    assert script.main(["--is-made", "demo"]) == 1
    script.stamp(script.DEMO).write_text(script.inputs_hash())
    assert script.main(["--is-made", "demo"]) == script.main(["demo"]) == 0
    assert script.main(["--is-made"]) == 1
    assert capsys.readouterr().err == ""
    assert script.main(["demos"]) == script.main(["--is-made", "demos"]) == 2
    assert capsys.readouterr().err == 2 * "setup: demos: expected demo, or nothing\n"


def test_a_set_up_that_fails_half_way_leaves_no_stamp_and_no_temporary_files(script, venv, roomy):
    script.stamp(script.DEMO).write_text("of an earlier one")

    def breaks(title):
        (Path(os.environ["TMPDIR"]) / "pip-unpack").mkdir()
        raise script.SetupError(title)

    with pytest.raises(script.SetupError):
        script.make(script.DEMO, "inputs", Record(venv, breaks))
    assert not script.stamp(script.DEMO).exists()
    assert not script.SCRATCH.exists()


def test_torch_from_another_index_is_another_environment(script, venv, roomy, monkeypatch):
    """pip would keep the torch that is there, and all that it has brought."""
    begun = []
    for url in ("", "", "https://example.com/cpu", ""):
        monkeypatch.setenv("TORCH_INDEX_URL", url)
        record = Record(venv)
        script.make(script.DEMO, "inputs", record)
        begun.append(record.titles[0])
    anew = "making .venv with python 3.11.2"
    assert begun == [anew, "tools to build with", anew, anew]


def test_what_a_kill_has_left_half_installed_is_not_taken_for_installed(script, venv, roomy):
    script.MADE_FOR.write_text("")
    assert script.is_sound("python 3.11.2", "")
    packages = venv / "lib/python3.11/site-packages"
    whole, half = (packages / f"{name}-1.0.dist-info" for name in ("whole", "half"))
    for info in (whole, half):
        info.mkdir(parents=True)
        (info / "METADATA").touch()
    (whole / "INSTALLER").touch()
    script.make(script.DEMO, "inputs", Record(venv))
    assert (whole.exists(), half.exists()) == (True, False)
    (packages / "~orch").mkdir()  # between two versions
    assert not script.is_sound("python 3.11.2", "")


def disk(script, monkeypatch, *, free: float, held: float) -> None:
    monkeypatch.setattr(script, "size", lambda folder: held)
    monkeypatch.setattr(script.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free * script.GIGABYTE))


def test_a_disk_that_is_too_small_is_told_before_and_downloads_are_kept_only_if_there_is_room(
    script, venv, monkeypatch
):
    disk(script, monkeypatch, free=0.1, held=5.0)
    script.enough_disk(5.0, 2.0)  # it is there already
    disk(script, monkeypatch, free=5.9, held=1.0)
    script.enough_disk(5.0, 1.9)
    with pytest.raises(script.SetupError, match=r"has 5.9 GB left, and 6.0 are needed for a while; advice$"):
        script.enough_disk(5.0, 2.0, "; advice")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "")
    disk(script, monkeypatch, free=7.5, held=1.0)
    script.enough_disk(4.0, 2.0)
    assert not os.environ["PIP_NO_CACHE_DIR"]
    script.enough_disk(5.0, 2.0)
    assert os.environ["PIP_NO_CACHE_DIR"] == "1"


def test_a_step_that_fails_says_its_own_reason_and_where_to_read_on(script):
    shown = io.StringIO()
    made = steps(script, shown)
    made.run("a step", ["echo", "ERROR: of an earlier step"])
    assert re.search(r"a step \d:\d\d done\n$", shown.getvalue())
    with pytest.raises(script.SetupError, match=r"ended with 1\n"):
        made.run("another", ["false"])
    says = "import sys; print('ERROR: No matching distribution found for torch'); sys.exit(1)"
    with pytest.raises(script.SetupError) as error:
        made.run("torch itself", [sys.executable, "-c", says])
    first, second = str(error.value).splitlines()
    assert first.startswith("torch itself: ")
    assert first.endswith("ended with 1: ERROR: No matching distribution found for torch")
    assert second == "what it said is in build/setup.log; run the same again: what is installed is kept"
    assert "ERROR: No matching" in Path("build/setup.log").read_text()
    assert re.search(r"torch itself \d:\d\d failed\n$", shown.getvalue())


def test_what_is_built_beside_ends_when_a_step_fails(script, venv):
    made, before = steps(script), {each.pid for each in psutil.Process().children()}
    building: list[psutil.Process] = []

    def set_up():
        with made.beside("building", ["sleep", "600"], {}):
            building.extend(each for each in psutil.Process().children() if each.pid not in before)
            made.run("a step", ["false"])

    with pytest.raises(script.SetupError):
        set_up()
    assert building
    assert not any(each.is_running() for each in building)


def test_a_build_beside_that_fails_ends_the_step_at_once(script):
    made = steps(script)
    fails = ["sh", "-c", "echo no compiler >&2; exit 1"]
    with pytest.raises(script.SetupError, match=r"^no compiler$"), made.beside("building", fails, {}):
        made.run("a step", ["sleep", "600"])
    made.run("a step without it", ["true"])


def test_two_at_once_come_one_after_the_other(script, capsys):
    with Path("requirements/lock.txt").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with (
            pytest.raises(script.SetupError, match=r"another set-up of .* has run for 0 s; end it first"),
            script.alone(0.3),
        ):
            pass
    assert "waiting for another set-up of this checkout" in capsys.readouterr().err
    with script.alone(0.0):
        pass


def test_a_set_up_that_is_told_to_end_takes_its_programs_with_it(script, venv):
    """A process of its own, as its signals are those of a whole process."""
    program = f"""
import signal, sys
sys.path.insert(0, {str(SCRIPTS)!r})
import make_environment as m
m.end_by_signals()
with m.alone() as lock:
    m.Steps(lock.fileno(), m.Board(sys.stdout), m.LOG).run("a step", ["sleep", "600"])
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert b"a step" in process.stdout.readline()
        (running,) = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) != 0
    assert not running.is_running()
