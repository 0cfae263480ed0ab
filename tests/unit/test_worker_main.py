"""The worker process from its start to its exit code, with a scripted master."""

import asyncio
import errno
import re
import signal
from types import SimpleNamespace

import psutil
import pytest
from elastic_kit import Board, SumOfThreads
from session_kit import FakeMaster
from worker_kit import spec_maker

from elasticdl.common.credentials import Token, WorkerEnvironment
from elasticdl.common.process_group import ProcessGroup
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.protocol import Member, World
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.job import messages as m
from elasticdl.places.worker_process import InFile, MemoryKills, Spawner, WorkerRun
from elasticdl.worker import main
from elasticdl.worker.learner import batch_policy
from elasticdl.worker.torch_learner import TorchLearner


class Master(FakeMaster):
    """The next world is this worker's alone."""

    def __init__(self):
        super().__init__()
        self.session.jobs_place, self.session.jobs_facts = lambda: (0, 0), bytes  # a worker waits for its first word

    def answer(self, request):
        return World.of(request.left_world + 1, (Member(3, "here", request.step, request.has_state),), 0)


@pytest.fixture
def work(tmp_path, monkeypatch):
    """Runs the process on a module with something added; gives its exit code."""
    make = spec_maker(tmp_path, monkeypatch, global_batch_size=10)

    def run(master, extra=""):
        spec = make(extra)
        (tmp_path / "job.json").write_text(spec.to_json())
        environment = WorkerEnvironment("127.0.0.1:1", Token("token"), 3, str(tmp_path / "job.json"))
        for variable, value in environment.to_env().items():
            monkeypatch.setenv(variable, value)
        collective = SumOfThreads(0, Board(1))
        context = ElasticContext(master.session, collective, batch_policy(spec), spec.seed)
        connection = SimpleNamespace(session=master.session, open=list, close=list)
        monkeypatch.setattr(main, "MasterConnection", lambda _: connection)
        monkeypatch.setattr(TorchLearner.context_class, "connect", lambda *_, **__: context)
        return main.main()

    return run


@pytest.fixture
def failure(work):
    """What the master is told of a worker that fails."""

    def run(extra):
        master = Master()
        assert work(master, extra) == 1
        (failed,) = master.of(m.Failed)
        assert "\n" not in failed.message
        return failed

    return run


@pytest.mark.parametrize(
    ("answer", "finished"),
    [(None, [4]), (p.Ordered(m.StopWork("told to", True)), []), (p.MasterLost("no master for 30 s"), [])],
)
def test_who_trains_to_the_end_or_is_told_to_leave_or_has_no_master_has_not_failed(work, answer, finished):
    master = Master()
    master.session.post(p.Welcomed(0.5))
    if answer:
        master.answer = lambda request: answer
    assert work(master) == 0
    assert master.of(m.Failed) == []
    assert [each.step for each in master.of(m.Finished)] == finished


KILLED_IN_STEP_2 = """
import os, signal

plain_loss, calls = loss, []


def loss(labels, predictions):
    calls.append(len(calls))
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return plain_loss(labels, predictions)
"""


def test_a_signal_that_the_loop_has_taken_leaves_the_step_alone(work):
    """The only worker stays until another has its state, and here it finishes before."""
    master = Master()
    master.session.core.linger_seconds = 100.0
    assert work(master, KILLED_IN_STEP_2) == 0
    assert m.Draining("told to leave (SIGTERM)", lingers=True) in master.sent
    assert [each.step for each in master.of(m.Finished)] == [4]


def test_a_signal_in_the_midst_of_the_users_code_is_not_its_fault(work):
    master = Master()
    extra = "\nimport os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n"
    assert work(master, extra) == 0
    assert master.sent == [m.Draining("told to leave (SIGTERM)")]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # a second one must not cut the farewell short


def raising(error):
    return f"\ndef loss(labels, predictions): raise {error}\n"


MISTAKE = "\ndef custom_model():\n    return 3\n"


@pytest.mark.parametrize(
    ("extra", "users", "message"),
    [
        (MISTAKE, True, "returned int; expected a torch.nn.Module or a keras.Model"),
        (raising("KeyError('boom')"), True, r"^zoo/zoo_\w+\.py:\d+: KeyError: 'boom'$"),
        # A device that fails costs only its worker.
        (raising("torch.AcceleratorError('an illegal memory access', -1)"), False, "illegal memory access"),
        (raising("RuntimeError('CUDA error: an illegal memory access')"), False, "illegal memory access"),
        # The batch is too large for the device.
        (raising("torch.OutOfMemoryError('CUDA out of memory')"), True, "CUDA out of memory"),
        (raising("ValueError('CUDA error')"), True, "CUDA error"),
        # As much as a cluster keeps.
        (raising("ValueError('x' * 6_000_000 + '\\nmore')"), True, r"\.py:\d+: ValueError: xxx"),
    ],
)
def test_only_the_users_mistake_fails_the_job_and_what_was_raised_is_told(failure, extra, users, message):
    failed = failure(extra)
    assert failed.users is users
    assert re.search(message, failed.message)
    assert len(failed.message) < 600
    if extra == MISTAKE:
        assert not failed.traceback
        return
    assert "/zoo/zoo_" in failed.traceback or failed.traceback.endswith("more\n")
    assert len(failed.traceback) < 21_000


def test_started_by_hand(monkeypatch, capsys):
    monkeypatch.delenv("ELASTICDL_MASTER", raising=False)
    assert main.main() == 1
    assert "a worker is started by its job's master: use `elasticdl train`" in capsys.readouterr().err


def test_a_worker_that_can_not_be_waited_for_does_not_run_on_in_its_place(tmp_path, monkeypatch):
    """Its place would be given to the next one, on the same GPU."""

    async def no_more(self, seconds=None):
        raise OSError(errno.EMFILE, "Too many open files")

    async def spawner():
        return Spawner(["sleep", "60"])

    pids = []
    monkeypatch.setattr(ProcessGroup, "has_ended", no_more)
    run = WorkerRun(0, InFile(tmp_path / "log"))
    ended = asyncio.run(run.ended(spawner(), {"PATH": "/usr/bin:/bin"}, pids.append, MemoryKills()))
    assert ended.problem == "Too many open files"
    assert not psutil.pid_exists(*pids)
