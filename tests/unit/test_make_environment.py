"""`scripts/make_environment.py`: what it makes, when there is nothing to do, and what it says when something is wrong."""

from __future__ import annotations

import fcntl
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch, tmp_path):
    """In a checkout of its own."""
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.delitem(sys.modules, "make_environment", raising=False)
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


def steps(script):
    return script.Steps(os.open(os.devnull, os.O_RDONLY), script.Board(io.StringIO()))


def test_an_environment_is_made_once_until_something_that_it_is_made_from_changes(script, venv):
    assert not script.is_made(script.DEMO, script.inputs_hash())
    script.stamp(script.DEMO).write_text(script.inputs_hash())
    assert script.is_made(script.DEMO, script.inputs_hash())
    Path("requirements/lock.txt").write_text("torch==2.14.0\n")
    assert not script.is_made(script.DEMO, script.inputs_hash())


def test_another_index_of_torch_makes_another_environment(script, monkeypatch):
    before = script.inputs_hash()
    monkeypatch.setenv("TORCH_INDEX_URL", "https://example.com/cpu")
    assert script.inputs_hash() != before


def test_the_whole_environment_serves_the_demo_and_not_the_other_way_round(script, venv):
    script.stamp(script.ALL).write_text(script.inputs_hash())
    assert script.is_made(script.DEMO, script.inputs_hash())
    script.stamp(script.ALL).rename(script.stamp(script.DEMO))
    assert not script.is_made(script.ALL, script.inputs_hash())


def test_an_environment_whose_interpreter_is_gone_is_not_made(script, venv):
    script.stamp(script.ALL).write_text(script.inputs_hash())
    (venv / "bin" / "python").unlink()
    assert not script.is_made(script.ALL, script.inputs_hash())


def test_a_set_up_that_fails_half_way_leaves_no_stamp(script, venv, monkeypatch):
    script.stamp(script.DEMO).write_text("of an earlier one")

    class Broken:
        def run(self, title, command):
            raise script.SetupError(title)

    monkeypatch.setattr(script, "identity", lambda python: "python 3.11.2")
    monkeypatch.setattr(script, "works", lambda *command: True)
    monkeypatch.setattr(script, "enough_disk", lambda folder, gigabytes: None)
    with pytest.raises(script.SetupError):
        script.make(script.DEMO, Broken())
    assert not script.stamp(script.DEMO).exists()


def test_the_demo_builds_horovod_for_torch_alone(script):
    assert script.horovod_variables(script.DEMO) == {"HOROVOD_WITHOUT_TENSORFLOW": "1"}
    assert script.horovod_variables(script.ALL) == {}
    assert "tensorflow" not in " ".join((*script.DEMO.packages, *script.DEMO.imported))


def test_a_disk_that_is_too_small_is_told_before(script):
    script.enough_disk(Path(), 0.0)
    with pytest.raises(script.SetupError, match=r"GB left, and 1000000.0 are needed; .*docs/install.md"):
        script.enough_disk(Path(), 1e6)


@pytest.mark.parametrize(
    ("requires", "needed"), [("nvidia-nccl-cu13; x", True), ("cuda-toolkit", True), ("sympy", False)]
)
def test_whether_torch_brings_cuda_is_read_from_its_metadata(script, requires, needed):
    info = script.VENV / "lib/python3.11/site-packages/torch-2.13.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: torch\nRequires-Dist: {requires}\n")
    assert script.needs_cuda(script.VENV) is needed


def test_a_step_that_fails_says_its_reason_and_where_to_read_on(script, venv):
    says = "import sys; print('ERROR: No matching distribution found for torch'); sys.exit(1)"
    with pytest.raises(script.SetupError) as error:
        steps(script).run("torch itself", [sys.executable, "-c", says])
    first, second = str(error.value).splitlines()
    assert first.startswith("torch itself: ")
    assert first.endswith("ended with 1: ERROR: No matching distribution found for torch")
    assert second == "what it said is in .venv/setup.log; run the same again: what is installed is kept"


def test_what_is_built_beside_ends_when_a_step_fails(script, venv):
    made = steps(script)

    def set_up():
        with made.beside("building", ["sleep", "600"], {}):
            building.extend(each for each in psutil.Process().children() if each.pid not in before)
            made.run("a step", ["false"])

    before = {each.pid for each in psutil.Process().children()}
    building: list[psutil.Process] = []
    with pytest.raises(script.SetupError):
        set_up()
    assert building
    assert not any(each.is_running() for each in building)


def test_what_was_built_beside_is_told_by_its_last_word(script, venv):
    says = "import sys; print('building: 90%', file=sys.stderr); print('wheel.whl')"
    with steps(script).beside("building", [sys.executable, "-c", says], {}) as building:
        assert building.result() == "wheel.whl"
    assert building.said == ["building: 90%"]
    with (
        pytest.raises(script.SetupError, match="no compiler"),
        steps(script).beside("building", ["sh", "-c", "echo no compiler >&2; exit 1"], {}) as building,
    ):
        building.result()


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
signal.signal(signal.SIGTERM, m._interrupted)
with m.alone() as lock:
    m.Steps(lock.fileno(), m.Board(sys.stdout)).run("a step", ["sleep", "600"])
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert b"a step" in process.stdout.readline()
        (running,) = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) != 0
    assert not running.is_running()
