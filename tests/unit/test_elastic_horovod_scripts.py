"""Scripts written for Horovod's elastic mode: how we get in, and what our functions do in the place of Horovod's."""

import dis
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from session_kit import FakeMaster

from elasticdl.common.credentials import Token
from elasticdl.common.environment import CONNECTED, MASTER, WorkerEnvironment
from elasticdl.common.errors import JobFailedError, UserError
from elasticdl.common.startup import STARTUP_FOLDER, python_path
from elasticdl.elastic.core import messages as m
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.progress import Progress
from elasticdl.elastic.core.worker import MAX_FRUITLESS_WORLDS, WorkerCore
from elasticdl.elastic.core.world import Member, World
from elasticdl.elastic.horovod_scripts.mends import (
    mend_gradient_tape,
    mend_keras_state,
    mend_optimizer_state,
    mend_tensorflow_state,
    refuse_optimizer,
    restore_lr,
)
from elasticdl.elastic.horovod_scripts.patches import Patches
from elasticdl.elastic.horovod_scripts.script_worker import ScriptWorker, is_failed_collective, warm_up
from elasticdl.elastic.horovod_scripts.stillness import BUSY, WINDOW_SECONDS, Stillness

elastic_source = pytest.importorskip("horovod.common.elastic").__file__
ENVIRONMENT = WorkerEnvironment("127.0.0.1:1", Token("token"), 0, "job.json").to_env()


