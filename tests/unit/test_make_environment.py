"""`scripts/make_environment.py`: what it makes, when there is nothing to do, and what it says when something is wrong."""

from __future__ import annotations

import fcntl
import io
import os
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


def test_what_is_edited_while_it_is_made_is_not_taken_for_installed(script, venv, roomy, monkeypatch):
    def edit(title):
        Path("requirements/lock.txt").write_text("torch==2.14.0\n")

    monkeypatch.setattr(script, "end_by_signals", lambda: None)
    monkeypatch.setattr(script, "Steps", lambda lock, board, log: Record(venv, edit))
    before = script.inputs_hash()
    assert script.main(["demo"]) == 0
    assert script.is_made(script.DEMO, before)
    assert not script.is_made(script.DEMO, script.inputs_hash())


def test_torch_from_another_index_is_another_environment(script, venv, roomy, monkeypatch):
    """pip would keep the torch that is there, and all that it has brought."""
    monkeypatch.delenv("TORCH_INDEX_URL", raising=False)
    made = [Record(venv) for _ in range(4)]
    script.make(script.DEMO, "inputs", made[0])
    script.make(script.DEMO, "inputs", made[1])
    monkeypatch.setenv("TORCH_INDEX_URL", "https://example.com/cpu")
    script.make(script.DEMO, "inputs", made[2])
    monkeypatch.delenv("TORCH_INDEX_URL")
    script.make(script.DEMO, "inputs", made[3])
    anew = "making .venv with python 3.11.2"
    assert [record.titles[0] for record in made] == [anew, "tools to build with", anew, anew]


def test_an_environment_that_a_kill_has_left_between_two_versions_is_made_anew(script, venv, roomy):
    script.MADE_FOR.write_text("")
    assert script.is_sound("python 3.11.2", "")
    (venv / "lib/python3.11/site-packages/~orch").mkdir(parents=True)
    assert not script.is_sound("python 3.11.2", "")


def test_a_package_that_a_kill_has_left_half_installed_is_not_taken_for_installed(script, venv, roomy):
    script.MADE_FOR.write_text("")
    whole, half = (venv / f"lib/python3.11/site-packages/{name}-1.0.dist-info" for name in ("whole", "half"))
    for info in (whole, half):
        info.mkdir(parents=True)
        (info / "METADATA").touch()
    (whole / "INSTALLER").touch()
    script.make(script.DEMO, "inputs", Record(venv))
    assert (whole.exists(), half.exists()) == (True, False)


def test_the_demo_builds_horovod_for_torch_alone(script):
    assert script.horovod_variables(script.DEMO) == {"HOROVOD_WITHOUT_TENSORFLOW": "1"}
    assert script.horovod_variables(script.ALL) == {}
    assert "tensorflow" not in " ".join((*script.DEMO.packages, *script.DEMO.imported))


def disk(script, monkeypatch, *, free: float, held: float) -> None:
    monkeypatch.setattr(script, "size", lambda folder: held)
    monkeypatch.setattr(script.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free * script.GIGABYTE))


def test_a_disk_that_is_too_small_is_told_before(script, venv, monkeypatch):
    disk(script, monkeypatch, free=5.9, held=1.0)
    script.enough_disk(5.0, 1.9)
    with pytest.raises(script.SetupError, match=r"has 5.9 GB left, and 6.0 are needed for a while; advice$"):
        script.enough_disk(5.0, 2.0, "; advice")


def test_what_is_installed_already_needs_no_room(script, venv, monkeypatch):
    disk(script, monkeypatch, free=0.1, held=5.0)
    script.enough_disk(5.0, 2.0)


def test_what_is_downloaded_is_kept_for_the_next_time_only_if_there_is_room(script, venv, monkeypatch):
    disk(script, monkeypatch, free=7.5, held=1.0)
    script.enough_disk(4.0, 2.0)
    assert not os.environ["PIP_NO_CACHE_DIR"]
    script.enough_disk(5.0, 2.0)
    assert os.environ["PIP_NO_CACHE_DIR"] == "1"


