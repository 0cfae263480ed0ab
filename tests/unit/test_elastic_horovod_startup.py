"""Scripts written for Horovod: how we get in, and whether they move."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from elasticdl.common.credentials import CONNECTED, MASTER, Token, WorkerEnvironment
from elasticdl.common.front_ends import STARTUP_FOLDER, python_path
from elasticdl.elastic.horovod_scripts import script_worker as stillness
from elasticdl.elastic.horovod_scripts.script_worker import BUSY, WINDOW_SECONDS, Stillness

ENVIRONMENT = WorkerEnvironment("127.0.0.1:1", Token("token"), 0, "job.json").to_env()


class TestStartup:
    def run(self, tmp_path, code, *options, fails="", **env):
        """What a Python prints that is started with our folder on its path, unless ``env`` gives it another."""
        path = python_path({"PYTHONPATH": str(tmp_path)})
        command = [sys.executable, *options, "-c", code]
        done = subprocess.run(command, env={**path, **env}, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == ((2, fails) if fails else (0, ""))
        return done.stdout.split()

    def test_a_worker_waits_for_horovod_and_imports_nothing_until_then(self, tmp_path):
        code = "import sys; print(type(sys.meta_path[0]).__name__, *sys.modules)"
        finder, *modules = self.run(tmp_path, code, **ENVIRONMENT)
        # Debian's Python has a sitecustomize of its own, which ours runs by means of importlib.
        _, *ordinary = self.run(tmp_path, f"import importlib.machinery, importlib.util; {code}", PYTHONPATH="")
        assert finder == "PatchingFinder"
        assert self.run(tmp_path, "import sys; print(type(sys.meta_path[0]).__name__)") != [finder], "no worker"
        assert set(modules) - set(ordinary) <= {"sitecustomize", "__future__"}

    def test_a_child_of_a_worker_has_a_horovod_of_its_own(self, tmp_path):
        code = "import sys; print(*(sys.meta_path[0].find_spec(name, None) is None for name in ('horovod', 'horovod._keras')))"
        assert self.run(tmp_path, code, **{**ENVIRONMENT, CONNECTED: ENVIRONMENT[MASTER]}) == ["True", "True"]

    def test_another_sitecustomize_runs_as_it_would_have(self, tmp_path):
        (tmp_path / "sitecustomize.py").write_text("import sys; sys.seen = __file__")
        code = "import sys, sitecustomize; print(sys.seen, sitecustomize.__file__, type(sys.meta_path[0]).__name__)"
        theirs = str(tmp_path / "sitecustomize.py")
        assert self.run(tmp_path, code, **ENVIRONMENT) == [theirs, theirs, "PatchingFinder"]

    def test_a_mere_folder_named_triton_is_imported_as_ever(self, tmp_path):
        """Such as the model repository of an inference server; PyTorch imports it, and goes on if it lacks something."""
        (tmp_path / "triton").mkdir()
        code = "import sitecustomize, triton; print(triton.__path__[0])"
        assert self.run(tmp_path, code, "-S", **ENVIRONMENT) == [str(tmp_path / "triton")]

    def test_horovod_is_patched_as_it_is_imported_and_looks_as_ever(self, tmp_path):
        folder = tmp_path / "horovod" / "common"
        folder.mkdir(parents=True)
        for package in (folder, folder.parent):
            (package / "__init__.py").touch()
        (folder / "basics.py").write_text(
            "class HorovodBasics:\n    def init(self): pass\n    def shutdown(self): pass\n"
        )
        code = (
            "import inspect, horovod.common.basics as basics\n"
            "print(basics.HorovodBasics.init.__wrapped__.__name__, type(basics.__spec__.loader).__name__)\n"
            "assert inspect.getsource(basics).startswith('class')"
        )
        root = str(Path(__file__).resolve().parents[2])
        env = {**ENVIRONMENT, "PYTHONPATH": f"{STARTUP_FOLDER}:{tmp_path}:{root}"}
        assert self.run(tmp_path, code, **env) == ["init", "SourceFileLoader"]


class Thread:
    """Is always found in one and the same call of a step, or after `go_on` in another one."""

    def __init__(self, monkeypatch):
        self.cpu = self.now = 0.0
        self.steps = []
        self.go_on()
        monkeypatch.setattr(stillness, "current_frames", lambda: {threading.get_ident(): self.steps[-1].gi_frame})
        self.watched = Stillness(lambda: self.now, lambda: self.cpu)

    def go_on(self):
        self.steps = [*self.steps, (each for each in "x")]
        next(self.steps[-1])

    def moved(self, seconds=1.0, cpu=0.0):
        self.now, self.cpu = self.now + seconds, self.cpu + cpu
        return self.watched.moved()


@pytest.fixture
def thread(monkeypatch):
    made = Thread(monkeypatch)
    made.moved()  # the first look
    return made


class TestStillness:
    def test_a_thread_that_does_not_leave_a_call_stands_still(self, thread):
        assert [thread.moved() for _ in range(3)] == [False] * 3

    def test_one_that_is_found_in_another_call_moves(self, thread):
        thread.go_on()
        assert [thread.moved() for _ in range(2)] == [True, False]

    def test_one_that_computes_within_one_call_moves(self, thread):
        thread.moved(WINDOW_SECONDS)
        most = BUSY * WINDOW_SECONDS
        assert thread.moved(WINDOW_SECONDS, cpu=most + 0.1)
        assert thread.moved(), "it did lately"
        assert not thread.moved(WINDOW_SECONDS, cpu=most - 0.1), "waiting costs something, too"
        assert not thread.moved(seconds=0.1, cpu=0.1), "a peak is not much"


def test_of_a_thread_that_has_ended_nothing_is_known():
    watched = []
    thread = threading.Thread(target=lambda: watched.append(Stillness()))
    thread.start()
    thread.join()
    assert [watched[0].moved() for _ in range(3)] == [True] * 3
