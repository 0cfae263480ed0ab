"""The worker process from its start to its exit code, with a scripted master."""

import re
import signal
import uuid
from types import SimpleNamespace

import pytest
import torch
from worker_kit import BreakingCollective, Script, write_zoo

from elasticdl.common.credentials import Token
from elasticdl.common.environment import WorkerEnvironment
from elasticdl.elastic.collectives.port import memory_of_the_worker
from elasticdl.elastic.core import messages as m
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.world import Member, World
from elasticdl.elastic.torch_kit.pieces import torch_pieces
from elasticdl.elastic.torch_kit.torch_job import ElasticContext
from elasticdl.elastic.training import state as training_state
from elasticdl.job.spec import JobSpec
from elasticdl.worker import main
from elasticdl.worker.batch_sizes import batch_policy
from elasticdl.worker.torch_learner import TorchLearner


@pytest.fixture
def work(tmp_path, monkeypatch):
    """Runs the process on a module with something added; gives its exit code."""
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)

    def run(master, extra="", **options):
        name = f"zoo_{uuid.uuid4().hex}"
        zoo = write_zoo(tmp_path / "zoo", extra, name=name)
        spec = JobSpec(model_zoo=str(zoo), model_def=name, global_batch_size=10, **options)
        (tmp_path / "job.json").write_text(spec.to_json())
        environment = WorkerEnvironment("127.0.0.1:1", Token("token"), 3, str(tmp_path / "job.json"))
        for variable, value in environment.to_env().items():
            monkeypatch.setenv(variable, value)
        context = ElasticContext(master.session, BreakingCollective(), batch_policy(spec), spec.seed)
        monkeypatch.setattr(
            main, "MasterConnection", lambda _: SimpleNamespace(session=master.session, open=list, close=list)
        )
        monkeypatch.setattr(TorchLearner.context_class, "connect", lambda *_, **__: context)
        return main.main()

    yield run
    signal.signal(signal.SIGTERM, before)


def failure(master):
    (failed,) = master.of(m.Failed)
    return failed


def test_trains_to_the_end(work):
    master = Script()
    assert work(master) == 0
    assert master.last_word.step == 4


def test_told_to_leave_is_no_failure(work):
    master = Script(stop_after=2)
    assert work(master) == 0
    assert master.of(m.Failed) == []


def test_a_signal_in_the_midst_of_the_users_code_is_not_its_fault(work):
    master = Script()
    extra = "\nimport os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n"
    assert work(master, extra) == 0
    assert master.sent == [m.Draining("told to leave (SIGTERM)")]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # a second one must not cut the farewell short


BOOM = """
calls = [0]


def loss(labels, predictions):
    calls[0] += 1
    if calls[0] == 3:
        raise KeyError("boom")
    return torch.nn.functional.mse_loss(predictions, labels)
"""


def test_what_the_users_code_raised_reaches_the_master(work):
    master = Script()
    assert work(master, BOOM) == 1
    failed = failure(master)
    assert failed.users
    assert re.fullmatch(r"zoo/zoo_\w+\.py:33: KeyError: 'boom'", failed.message)
    first, frame, *_ = failed.traceback.splitlines()
    assert first.startswith("Traceback")
    assert "/zoo/zoo_" in frame
    assert frame.endswith("in loss")


def test_a_mistake_is_told_without_a_traceback(work):
    master = Script()
    assert work(master, "\ndef custom_model():\n    return 3\n") == 1
    assert failure(master).users
    assert "returned int; expected a torch.nn.Module or a keras.Model" in failure(master).message
    assert failure(master).traceback == ""


def test_what_is_not_the_users_fault_costs_only_this_worker(work):
    master = Script()
    master.answer = lambda request: p.MasterLost("no master for 30 s")
    assert work(master) == 1
    assert (failure(master).users, failure(master).message) == (False, "UnreachableError: no master for 30 s")


@pytest.mark.parametrize(
    ("error", "users"),
    [
        ("torch.AcceleratorError('an illegal memory access', -1)", False),
        ("RuntimeError('CUDA error: an illegal memory access')", False),
        ("torch.OutOfMemoryError('CUDA out of memory')", True),  # the batch is too large for the device
        ("ValueError('CUDA error')", True),
    ],
)
def test_a_device_that_fails_costs_only_its_worker(work, error, users):
    master = Script()
    assert work(master, f"\ndef loss(labels, predictions): raise {error}\n") == 1
    assert failure(master).users is users


def test_too_little_memory_for_the_job_s_own_needs_costs_only_this_worker(work, monkeypatch):
    def broadcast(*_, **__):
        with memory_of_the_worker("the training state"):
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch_pieces, "broadcast_state", broadcast)
    monkeypatch.setattr(training_state, "require_same", lambda *_: None)  # which asks rank 0
    master = Script()
    master.answer = lambda request: World.of(1, (Member(0, "here", 9, True), Member(1, "here", 0, False)), 1)
    assert work(master) == 1
    assert not failure(master).users
    assert failure(master).message.endswith(
        "too little memory for the training state: OutOfMemoryError: CUDA out of memory"
    )


def test_started_by_hand(monkeypatch, capsys):
    monkeypatch.delenv("ELASTICDL_MASTER", raising=False)
    assert main.main() == 1
    assert (
        capsys.readouterr().err == "elasticdl worker: a worker is started by its job's master: use `elasticdl train`\n"
    )


def test_a_failure_is_told_in_a_line_and_as_much_as_a_cluster_keeps(work):
    master = Script()
    assert work(master, "def loss(labels, predictions): raise ValueError('x' * 6_000_000 + '\\nmore')\n") == 1
    failed = failure(master)
    assert ".py:26: ValueError: xxx" in failed.message
    assert " characters left out) ... xxx" in failed.message
    assert len(failed.message) < 600
    assert "\n" not in failed.message
    assert failed.traceback.startswith("Traceback (most recent call last):\n")
    assert len(failed.traceback) < 21_000