def test_the_size_of_a_folder_is_what_its_files_take(script, tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    before = script.size(tmp_path / "a")
    (tmp_path / "a/b/file").write_bytes(bytes(1 << 20))
    assert script.size(tmp_path / "a") - before == pytest.approx(1 / 1024, rel=0.1)


def test_only_a_torch_for_cuda_gets_the_advice_to_take_another(script, venv, monkeypatch):
    advised = []
    monkeypatch.setattr(script, "enough_disk", lambda *demand: advised.append("docs/install.md" in str(demand)))
    for cuda in (False, True):
        monkeypatch.setattr(script, "needs_cuda", lambda: cuda)  # noqa: B023  # called before the next turn
        script.install(script.DEMO, "", Record(venv))
    assert advised == [False, False, True]


@pytest.mark.parametrize(
    ("requires", "needed"), [("nvidia-nccl-cu13; x", True), ("cuda-toolkit", True), ("sympy", False)]
)
def test_whether_torch_brings_cuda_is_read_from_its_metadata(script, requires, needed):
    info = script.VENV / "lib/python3.11/site-packages/torch-2.13.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: torch\nRequires-Dist: {requires}\n")
    assert script.needs_cuda() is needed


def test_a_step_that_fails_says_its_reason_and_where_to_read_on(script):
    """As making .venv itself, when there is none yet."""
    shown = io.StringIO()
    says = "import sys; print('ERROR: No matching distribution found for torch'); sys.exit(1)"
    with pytest.raises(script.SetupError) as error:
        steps(script, shown).run("torch itself", [sys.executable, "-c", says])
    first, second = str(error.value).splitlines()
    assert first.startswith("torch itself: ")
    assert first.endswith("ended with 1: ERROR: No matching distribution found for torch")
    assert second == "what it said is in build/setup.log; run the same again: what is installed is kept"
    assert "ERROR: No matching" in Path("build/setup.log").read_text()
    assert shown.getvalue().endswith("torch itself 0:00 failed\n")


def test_the_reason_of_a_step_is_its_own(script):
    shown = io.StringIO()
    made = steps(script, shown)
    made.run("a step", ["echo", "ERROR: of an earlier step"])
    assert shown.getvalue().endswith("a step 0:00 done\n")
    with pytest.raises(script.SetupError) as error:
        made.run("another", ["false"])
    assert str(error.value).splitlines()[0].endswith("ended with 1")


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


def test_a_build_beside_that_fails_ends_the_step_at_once(script):
    made = steps(script)
    fails = ["sh", "-c", "echo no compiler >&2; exit 1"]
    with pytest.raises(script.SetupError, match=r"^no compiler$"), made.beside("building", fails, {}):
        made.run("a step", ["sleep", "600"])
    made.run("a step without it", ["true"])


def test_a_signal_while_a_program_is_started_ends_the_program(script, monkeypatch):
    started = []

    def start(*arguments, **options):
        started.append(popen(*arguments, **options))
        signal.raise_signal(signal.SIGTERM)
        return started[0]

    popen, before = subprocess.Popen, [(each, signal.getsignal(each)) for each in (signal.SIGTERM, signal.SIGHUP)]
    script.end_by_signals()
    try:
        made = steps(script)
        monkeypatch.setattr(subprocess, "Popen", start)
        with pytest.raises(KeyboardInterrupt):
            made.run("a step", ["sleep", "600"])
        monkeypatch.undo()
        assert started[0].returncode == -signal.SIGINT
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def test_who_loses_patience_does_not_wait_for_a_program_that_does_not_end(script):
    """Ctrl-C, by the clock."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    deaf = ["sh", "-c", "trap '' INT; echo ready; exec sleep 600"]
    try:
        with subprocess.Popen(deaf, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
            assert process.stdout.readline() == "ready\n"
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            sys.modules["setup_steps"]._end(process)
            assert process.returncode == -signal.SIGKILL
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_what_was_built_beside_is_told_by_its_last_word(script, venv):
    shown = io.StringIO()
    says = "echo building: 90% >&2; sleep 0.7; echo wheel.whl"  # longer than the board waits for news
    with steps(script, shown).beside("building", ["sh", "-c", says], {}) as building:
        assert building.result() == "wheel.whl"
    assert building.said == ["building: 90%"]
    assert "1. building 0:00 (building: 90%)\n" in shown.getvalue()
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
