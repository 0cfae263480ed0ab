"""Scripts written for Horovod: how we get in, whether they move, and which of their errors are collectives that failed."""

import dis
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from elasticdl.common.credentials import Token
from elasticdl.common.environment import CONNECTED, MASTER, WorkerEnvironment
from elasticdl.common.startup import STARTUP_FOLDER, python_path
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.progress import Progress
from elasticdl.elastic.core.worker import WorkerCore
from elasticdl.elastic.core.world import Member, World
from elasticdl.elastic.horovod_scripts.script_worker import is_failed_collective, warm_up
from elasticdl.elastic.horovod_scripts.stillness import BUSY, WINDOW_SECONDS, Stillness

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

    def test_a_package_of_the_same_name_beside_the_script_is_passed_over(self, tmp_path):
        (tmp_path / "elasticdl" / "python").mkdir(parents=True)  # as in a checkout of the older ElasticDL
        (tmp_path / "elasticdl" / "__init__.py").touch()
        code = "import elasticdl, elasticdl.elastic; print(elasticdl.__file__)"
        ours = str(STARTUP_FOLDER.parents[2] / "__init__.py")
        for env in (ENVIRONMENT, {**ENVIRONMENT, CONNECTED: ENVIRONMENT[MASTER]}):
            assert self.run(tmp_path, code, **env) == [ours]

    def test_a_strategy_that_was_not_imported_is_told_of_in_one_line(self, tmp_path):
        """Lightning is made up here: it takes seconds to import."""
        folder = tmp_path / "lightning" / "pytorch"
        folder.mkdir(parents=True)
        for package in (folder, folder.parent):
            (package / "__init__.py").touch()
        (folder / "strategies.py").write_text(
            "class StrategyRegistry(dict):\n    def register(self, name, make, **_): self[name] = make\n"
            "StrategyRegistry = StrategyRegistry()\n"
        )
        code = "from lightning.pytorch.strategies import StrategyRegistry as known; known['elastic'](accelerator='cpu')"
        told = 'Trainer(strategy="elastic"): `import elasticdl.elastic.lightning` is missing\n'
        self.run(tmp_path, code, fails=told, **ENVIRONMENT)

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


class Steps(threading.Thread):
    """Is found in one and the same call whenever somebody looks: in each step, until it is let go on to the next."""

    def __init__(self):
        super().__init__(daemon=True)
        self.watched = None
        self.go_on = threading.Lock()
        self.go_on.acquire()
        self.ready = threading.Event()
        self.ended = False
        self.cpu = self.now = 0.0

    def run(self):
        self.watched = Stillness(lambda: self.now, lambda: self.cpu)
        self.ready.set()
        while not self.ended:
            self.step()
            self.ready.set()

    def step(self):
        self.go_on.acquire()

    def stands(self):
        """Wait until it is in the call."""
        assert self.ready.wait(10)
        self.ready.clear()
        code = Steps.step.__code__
        call = max(each.offset for each in dis.get_instructions(code) if each.opname == "CALL")
        while True:
            frame = sys._current_frames()[self.ident]
            if (frame.f_code, frame.f_lasti) == (code, call):
                return

    def moved(self, seconds=1.0, cpu=0.0):
        self.now, self.cpu = self.now + seconds, self.cpu + cpu
        return self.watched.moved()


@pytest.fixture
def steps():
    thread = Steps()
    thread.start()
    thread.stands()
    thread.moved()  # the first look
    yield thread
    thread.ended = True
    thread.go_on.release()
    thread.join(10)
    assert not thread.is_alive()


class TestStillness:
    def test_a_thread_that_does_not_leave_a_call_stands_still(self, steps):
        steps.moved()  # seen there for the second time
        assert [steps.moved() for _ in range(3)] == [False] * 3

    def test_one_that_is_always_found_in_the_same_call_of_another_step_moves(self, steps):
        for _ in range(20):  # frames of steps often lie where the last one lay
            steps.moved()
            steps.go_on.release()
            steps.stands()
            assert steps.moved()

    def test_one_that_computes_within_one_call_moves(self, steps):
        steps.moved(WINDOW_SECONDS)
        most = BUSY * WINDOW_SECONDS
        assert steps.moved(WINDOW_SECONDS, cpu=most + 0.1)
        assert steps.moved(), "it did lately"
        assert not steps.moved(WINDOW_SECONDS, cpu=most - 0.1), "waiting costs something, too"
        assert not steps.moved(seconds=0.1, cpu=0.1), "a peak is not much"


@pytest.mark.parametrize(("imported", "made"), [(("horovod.torch", "torch"), 1), (("torch",), 0), ((), 0)])
def test_the_first_optimizer_of_pytorch_is_made_before_others_wait_for_it(imported, made):
    optimizers = []
    torch = SimpleNamespace(
        optim=SimpleNamespace(SGD=lambda parameters, lr: optimizers.append(parameters)),
        zeros=lambda size, requires_grad: "parameter",
    )
    warm_up(dict.fromkeys(imported, torch))
    assert len(optimizers) == made


class UnknownError(Exception):
    """As TensorFlow's."""


UnknownError.__module__ = "tensorflow.python.framework.errors_impl"


def chained():
    error = RuntimeError("while fitting")
    error.__cause__ = ValueError("Horovod has not been initialized; use hvd.init().")
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (type("HorovodInternalError", (RuntimeError,), {"__module__": "horovod.common.exceptions"})("x"), True),
        (ValueError("Horovod has not been initialized; use hvd.init()."), True),
        (UnknownError("{{node HorovodAllreduce_0}} Connection closed by peer"), True),
        (chained(), True),
        (UnknownError("out of memory"), False),
        (ValueError("shapes don't match"), False),
        (RuntimeError("Horovod"), False),
    ],
)
def test_a_failed_collective_is_known_by_its_cause(error, expected):
    assert is_failed_collective(error) is expected


def test_of_a_thread_that_has_ended_nothing_is_known():
    watched = []
    thread = threading.Thread(target=lambda: watched.append(Stillness()))
    thread.start()
    thread.join()
    assert [watched[0].moved() for _ in range(3)] == [True] * 3


def entered(core, now, version, size=2, connecting=0, syncing=0):
    members = tuple(Member(each, "h", 0, False) for each in range(size))
    core.step(p.WorldPublished(World.of(version, members, 0)), now)
    core.step(p.Trigger.CONNECTED, now + connecting)
    core.synced(Progress())
    core.step(p.Trigger.SYNCED, now + connecting + syncing)


def test_each_part_of_a_pause_is_what_it_took_and_the_ordinary_way_to_a_point_is_taken_off():
    core = WorkerCore(3)
    core.step(p.Trigger.READY, 0.0)
    entered(core, 0, 1)
    for now in (10, 20, 30):
        assert core.pass_by(now) is None
    core.step(p.WorldLeft("committed"), 31)
    core.step(p.Trigger.CLOSED, 33)
    entered(core, 36, 2, size=3, connecting=4, syncing=5)
    pause = core.pass_by(61)
    assert core.pass_by(71) is None
    parts = (pause.notice, pause.drain, pause.rendezvous, pause.init, pause.sync, pause.first_step)
    assert (parts, pause.total, pause.kind) == ((1, 2, 3, 4, 5, 6), 21, "grow")