class TestStartup:
    def run(self, tmp_path, code, **env):
        """What a Python prints that is started with our folder on its path, unless ``env`` gives it another."""
        path = python_path({"PYTHONPATH": str(tmp_path)})
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env={**path, **env}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    def test_its_folder_comes_first_and_nothing_else_changes(self):
        assert python_path({}) == {"PYTHONPATH": str(STARTUP_FOLDER)}
        assert python_path({"PYTHONPATH": ""}) == {"PYTHONPATH": str(STARTUP_FOLDER)}, "no entry for the current folder"
        assert python_path({"PYTHONPATH": "/a:/b"}) == {"PYTHONPATH": f"{STARTUP_FOLDER}:/a:/b"}

    def test_a_worker_waits_for_horovod_and_imports_nothing_until_then(self, tmp_path):
        code = "import sys; print(type(sys.meta_path[0]).__name__, *sys.modules)"
        finder, *modules = self.run(tmp_path, code, **ENVIRONMENT)
        # Debian's Python has a sitecustomize of its own, which ours runs by means of importlib.
        _, *ordinary = self.run(tmp_path, f"import importlib.machinery, importlib.util; {code}", PYTHONPATH="")
        assert finder == "PatchingFinder"
        assert set(modules) - set(ordinary) <= {"sitecustomize", "__future__"}

    def test_other_processes_are_left_alone(self, tmp_path):
        assert self.run(tmp_path, "import sys; print(type(sys.meta_path[0]).__name__)") != ["PatchingFinder"]

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
        env = {**python_path({"PYTHONPATH": str(tmp_path)}), **ENVIRONMENT}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        told = 'Trainer(strategy="elastic"): `import elasticdl.elastic.lightning` is missing\n'
        assert (done.returncode, done.stderr) == (2, told)

    def test_a_mere_folder_named_triton_is_imported_as_ever(self, tmp_path):
        """Such as the model repository of an inference server; PyTorch imports it, and goes on if it lacks something."""
        (tmp_path / "triton").mkdir()
        code = "import triton; print(triton.__path__[0])"
        command_path = {"PYTHONPATH": f"{STARTUP_FOLDER}:{tmp_path}"}
        done = subprocess.run(
            [sys.executable, "-S", "-c", f"import sitecustomize; {code}"],
            env={**ENVIRONMENT, **command_path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.split() == [str(tmp_path / "triton")], done.stderr

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


class Master(FakeMaster):
    """What it sees of a script: its requests, commits, pauses and last words."""

    @property
    def asked(self):
        return self.of(m.JoinRequest)

    @property
    def steps(self):
        return [report.step for report in self.reports]

    @property
    def pauses(self):
        return self.of(m.Pause)

    @property
    def said(self):
        return [type(message).__name__ for message in self.sent if isinstance(message, m.Finished | m.Failed | m.Pause)]

    @property
    def advanced(self):
        self.session.post(p.Welcomed(0.0))
        self.session.post(p.Trigger.TICK)
        beat = self.of(m.Heartbeat)[-1]
        assert beat.waiting or not beat.progress, "who stands still may be waiting for the others"
        return beat.progress

    def announce(self, world):
        """A change of this world."""
        self.session.post(p.ChangeAnnounced(world.version))


class FakeLink:
    endpoint = SimpleNamespace(interface="lo")
    spec = SimpleNamespace(collective="auto")

    def __init__(self, session):
        self.session = session

    def open(self): ...

    def close(self): ...


class FakeHorovod:
    """One framework's; the next inits fail with these errors."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.initialized = False
        self.inits = 0

    def init(self):
        self.inits += 1
        if self.errors and (error := self.errors.pop(0)):
            raise error
        self.initialized = True

    def shutdown(self):
        self.initialized = False

    def is_initialized(self):
        return self.initialized


def make_world(version, step=0, size=2):
    return World.of(version, tuple(Member(i, "h", step, has_state=step > 0) for i in range(size)), 0)


@pytest.fixture
def make_worker(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for name in ("HOROVOD_ELASTIC", CONNECTED):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    made = []

    def make(*worlds, **env):
        master = Master(*worlds)
        worker = ScriptWorker({**ENVIRONMENT, **env}, lambda environment: FakeLink(master.session))
        made.append(worker)
        return worker, master

    yield make
    for worker in made:  # else its threads would go on
        worker._end_told = True
        worker._close()
    for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
        monkeypatch.delenv(name)


class TestScriptWorker:
    def test_init_enters_the_next_world_and_again_does_nothing(self, make_worker):
        worker, master = make_worker(make_world(1))
        hvd = FakeHorovod()
        assert not worker.takes_part
        assert worker.claim()
        worker.init(hvd)
        worker.init(hvd)
        assert worker.world.version == 1
        assert len(master.asked) == 1
        assert not master.asked[0].has_state
        assert worker.holds(hvd)

    def test_a_world_that_breaks_while_it_forms_is_followed_by_the_next(self, make_worker):
        worker, master = make_worker(make_world(1), make_world(2), make_world(3))
        worker.claim()
        worker.init(FakeHorovod(ValueError("no peer"), RuntimeError("no peer"), None))
        assert worker.world.version == 3
        assert [standing.broken for standing in master.asked] == [False, True, True]

    def test_worlds_that_break_without_a_commit_have_an_end(self, make_worker):
        worker, _ = make_worker(*map(make_world, range(1, 100)))
        worker.claim()
        hvd = FakeHorovod(*[ValueError("no peer")] * 99)
        with pytest.raises(JobFailedError, match="no peer"):
            worker.init(hvd)
        assert hvd.inits == MAX_FRUITLESS_WORLDS

    def test_one_that_is_to_leave_ends_with_status_0(self, make_worker):
        worker, _ = make_worker(p.StopOrdered("scaled down", checkpoint=False))
        worker.claim()
        with pytest.raises(SystemExit) as end:
            worker.init(FakeHorovod())
        assert end.value.code == 0

    def test_variables_that_horovod_cannot_bear_are_refused(self, make_worker, capsys):
        worker, _ = make_worker(HOROVOD_CYCLE_TIME="5")
        with pytest.raises(SystemExit) as end:
            worker.claim()
        assert end.value.code == 2
        assert "HOROVOD_CYCLE_TIME" in capsys.readouterr().err

    def test_who_is_connected_otherwise_or_the_child_of_a_worker_takes_no_part(self, make_worker):
        worker, master = make_worker(make_world(1), **{CONNECTED: ENVIRONMENT[MASTER]})
        assert not worker.claim()
        assert master.asked == []

    def test_it_stands_where_rank_0_stands_and_counts_on_from_there(self, make_worker):
        worker, master = make_worker(make_world(4, step=7), make_world(5, step=8))
        hvd = FakeHorovod()
        worker.claim()
        worker.init(hvd)
        worker.synced()
        worker.committed()
        assert master.steps == [8]
        worker.shutdown()
        worker.init(hvd)
        assert (master.asked[-1].step, master.asked[-1].has_state) == (8, True)

    def test_sigterm_means_to_leave_at_the_next_commit_and_a_fork_dies_of_it_as_ever(self, make_worker):
        worker, _ = make_worker(make_world(1))
        worker.claim()
        with worker.drained_by_sigterm():
            signal.raise_signal(signal.SIGTERM)  # to this thread: another one's would be handled a moment later
            assert worker.leaving
            child = os.fork()
            if child == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def test_a_handler_of_the_scripts_own_is_called_too_and_stays(self, make_worker):
        worker, _ = make_worker()
        worker.claim()
        called = []

        def handler(*_):
            called.append("the script's")

        before = signal.signal(signal.SIGTERM, handler)
        try:
            with worker.drained_by_sigterm():
                signal.raise_signal(signal.SIGTERM)
            assert (called, worker.leaving) == (["the script's"], True)
            assert signal.getsignal(signal.SIGTERM) is handler
        finally:
            signal.signal(signal.SIGTERM, before)

    @pytest.mark.parametrize(("error", "users"), [(KeyError("x"), True), (None, False)])
    def test_what_the_script_does_not_catch_is_told_to_the_master(self, make_worker, error, users, monkeypatch, capsys):
        worker, master = make_worker()
        worker.claim()
        error = error or ValueError("Horovod has not been initialized; use hvd.init().")
        sys.excepthook(type(error), error, None)
        assert master.last_word.users == users
        assert type(error).__name__ in capsys.readouterr().err, "and shown as ever"


class TestEnd:
    """What the master has heard when the process ends: without a word it would take the worker for lost."""

    def test_a_script_that_just_ends_has_finished(self, make_worker):
        worker, master = make_worker(make_world(1))
        worker.claim()
        worker.init(FakeHorovod())
        worker._close()
        assert master.said == ["Finished"]

    def test_it_is_said_once(self, make_worker):
        worker, master = make_worker()
        worker.claim()
        worker.finish()
        worker._close()
        assert master.said == ["Finished"]

    def test_one_that_was_told_to_leave_has_not(self, make_worker):
        worker, master = make_worker(p.StopOrdered("scaled down", checkpoint=False))
        worker.claim()
        with pytest.raises(SystemExit):
            worker.init(FakeHorovod())
        worker._close()
        assert master.said == []

    @pytest.mark.parametrize(("error", "said"), [(KeyError("x"), ["Failed"]), (KeyboardInterrupt(), [])])
    def test_nor_has_one_that_raised(self, make_worker, monkeypatch, error, said):
        monkeypatch.setattr(sys, "excepthook", lambda *_: None)
        worker, master = make_worker()
        worker.claim()
        sys.excepthook(type(error), error, None)
        worker._close()
        assert master.said == said


@pytest.fixture
def script(make_worker, monkeypatch):
    """A script's view: Horovod's own ``State`` and ``run_fn``, patched, in a module of their own, and a worker."""

    def make(*worlds):
        spec = importlib.util.spec_from_file_location("horovod.common.elastic", elastic_source)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        worker, master = make_worker(*worlds)
        patches = Patches()
        patches._worker = worker
        patches.apply(module)
        hvd = FakeHorovod()

        def reset():
            worker.shutdown()
            worker.init(hvd)

        class State(module.ObjectState):
            """Rank 0's own: what is broadcast comes back as it is. ``weight`` is live, as a model's weights are."""

            def __init__(self, **values):
                self.weight = self.saved_weight = 0
                self.failures = {}  # by method: errors that its next calls raise
                super().__init__(lambda value: value, lambda: 0, **values)

            def fail(self, method):
                if self.failures.get(method):
                    raise self.failures[method].pop(0)

            def save(self):
                self.saved_weight = self.weight
                super().save()

            def restore(self):
                self.weight = self.saved_weight
                super().restore()

            def sync(self):
                self.fail("sync")
                super().sync()

            def reset(self):
                self.fail("reset")

        worker.claim()
        worker.init(hvd)
        return SimpleNamespace(
            module=module, master=master, worker=worker, run=lambda f: module.run_fn(f, reset), State=State
        )

    return make


class TestTraining:
    def test_a_failed_collective_goes_back_to_the_commit_and_on_in_the_next_world(self, script):
        job = script(make_world(1), make_world(2, step=1))
        state, seen = job.State(batch=0), []

        @job.run
        def train(state):
            seen.append((job.worker.world.version, state.batch, state.weight))
            state.batch, state.weight = state.batch + 1, state.weight + 10
            if job.worker.world.version == 1:
                state.commit()
                state.batch, state.weight = 99, 99
                raise job.module.HorovodInternalError("a peer is gone")
            return "done"

        assert train(state) == "done"
        assert seen == [(1, 0, 0), (2, 1, 10)]
        assert [standing.broken for standing in job.master.asked] == [False, True]
        assert job.master.said == ["Finished"], "no pause, since the second world made no step"

    def test_failures_while_a_failure_is_being_mended_do_not_end_it(self, script):
        job = script(*(make_world(version) for version in range(1, 5)))
        state = job.State(batch=0)
        state.failures = {
            "reset": [job.module.HorovodInternalError("in reset")],
            "sync": [job.module.HorovodInternalError("at first"), job.module.HorovodInternalError("in sync")],
        }
        assert job.run(lambda state: job.worker.world.version)(state) == 4

    def test_a_newcomer_that_has_not_committed_goes_back_to_what_it_received(self, script):
        job = script(make_world(1), make_world(2))
        state = job.State(batch=0)
        real_sync, weights = state.sync, []

        def sync():
            if job.worker.world.version == 1:
                state.weight = 5  # received from rank 0
            real_sync()

        state.sync = sync

        @job.run
        def train(state):
            weights.append(state.weight)
            state.weight = 6
            if job.worker.world.version == 1:
                raise job.module.HorovodInternalError("a peer is gone")

        train(state)
        assert weights == [5, 5]

    @pytest.mark.parametrize("at", ["commit", "check_host_updates"])
    def test_at_a_change_weights_and_counters_are_of_the_same_moment(self, script, at):
        job = script(make_world(1), make_world(2))
        state, seen = job.State(batch=0), []

        @job.run
        def train(state):
            seen.append((state.batch, state.weight))
            if job.worker.world.version == 1:
                state.commit()
                state.batch, state.weight = 3, 30
                job.master.announce(job.worker.world)
                getattr(state, at)()
                pytest.fail("the change was not noticed")

        train(state)
        assert seen == [(0, 0), (3, 30)]
        assert [standing.broken for standing in job.master.asked] == [False, False]
        assert job.master.steps == [1, 2]

    def test_a_change_that_is_announced_while_a_world_is_entered_is_not_lost(self, script):
        job = script(make_world(1), make_world(2), make_world(3))
        state = job.State(batch=0)
        state.register_reset_callbacks([lambda: job.worker.world.version < 3 and job.master.announce(job.worker.world)])
        job.master.announce(job.worker.world)

        @job.run
        def train(state):
            state.commit()
            return job.worker.world.version

        assert train(state) == 3

    def test_every_change_is_one_that_brings_newcomers_in(self, script):
        job = script(make_world(1))
        state = job.State(batch=0)
        job.master.announce(job.worker.world)
        job.module.notification_manager.register_listener(state)
        with pytest.raises(job.module.HostsUpdatedInterrupt) as change:
            state.commit()
        assert change.value.skip_sync is False

    @pytest.mark.parametrize(
        ("failing", "size", "kind", "torn"), [(False, 3, "grow", 0), (False, 1, "shrink", 0), (True, 1, "failure", 1)]
    )
    @pytest.mark.parametrize("ending", ["commit", "check_host_updates"])
    def test_a_survivor_tells_its_pause_at_the_first_point_of_the_next_world(
        self, script, failing, size, kind, torn, ending
    ):
        job = script(make_world(1), make_world(2, step=2, size=size))

        @job.run
        def train(state):
            if job.worker.world.version == 1:
                state.commit()
                assert job.master.pauses == [], "a newcomer did not pause"
                if failing:
                    raise job.module.HorovodInternalError("a peer is gone")
                job.master.announce(job.worker.world)
                state.commit()
            getattr(state, ending)()
            state.commit()

        train(job.State(batch=0))
        (pause,) = job.master.pauses
        assert (pause.world_version, pause.kind, pause.steps_torn) == (2, kind, torn)

    def test_an_error_of_the_scripts_own_passes(self, script):
        job = script(make_world(1))

        def train(state):
            raise KeyError("x")

        with pytest.raises(KeyError):
            job.run(train)(job.State(batch=0))
        assert job.master.said == []

    def test_without_a_part_in_the_job_all_is_horovods_own(self, script, monkeypatch):
        job = script(make_world(1))
        monkeypatch.setattr(job.worker, "_pid", 0)
        monkeypatch.setattr(job.module.notification_manager, "init", lambda: None)
        state = job.State(batch=0)
        assert job.run(lambda state: state.commit() or "done")(state) == "done"
        assert job.master.said == job.master.steps == []


class TestPauses:
    def core(self):
        core = WorkerCore(3)
        core.step(p.Trigger.READY, 0.0)
        return core

    def enter(self, core, now, version, size=2, connecting=0, syncing=0):
        core.step(p.WorldPublished(make_world(version, size=size)), now)
        core.step(p.Trigger.CONNECTED, now + connecting)
        core.synced(Progress())
        core.step(p.Trigger.SYNCED, now + connecting + syncing)

    def test_each_part_is_what_it_took_and_the_ordinary_way_to_a_point_is_taken_off(self):
        core = self.core()
        self.enter(core, 0, 1)
        for now in (10, 20, 30):
            assert core.pass_by(now) is None
        core.step(p.WorldLeft("committed"), 31)
        core.step(p.Trigger.CLOSED, 33)
        self.enter(core, 36, 2, size=3, connecting=4, syncing=5)
        pause = core.pass_by(61)
        assert core.pass_by(71) is None
        parts = (pause.notice, pause.drain, pause.rendezvous, pause.init, pause.sync, pause.first_step)
        assert (parts, pause.total, pause.kind) == ((1, 2, 3, 4, 5, 6), 21, "grow")

    def test_a_first_point_that_comes_early_does_not_make_up_for_the_pause(self):
        core = self.core()
        self.enter(core, 0, 1)
        for now in (10, 20, 30):
            core.pass_by(now)
        core.step(p.WorldLeft("committed"), 30)
        core.step(p.Trigger.CLOSED, 30)
        self.enter(core, 30, 2)
        pause = core.pass_by(31)
        assert pause.total == 0


class TestProgress:
    def test_one_that_moves_is_never_stuck_and_one_in_a_broken_world_not_excused(self, make_worker, monkeypatch):
        worker, master = make_worker(make_world(1))
        worker.claim()
        worker.init(FakeHorovod())
        moved = [True, False]
        monkeypatch.setattr(Stillness, "moved", lambda stillness: moved.pop(0))
        worker.tick()
        assert master.advanced == 1
        worker.tick()
        assert master.advanced == 1
        worker.failed(ValueError("no peer"))
        worker.tick()
        assert (master.advanced, moved) == (1, []), "it is not even asked"

    def test_points_between_two_steps_count(self, script):
        job = script(make_world(1))
        before = job.master.advanced
        job.run(lambda state: (state.commit(), state.check_host_updates()))(job.State(batch=0))
        assert job.master.advanced == before + 2

    def test_its_thread_looks_by_itself_and_ends_with_the_session(self, make_worker, monkeypatch):
        looked = threading.Event()
        monkeypatch.setattr("elasticdl.elastic.horovod_scripts.script_worker.TICK_SECONDS", 0.01)
        monkeypatch.setattr(Stillness, "moved", lambda stillness: looked.set() or False)
        worker, _ = make_worker(make_world(1))
        threads = set(threading.enumerate())
        worker.claim()
        (thread,) = [each for each in set(threading.enumerate()) - threads if each.name == "elasticdl-progress"]
        assert looked.wait(10)
        worker._close()
        thread.join(10)
        assert not thread.is_alive()


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

    def test_of_a_thread_that_has_ended_nothing_is_known(self):
        watched = []
        thread = threading.Thread(target=lambda: watched.append(Stillness()))
        thread.start()
        thread.join()
        assert [watched[0].moved() for _ in range(3)] == [True] * 3


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


class Variable:
    """Of TensorFlow: ``value`` is a function."""

    def __init__(self, number):
        self.number = number

    def value(self):
        return self.number

    def assign(self, number):
        self.number = number


class KerasVariable:
    def __init__(self, number):
        self.value = Variable(number)


def test_the_gradient_tape_takes_variables_of_keras_3_and_all_that_it_took():
    taken = []
    tape_class = type("_DistributedGradientTape", (), {"gradient": lambda tape, target, sources: taken.extend(sources)})
    mend_gradient_tape(SimpleNamespace(_DistributedGradientTape=tape_class))
    wrapped, own, tensor = KerasVariable(1), Variable(2), object()
    tape_class().gradient("loss", [wrapped, own, tensor])
    assert taken == [wrapped.value, own, tensor]


def test_an_optimizer_that_would_not_average_is_refused():
    module = SimpleNamespace(create_distributed_optimizer=lambda keras, optimizer: "distributed")
    refuse_optimizer(module)
    assert module.create_distributed_optimizer(None, SimpleNamespace(variables=list)) == "distributed"
    with pytest.raises(UserError, match="DistributedGradientTape"):
        module.create_distributed_optimizer(None, SimpleNamespace(variables=[]))


def test_the_rate_of_an_optimizer_of_keras_3_goes_by_its_old_name_too():
    import keras

    optimizer = keras.optimizers.SGD(0.5)
    restore_lr(keras)
    try:
        optimizer.lr.assign(0.25)
        assert float(optimizer.lr) == float(optimizer.learning_rate) == 0.25
        optimizer.lr = 0.125
        assert float(optimizer.learning_rate) == 0.125
    finally:
        del keras.optimizers.Optimizer.lr


class TestKerasState:
    def make(self, optimizer):
        class State:
            def __init__(self):
                self.model = SimpleNamespace(weights=[KerasVariable(1)], trainable_variables=["kernel"])
                self.optimizer = optimizer

            def _save_model(self):
                self.saved_by = "horovod"

            def _load_model(self): ...

        sent = []
        module = SimpleNamespace(
            TensorFlowKerasState=State,
            _broadcast_model=lambda *_: sent.append("horovod"),
            broadcast_variables=lambda variables, root_rank: sent.append([v.number for v in variables]),
            tf=SimpleNamespace(identity=lambda variable: variable.number),
        )
        mend_keras_state(module)
        return module, State(), sent

    def test_an_optimizer_of_keras_3_is_built_saved_restored_and_sent(self):
        built = []
        optimizer = SimpleNamespace(built=False, variables=[KerasVariable(2)], build=built.append)
        module, state, sent = self.make(optimizer)
        state._save_model()
        assert built == [["kernel"]], "else a newcomer has other variables than the rest"
        state.model.weights[0].value.assign(10)
        optimizer.variables[0].value.assign(20)
        module._broadcast_model(state.model, state.optimizer, None)
        state._load_model()
        module._broadcast_model(state.model, state.optimizer, None)
        assert sent == [[10, 20], [1, 2]]

    def test_an_older_one_is_left_to_horovod(self):
        module, state, sent = self.make(SimpleNamespace(variables=list))
        state._save_model()
        module._broadcast_model(state.model, state.optimizer, None)
        assert (state.saved_by, sent) == ("horovod", ["horovod"])


def test_variables_without_a_session_are_sent_at_each_sync_and_not_when_the_state_is_made():
    sent = []

    class ObjectState:
        def __init__(self, bcast_object, get_rank, **values):
            vars(self).update(values)

    class TensorFlowState(ObjectState):
        def __init__(self, *_, **__):
            sent.append("when made")

        def _save_model(self):
            self.saved = [self._eval_fn(variable) for variable in self.variables]

        def _to_numpy(self, variable):
            return variable.number

        def _assign_var(self): ...

        def sync(self):
            self._save_model()

    module = SimpleNamespace(
        TensorFlowState=TensorFlowState,
        ObjectState=ObjectState,
        broadcast_object=None,
        rank=None,
        _executing_eagerly=lambda: True,
        broadcast_variables=lambda variables, root_rank: sent.append([v.number for v in variables]),
    )
    mend_tensorflow_state(module)
    state = TensorFlowState([KerasVariable(1), Variable(2)], batch=3)
    assert (sent, state.batch, state.saved) == ([], 3, [1, 2])
    state.variables[1].assign(4)
    state.sync()
    assert (sent, state.saved) == ([[1, 4]], [1, 4])


class TestOptimizers:
    """What a newcomer is sent of rank 0's optimizer; Horovod's own handlers, and a wire of lists."""

    def handlers(self, monkeypatch, takes_part=True):
        state = pytest.importorskip("horovod.torch.elastic.state")
        wire, registry = [], []

        def broadcast_object(value, root_rank, name=None):
            wire.extend([value] if state.rank() == root_rank else [])
            return wire.pop(0) if state.rank() != root_rank else value

        def broadcast_parameters(named, root_rank):
            for _, tensor in named:
                if state.rank() == root_rank:
                    wire.append(tensor.clone())
                else:
                    tensor.copy_(wire.pop(0))

        for function in (broadcast_object, broadcast_parameters):
            monkeypatch.setattr(state, function.__name__, function)
        monkeypatch.setattr(
            state, "broadcast_optimizer_state", lambda optimizer, root_rank: wire.append("Horovod's own")
        )
        monkeypatch.setattr(state, "set_handler_registry", registry.extend)
        mend_optimizer_state(state, lambda: takes_part)
        return state, next(its for kind, its in registry if kind is state.torch.optim.Optimizer), wire

    def optimizer(self, torch, name, rate, steps):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.ones(3))
        options = {"SGD": {"weight_decay": 0.1}, "AdamW": {"weight_decay": 0.1}, "momentum": {"momentum": 0.9}}[name]
        made = getattr(torch.optim, "AdamW" if name == "AdamW" else "SGD")([parameter], lr=rate, **options)
        for _ in range(steps):
            parameter.grad = torch.ones(3)
            made.step()
        return made

    @pytest.mark.parametrize("name", ["SGD", "momentum", "AdamW"])
    def test_a_newcomer_has_the_whole_optimizer_and_its_weights_stay(self, monkeypatch, name):
        state, handler, wire = self.handlers(monkeypatch)
        root, newcomer = self.optimizer(state.torch, name, 0.1, 2), self.optimizer(state.torch, name, 0.3, 0)
        (group,) = newcomer.param_groups  # which a scheduler may hold
        for rank, optimizer in enumerate((root, newcomer)):
            monkeypatch.setattr(state, "rank", lambda rank=rank: rank)
            handler(optimizer).sync()
        assert wire == []
        assert newcomer.param_groups == [group]
        assert newcomer.param_groups[0] is group
        assert group["lr"] == 0.1
        assert state.torch.equal(newcomer.param_groups[0]["params"][0], state.torch.ones(3))
        (theirs,), (ours,) = (
            root.state_dict()["state"].values() or [{}],
            newcomer.state_dict()["state"].values() or [{}],
        )
        state.torch.testing.assert_close(ours, theirs, rtol=0, atol=0)

    def test_a_step_that_is_torn_leaves_the_groups_to_those_who_hold_them(self, monkeypatch):
        state, handler, _ = self.handlers(monkeypatch)
        optimizer = self.optimizer(state.torch, "AdamW", 0.1, 1)
        (group,) = optimizer.param_groups
        kept = handler(optimizer)
        group["lr"] = 0.7
        kept.restore()
        assert optimizer.param_groups[0] is group
        assert group["lr"] == 0.1

    def test_a_script_that_takes_no_part_has_horovods_own(self, monkeypatch):
        state, handler, wire = self.handlers(monkeypatch, takes_part=False)
        handler(self.optimizer(state.torch, "SGD", 0.1, 0)).sync()
        assert wire == ["Horovod's own"]
