"""Scripts written for Horovod: how we get in."""

import subprocess
import sys
from pathlib import Path

from elasticdl.common.credentials import CONNECTED, MASTER, Token, WorkerEnvironment
from elasticdl.common.front_ends import STARTUP_FOLDER, python_path

ENVIRONMENT = WorkerEnvironment("127.0.0.1:1", Token("token"), 0, "job.json").to_env()


def run(tmp_path, code, *options, **env):
    """What a Python prints that is started with our folder on its path, unless ``env`` gives it another."""
    path = python_path({"PYTHONPATH": str(tmp_path)})
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, env={**path, **env}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_a_worker_waits_for_horovod_and_imports_nothing_until_then(tmp_path):
    code = "import sys; print(type(sys.meta_path[0]).__name__, *sys.modules)"
    finder, *modules = run(tmp_path, code, **ENVIRONMENT)
    # Debian's Python has a sitecustomize of its own, which ours runs by means of importlib.
    _, *ordinary = run(tmp_path, f"import importlib.machinery, importlib.util; {code}", PYTHONPATH="")
    assert finder == "PatchingFinder"
    assert run(tmp_path, "import sys; print(type(sys.meta_path[0]).__name__)") != [finder], "no worker"
    assert set(modules) - set(ordinary) <= {"sitecustomize", "__future__"}


def test_a_child_of_a_worker_has_a_horovod_of_its_own(tmp_path):
    code = (
        "import sys; print(*(sys.meta_path[0].find_spec(name, None) is None for name in ('horovod', 'horovod._keras')))"
    )
    assert run(tmp_path, code, **{**ENVIRONMENT, CONNECTED: ENVIRONMENT[MASTER]}) == ["True", "True"]


def test_another_sitecustomize_runs_as_it_would_have(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.seen = __file__")
    code = "import sys, sitecustomize; print(sys.seen, sitecustomize.__file__, type(sys.meta_path[0]).__name__)"
    theirs = str(tmp_path / "sitecustomize.py")
    assert run(tmp_path, code, **ENVIRONMENT) == [theirs, theirs, "PatchingFinder"]


def test_horovod_is_patched_as_it_is_imported_and_looks_as_ever(tmp_path):
    folder = tmp_path / "horovod" / "common"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder / "basics.py").write_text("class HorovodBasics:\n    def init(self): pass\n    def shutdown(self): pass\n")
    code = (
        "import inspect, horovod.common.basics as basics\n"
        "print(basics.HorovodBasics.init.__wrapped__.__name__, type(basics.__spec__.loader).__name__)\n"
        "assert inspect.getsource(basics).startswith('class')"
    )
    root = str(Path(__file__).resolve().parents[2])
    env = {**ENVIRONMENT, "PYTHONPATH": f"{STARTUP_FOLDER}:{tmp_path}:{root}"}
    assert run(tmp_path, code, **env) == ["init", "SourceFileLoader"]
