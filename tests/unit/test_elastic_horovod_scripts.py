"""Scripts written for Horovod's elastic mode: what our functions do in the place of Horovod's."""

import importlib.util
import os
import signal
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from front_ends import Script
from horovod_benches import ENVIRONMENT, HorovodJob, HorovodScript, link_of
from refusal_kit import refused
from session_kit import FakeMaster

from elasticdl.common.credentials import CONNECTED
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.protocol import Member, World
from elasticdl.elastic.horovod_scripts import script_worker as stillness
from elasticdl.elastic.horovod_scripts.patches import mend_keras_callbacks, mend_tensorflow_state, refuse_optimizer
from elasticdl.elastic.horovod_scripts.script_worker import BUSY, WINDOW_SECONDS, ScriptWorker, Stillness
from elasticdl.job import messages as m


class ScriptsMaster(FakeMaster):
    """What it sees of a script: its last words, and whether it moves."""

    @property
    def said(self):
        return [type(message).__name__ for message in self.sent if isinstance(message, m.Finished | m.Failed)]

    @property
    def advanced(self):
        self.session.post(p.Welcomed(0.0))
        self.session.post(p.Trigger.TICK)
        beat = self.of(m.Heartbeat)[-1]
        assert beat.waiting or not beat.progress, "who stands still may be waiting for the others"
        return beat.progress


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
        worker = ScriptWorker({**ENVIRONMENT, **env}, lambda environment: link_of(master.session))
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
    assert [asked.broken for asked in master.of(m.Ask)] == [False, True, True]
    assert worker.holds(hvd)
    worker._close()
    assert master.said == ["Finished"], "a script that just ends"


def test_variables_that_horovod_cannot_bear_are_refused(make_worker, capsys):
    worker, _ = make_worker(HOROVOD_CYCLE_TIME="5")
    with pytest.raises(SystemExit) as end:
        worker.claim()
    assert end.value.code == 2
    assert "HOROVOD_CYCLE_TIME" in capsys.readouterr().err


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


# -- through worlds --


def run_scripts(kind, workers, events):
    """What each has said at its end, and trained; and the job."""
    job = HorovodJob(workers, events)
    scripts = [kind(Script()) for _ in range(workers + job.comers)]
    said, _ = job.run(lambda rank: scripts[rank].train(job))
    return said, [each.trained() for each in scripts], job


class Checks(HorovodScript):
    """Commits each second step; between two commits it asks whether workers come or go."""

    def commit(self, state):
        state.check_host_updates() if state.calls % 2 else state.commit()


@pytest.mark.parametrize(
    ("kind", "event", "kinds", "reported"),  # in which the other one goes on, and the steps that it reports
    [
        (HorovodScript, {(1, 3): "lost"}, [("failure", 1)], [*range(1, 11)]),
        (HorovodScript, {(1, 3): "drained"}, [("shrink", 0)], [*range(1, 11)]),
        (Checks, {(1, 3): "drained"}, [("shrink", 0)], [*range(1, 7)]),
        (Checks, {(0, 3): "joined"}, [("grow", 0)], [*range(1, 7)]),
    ],
)
def test_pauses_are_told_and_what_is_found_between_two_commits_is_kept(kind, event, kinds, reported):
    workers = 1 if "joined" in event.values() else 2
    _, (ours, *_), job = run_scripts(kind, workers, event)
    assert [(each["kind"], each["steps_torn"]) for each in job.lines[0].notices("pause")] == kinds
    assert [report.step for report in job.lines[0].reports] == reported
    alone = HorovodScript(Script())
    alone.alone()
    for mine, its in zip(ours.weights, alone.trained().weights, strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-5)


def test_a_newcomer_that_loses_the_others_before_its_first_commit_goes_on_from_what_it_was_sent():
    said, (_, newcomer), _ = run_scripts(HorovodScript, 1, {(0, 3): "joined", (0, 4): "lost"})
    assert said[1] is None
    alone = HorovodScript(Script())
    alone.alone()
    for mine, its in zip(newcomer.weights, alone.trained().weights, strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-5)


class FailsAgain(HorovodScript):
    left = 2

    def on_reset(self, hvd):
        self.left -= 1
        if self.left >= 0:
            raise hvd.HorovodInternalError


def test_failures_while_a_failure_is_being_mended_do_not_end_it():
    said, (ours,), job = run_scripts(FailsAgain, 1, {(0, 3): "torn"})
    assert said == (None,)
    assert len(ours.losses) == 10
    assert job.contexts[0].world.version == 4


# -- whether a script stands still --


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


# -- what is mended of Horovod's own, and what is refused --


def optimizer(kind, rate, steps):
    parameter = torch.nn.Parameter(torch.ones(3))
    made = getattr(torch.optim, kind)([parameter], lr=rate, weight_decay=0.1)
    for _ in range(steps):
        parameter.grad = torch.ones(3)
        made.step()
    return made


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])  # without slots, and where Horovod's own makes them by a step
def test_a_newcomer_has_the_whole_optimizer_and_its_weights_and_groups_stay(kind):
    job = HorovodJob(2)
    root, newcomer = optimizers = [optimizer(kind, 0.1, 2), optimizer(kind, 0.3, 0)]
    (group,) = newcomer.param_groups  # which a scheduler may hold

    def sync(rank):
        hvd = job.import_horovod()
        hvd.init()
        state = hvd.TorchState(optimizer=optimizers[rank])
        state.sync()
        state.save()
        optimizers[rank].param_groups[0]["lr"] = 0.7
        state.restore()  # as of a torn step

    job.run(sync)
    assert newcomer.param_groups[0] is group
    assert group["lr"] == 0.1
    assert group["params"][0].tolist() == [1.0] * 3
    torch.testing.assert_close(newcomer.state_dict()["state"], root.state_dict()["state"], rtol=0, atol=0)


def test_an_optimizer_that_would_not_average_is_refused():
    module = SimpleNamespace(create_distributed_optimizer=lambda keras, optimizer: "distributed")
    refuse_optimizer(module)
    make = module.create_distributed_optimizer
    assert make(None, SimpleNamespace(variables=list)) == "distributed"
    refused(r"use elasticdl\.elastic\.keras, or Keras 2", lambda: make(None, SimpleNamespace(variables=[])))


def test_callbacks_take_the_backend_of_the_keras_that_tensorflow_has():
    callbacks = SimpleNamespace(keras=SimpleNamespace(backend="backend of Keras 2"), K="backend of Keras 3")
    mend_keras_callbacks(callbacks)
    assert callbacks.K == "backend of Keras 2"


def test_variables_without_a_session_are_sent_at_each_sync_and_not_when_the_state_is_made():
    pytest.importorskip("horovod.tensorflow")
    spec = importlib.util.find_spec("horovod.tensorflow.elastic")
    states, sent = importlib.util.module_from_spec(spec), []  # a module of this test's own
    spec.loader.exec_module(states)
    states.rank, states.broadcast_object = lambda: 0, lambda value: value
    states.broadcast_variables = lambda variables, root_rank: sent.append([v.numpy().item() for v in variables])
    mend_tensorflow_state(states)
    state = states.TensorFlowState([states.tf.Variable(1.0), states.tf.Variable(2.0)], batch=3)
    assert (sent, state.batch) == ([], 3)
    state.variables[1].assign(4.0)
    state.sync()
    state.variables[1].assign(7.0)
    state.restore()
    assert (sent, state.variables[1].numpy()) == ([[1, 4]], 4.0)
