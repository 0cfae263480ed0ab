"""Scripts written for Horovod's elastic mode: what our functions do in the place of Horovod's."""

import importlib.util
import os
import signal
import sys
import threading
from types import SimpleNamespace

import pytest
from elastic_kit import in_threads
from session_kit import FakeMaster

from elasticdl.common.credentials import CONNECTED, MASTER, Token, WorkerEnvironment
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.protocol import Member, World
from elasticdl.elastic.horovod_scripts import script_worker as stillness
from elasticdl.elastic.horovod_scripts.patches import Patches
from elasticdl.elastic.horovod_scripts.script_worker import BUSY, WINDOW_SECONDS, ScriptWorker, Stillness
from elasticdl.job import messages as m

elastic_source = pytest.importorskip("horovod.common.elastic").__file__


ENVIRONMENT = WorkerEnvironment("127.0.0.1:1", Token("token"), 0, "job.json").to_env()


class ScriptsMaster(FakeMaster):
    """What it sees of a script: its requests, commits, pauses and last words."""

    @property
    def asked(self):
        return self.of(m.Ask)

    @property
    def steps(self):
        return [report.step for report in self.reports]

    @property
    def said(self):
        """Last words."""
        return [type(message).__name__ for message in self.sent if isinstance(message, m.Finished | m.Failed)]

    @property
    def pauses(self):
        return [notice.fields for notice in self.of(m.Notice) if notice.event == "pause"]

    @property
    def advanced(self):
        self.session.post(p.Welcomed(0.0))
        self.session.post(p.Trigger.TICK)
        beat = self.of(m.Heartbeat)[-1]
        assert beat.waiting or not beat.progress, "who stands still may be waiting for the others"
        return beat.progress

    def announce(self, world):
        """A change of this world."""
        self.session.post(p.Ordered(m.Change(world.version, "")))


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

    def init(self):
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
        master = ScriptsMaster(*worlds)
        worker = ScriptWorker({**ENVIRONMENT, **env}, lambda environment: FakeLink(master.session))
        made.append(worker)
        return worker, master

    yield make
    for worker in made:  # else its threads would go on
        worker._end_told = True
        worker._close()
    for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
        monkeypatch.delenv(name)


def raised_from(cause):
    error = RuntimeError("while fitting")
    error.__cause__ = cause
    return error


def test_init_enters_the_next_world_that_does_not_break_and_again_does_nothing(make_worker):
    worker, master = make_worker(make_world(1), make_world(2), make_world(3))
    hvd = FakeHorovod(ValueError("no peer"), RuntimeError("no peer"), None)
    assert not worker.takes_part
    assert worker.claim()
    worker.init(hvd)
    worker.init(hvd)
    assert worker.world.version == 3
    assert [(asked.has_state, asked.broken) for asked in master.asked] == [(False, False), (False, True), (False, True)]
    assert worker.holds(hvd)
    worker._close()
    assert master.said == ["Finished"], "a script that just ends"


def test_variables_that_horovod_cannot_bear_are_refused(make_worker, capsys):
    worker, _ = make_worker(HOROVOD_CYCLE_TIME="5")
    with pytest.raises(SystemExit) as end:
        worker.claim()
    assert end.value.code == 2
    assert "HOROVOD_CYCLE_TIME" in capsys.readouterr().err


def test_who_is_connected_otherwise_or_the_child_of_a_worker_takes_no_part(make_worker):
    worker, master = make_worker(make_world(1), **{CONNECTED: ENVIRONMENT[MASTER]})
    assert not worker.claim()
    assert master.asked == []


def test_sigterm_means_to_leave_at_the_next_commit_and_a_fork_dies_of_it_as_ever(make_worker):
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


@pytest.mark.parametrize(
    ("error", "users"),
    [
        (KeyError("x"), [True]),
        (raised_from(ValueError("Horovod has not been initialized; use hvd.init().")), [False]),
        (KeyboardInterrupt(), []),
    ],
)
def test_what_the_script_does_not_catch_is_told_to_the_master(make_worker, error, users, capsys):
    worker, master = make_worker()
    worker.claim()
    sys.excepthook(type(error), error, None)
    assert type(error).__name__ in capsys.readouterr().err, "and shown as ever"
    worker._close()
    assert [failed.users for failed in master.of(m.Failed)] == users
    assert master.said == ["Failed"] * len(users), "it has not finished"


def test_one_that_was_told_to_leave_ends_with_status_0_and_has_not_finished(make_worker):
    worker, master = make_worker(p.Ordered(m.StopWork("scaled down", checkpoint=False)))
    worker.claim()
    with pytest.raises(SystemExit) as end:
        worker.init(FakeHorovod())
    worker._close()
    assert (end.value.code, master.said) == (0, [])


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
                super().__init__(lambda value: value, lambda: 0, **values)

            def save(self):
                self.saved_weight = self.weight
                super().save()

            def restore(self):
                self.weight = self.saved_weight
                super().restore()

            def reset(self): ...

        worker.claim()
        worker.init(hvd)
        return SimpleNamespace(
            module=module, master=master, worker=worker, run=lambda f: module.run_fn(f, reset), State=State
        )

    return make


