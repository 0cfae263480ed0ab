"""The worker process from its start to its exit code, with a scripted master."""

import asyncio
import errno
import os
import re
import shutil
import signal
import threading
from types import SimpleNamespace

import psutil
import pytest
import torch
from worker_kit import BreakingCollective, Script, spec_maker

from elasticdl.common.credentials import Token, WorkerEnvironment
from elasticdl.common.process_group import ProcessGroup
from elasticdl.elastic.collectives.port import memory_of_the_worker
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.protocol import Member, World
from elasticdl.elastic.torch_kit import torch_state
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.job import messages as m
from elasticdl.places import worker_process
from elasticdl.places.worker_process import InFile, MemoryKills, Spawner, WorkerRun
from elasticdl.worker import main
from elasticdl.worker.learner import batch_policy
from elasticdl.worker.torch_learner import TorchLearner


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
        context = ElasticContext(master.session, BreakingCollective(), batch_policy(spec), spec.seed)
        connection = SimpleNamespace(session=master.session, open=list, close=list)
        monkeypatch.setattr(main, "MasterConnection", lambda _: connection)
        monkeypatch.setattr(TorchLearner.context_class, "connect", lambda *_, **__: context)
        return main.main()

    return run


@pytest.fixture
def failure(work):
    """What the master is told of a worker that fails."""

    def run(extra="", answer=None):
        master = Script()
        if answer is not None:
            master.answer = lambda request: answer
        assert work(master, extra) == 1
        (failed,) = master.of(m.Failed)
        assert "\n" not in failed.message
        return failed

    return run


@pytest.mark.parametrize(("stop_after", "finished"), [(0, [4]), (2, [])])
def test_who_trains_to_the_end_or_is_told_to_leave_has_not_failed(work, stop_after, finished):
    master = Script(stop_after=stop_after)
    assert work(master) == 0
    assert master.of(m.Failed) == []
    assert [each.step for each in master.of(m.Finished)] == finished


def test_who_finds_no_master_any_more_has_not_failed(work):
    master = Script()
    master.session.post(p.Welcomed(0.5))
    master.answer = lambda request: p.MasterLost("no master for 30 s")
    assert work(master) == 0
    assert master.of(m.Failed) == []


def test_a_signal_that_the_loop_has_taken_leaves_the_step_alone(work):
    """The only worker stays until another has its state, and here it finishes before."""
    master = Script()
    core = master.session.core

    def kill_within_step_2():
        if core.position.progress.step == 1 and not core.lingers:
            core.linger_seconds = 100.0
            os.kill(os.getpid(), signal.SIGTERM)
        return False

    core.votes = kill_within_step_2
    assert work(master) == 0
    assert m.Draining("told to leave (SIGTERM)", lingers=True) in master.sent
    assert [each.step for each in master.of(m.Finished)] == [4]


def test_a_signal_in_the_midst_of_the_users_code_is_not_its_fault(work):
    master = Script()
    extra = "\nimport os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n"
    assert work(master, extra) == 0
    assert master.sent == [m.Draining("told to leave (SIGTERM)")]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # a second one must not cut the farewell short


BOOM = """
calls = [0]


class Boom(torch.nn.Linear):
    def forward(self, inputs):
        calls[0] += 1
        if calls[0] == 3:
            raise KeyError("boom")
        return super().forward(inputs)


def custom_model():
    return Boom(2, 1)
"""


def test_what_the_users_code_raised_reaches_the_master(failure):
    failed = failure(BOOM)
    assert failed.users
    assert re.fullmatch(r"zoo/zoo_\w+\.py:34: KeyError: 'boom'", failed.message)
    first, *frames = failed.traceback.splitlines()
    assert first.startswith("Traceback")
    assert any("/zoo/zoo_" in frame and frame.endswith("in forward") for frame in frames)


def raising(error):
    return f"\ndef loss(labels, predictions): raise {error}\n"


MISTAKE = "\ndef custom_model():\n    return 3\n"


@pytest.mark.parametrize(
    ("extra", "users", "message"),
    [
        (MISTAKE, True, "returned int; expected a torch.nn.Module or a keras.Model"),
        # A device that fails costs only its worker.
        (raising("torch.AcceleratorError('an illegal memory access', -1)"), False, "illegal memory access"),
        (raising("RuntimeError('CUDA error: an illegal memory access')"), False, "illegal memory access"),
        # The batch is too large for the device.
        (raising("torch.OutOfMemoryError('CUDA out of memory')"), True, "CUDA out of memory"),
        (raising("ValueError('CUDA error')"), True, "CUDA error"),
    ],
)
def test_only_the_users_mistake_fails_the_job(failure, extra, users, message):
    failed = failure(extra)
    assert failed.users is users
    assert message in failed.message
    assert bool(failed.traceback) == (extra != MISTAKE)


def test_too_little_memory_for_the_job_s_own_needs_costs_only_this_worker(failure, monkeypatch):
    def broadcast(*_, **__):
        with memory_of_the_worker("the training state"):
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch_state, "broadcast_state", broadcast)
    failed = failure(answer=World.of(1, (Member(0, "here", 9, True), Member(1, "here", 0, False)), 1))
    assert not failed.users
    assert failed.message.endswith("too little memory for the training state: OutOfMemoryError: CUDA out of memory")


def test_started_by_hand(monkeypatch, capsys):
    monkeypatch.delenv("ELASTICDL_MASTER", raising=False)
    assert main.main() == 1
    said = "elasticdl worker: a worker is started by its job's master: use `elasticdl train`\n"
    assert capsys.readouterr().err == said


def test_a_failure_is_told_in_a_line_and_as_much_as_a_cluster_keeps(failure):
    failed = failure(raising("ValueError('x' * 6_000_000 + '\\nmore')"))
    assert re.search(r"\.py:\d+: ValueError: xxx", failed.message)
    assert len(failed.message) < 600
    assert failed.traceback.endswith("more\n")
    assert len(failed.traceback) < 21_000


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


def test_the_end_of_a_worker_is_told_before_its_files_are_deleted(tmp_path, monkeypatch):
    """There may be many, on a slow disk, and the others wait to hear of it."""
    deleted, gate, remove = [], threading.Event(), shutil.rmtree

    def slowly(folder, ignore_errors):
        assert gate.wait(60)
        deleted.append(folder)
        remove(folder, ignore_errors)

    async def spawner():
        return Spawner(["true"])

    async def run():
        worker = WorkerRun(0, InFile(tmp_path / "log"))
        ended = await worker.ended(spawner(), {"PATH": "/usr/bin:/bin"}, lambda pid: None, MemoryKills())
        assert (ended.code, ended.problem) == (0, "")
        assert not deleted
        gate.set()
        await worker.left

    monkeypatch.setattr(worker_process.shutil, "rmtree", slowly)
    asyncio.run(asyncio.wait_for(run(), 60))
    assert len(deleted) == 1