# What a script does in its first world, from a newcomer's state in the second row on; with what batch and weight it begins
# in each world, whether it says that the first one broke, the steps that are told, and the pause: its kind and steps torn.
STORIES = """
batch 1; commit; batch 99; fail            | 0 0, 1 10  | yes | 1   | failure 1
receive 5; batch 3; fail                   | 0 5, 0 5   | yes |     |
commit; batch 3; change; commit            | 0 0, 3 30  | no  | 1 2 | shrink 0
commit; batch 3; change; check_host_updates| 0 0, 3 30  | no  | 1 2 | shrink 0
commit; grow; batch 3; change; commit      | 0 0, 3 30  | no  | 1 2 | grow 0
"""


@pytest.mark.parametrize("story", STORIES.strip().splitlines())
def test_what_becomes_of_a_script_in_its_second_world(script, story):
    acts, begins, broken, steps, pause = (part.strip() for part in story.split("|"))
    job = script(make_world(1), make_world(2, step=2, size=3 if "grow" in acts else 1))
    state, seen, acts = job.State(batch=0), [], acts.split("; ")
    if acts[0].startswith("receive"):
        sync = state.sync

        def received():
            if job.worker.world.version == 1:
                state.weight = int(acts[0].split()[1])
            sync()

        state.sync = received

    def act(what, number=0):
        if what == "batch":
            state.batch, state.weight = int(number), 10 * int(number)
        elif what == "fail":
            raise job.module.HorovodInternalError("a peer is gone")
        elif what == "change":
            job.master.announce(job.worker.world)
        elif what in ("commit", "check_host_updates"):
            getattr(state, what)()

    @job.run
    def train(state):
        seen.append(f"{state.batch} {state.weight}")
        if job.worker.world.version == 1:
            for each in acts:
                act(*each.split())
            pytest.fail("the change was not noticed")
        told = " ".join(map(str, job.master.steps))
        assert (told, job.master.pauses) == (steps, []), "no pause, since the second world made no step"
        state.check_host_updates()
        state.commit()
        return "done"

    assert train(state) == "done"
    assert ", ".join(seen) == begins
    assert [asked.broken for asked in job.master.asked] == [False, broken == "yes"]
    assert job.master.said == ["Finished"]
    told = [(each["world"], f"{each['kind']} {each['steps_torn']}") for each in job.master.pauses]
    assert told == ([(2, pause)] if pause else []), "who has made no step did not pause"
    assert job.master.steps[-1] == 3, "it stands where rank 0 stands, and counts on from there"


def test_failures_while_a_failure_is_being_mended_do_not_end_it(script):
    job = script(*(make_world(version) for version in range(1, 5)))
    state = job.State(batch=0)

    def fails(method, *reasons):
        real, left = getattr(state, method), list(reasons)

        def fail():
            if left:
                raise job.module.HorovodInternalError(left.pop())
            real()

        setattr(state, method, fail)

    fails("reset", "in reset")
    fails("sync", "at first", "in sync")
    assert job.run(lambda state: job.worker.world.version)(state) == 4


def test_an_error_of_the_scripts_own_passes(script):
    job = script(make_world(1))
    with pytest.raises(ZeroDivisionError):
        job.run(lambda state: 1 / 0)(job.State(batch=0))
    assert job.master.said == []


def test_without_a_part_in_the_job_all_is_horovods_own(script, monkeypatch):
    job = script(make_world(1))
    monkeypatch.setattr(job.worker, "_pid", 0)
    monkeypatch.setattr(job.module.notification_manager, "init", lambda: None)
    state = job.State(batch=0)
    assert job.run(lambda state: state.commit() or "done")(state) == "done"
    assert job.master.said == job.master.steps == []


def test_one_that_moves_is_never_stuck_and_one_in_a_broken_world_not_excused(make_worker, monkeypatch):
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


def test_a_thread_moves_that_is_found_elsewhere_or_computes(monkeypatch):
    thread = Thread(monkeypatch)
    assert [thread.moved() for _ in range(3)] == [True, False, False], "nothing is known at the first look"
    thread.go_on()
    assert [thread.moved() for _ in range(2)] == [True, False]
    thread.moved(WINDOW_SECONDS)
    most = BUSY * WINDOW_SECONDS
    assert thread.moved(WINDOW_SECONDS, cpu=most + 0.1)
    assert thread.moved(), "it did lately"
    assert not thread.moved(WINDOW_SECONDS, cpu=most - 0.1), "waiting costs something, too"
    assert not thread.moved(seconds=0.1, cpu=0.1), "a peak is not much"


def test_of_a_thread_that_has_ended_nothing_is_known():
    (watched,) = in_threads(lambda _: Stillness(), [0])
    assert [watched.moved() for _ in range(3)] == [True] * 3
