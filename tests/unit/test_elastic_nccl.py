"""Which way tensors on a GPU take, and the communicator of a world: made, waited for, aborted. NCCL itself is a stand-in."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from refusal_kit import refused

from elasticdl.common.credentials import SHARED_GPU
from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives import torch_groups
from elasticdl.elastic.collectives.opening import open_collective
from elasticdl.elastic.collectives.torch_distributed import TorchDistributed
from elasticdl.elastic.collectives.torch_groups import NcclGroup, WorldStore
from elasticdl.elastic.core.protocol import Member, World, WorldBroken
from elasticdl.elastic.link.store import Endpoint, KvStore
from elasticdl.elastic.torch_kit.tensors import TorchTensors

SOON = 5.0


class FakeWork:
    """``on_device``: its kernel has ended. ``error``: what NCCL has found out."""

    def __init__(self):
        self.on_device = threading.Event()
        self.error = None

    def is_completed(self):
        return self.error is not None or self.on_device.is_set()

    def wait(self):
        assert self.on_device.is_set(), "it would look each 10 ms"
        if self.error:
            raise self.error


class FakeGroup:
    """An aborted kernel ends as if it had done its work. ``abort`` lasts until it is let go on."""

    def __init__(self):
        self.works = []
        self.aborts = 0
        self.may_abort = threading.Event()
        self.may_abort.set()

    def allreduce(self, *_):
        work = FakeWork()
        self.works.append(work)
        return work

    def abort(self):
        self.aborts += 1
        self.may_abort.wait(30)
        for work in self.works:
            work.on_device.set()


def store():
    kept = KvStore(lambda *entry: None)
    kept.open_world(3)
    return kept


@pytest.fixture
def group():
    store_of_group = WorldStore(store(), 3, "device")
    made = NcclGroup(store_of_group, FakeGroup(), torch.device("cpu"), lambda work: work.on_device.is_set)
    yield made
    made._group.may_abort.set()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1) as made:
        yield made


def test_a_collective_is_waited_for_until_the_device_has_done_it(group, pool):
    """The mark may come after the end of its work: they are on two streams."""
    marked = threading.Event()
    group._mark = lambda _: marked.is_set
    begun = group.begin_sum(torch.ones(2))
    waited = pool.submit(begun.wait)
    group._group.works[0].on_device.set()
    assert not begun.is_completed()
    marked.set()
    assert waited.exception(SOON) is None


def test_what_is_under_way_is_kept_until_the_abort_has_ended_it(group, pool):
    """Nobody asks the device meanwhile: PyTorch does so with Python's lock, and the answer may come only when the abort is over."""
    asked = []
    group._mark = lambda work: lambda: asked.append(1) or work.on_device.is_set()
    group._group.may_abort.clear()
    begun = group.begin_sum(torch.ones(2))
    waited = pool.submit(begun.wait)
    group.abort()  # by the session's thread
    assert isinstance(waited.exception(SOON), WorldBroken)  # though the abort is not over
    asked.clear()
    with pytest.raises(WorldBroken):
        group.begin_sum(torch.ones(2))
    assert group._pending == {begun}
    assert not begun.is_completed()  # so its memory is not used again
    assert asked == []
    group._group.may_abort.set()
    group.close()
    assert begun.is_completed()
    assert (group._pending, group._group.aborts) == (set(), 1)
    with pytest.raises(WorldBroken, match="world 3 is broken"):
        begun.wait()  # a kernel that ended by an abort has not done its work


@pytest.mark.parametrize(("error", "words"), [("remote error", "lost a member"), (None, "not done after")])
def test_what_nccl_has_found_out_or_a_deadline_breaks_the_world(group, monkeypatch, error, words):
    monkeypatch.setattr(torch_groups, "MARK_SECONDS", 0.05)
    monkeypatch.setattr(torch_groups, "COLLECTIVE_TIMEOUT", timedelta(seconds=5 if error else 0.05))
    begun = group.begin_sum(torch.ones(2))
    group._group.works[0].error = error and torch.distributed.DistBackendError(error)
    with pytest.raises(WorldBroken, match=words):
        begun.wait()


def test_one_that_does_not_come_about_is_aborted_and_two_workers_on_one_gpu_are_told_what_to_do(group, monkeypatch):
    with pytest.raises(WorldBroken):
        group.connect(lambda: True)  # given up
    group.close()
    assert group._group.aborts == 1
    error = torch.distributed.DistBackendError("Last error:\nDuplicate GPU detected : rank 0 and rank 1 both on 1000")
    monkeypatch.setattr(group, "begin_sum", lambda *_: exec("raise error", {"error": error}))
    refused(f"NCCL refuses: give each its own, or set {SHARED_GPU}=1", lambda: group.connect(lambda: False))


# -- in a world, beside a Gloo group of this process alone --

ON_DEVICE = torch.ones(2, device="meta")  # stands for the device
WORLD = World.of(3, tuple(Member(i, "127.0.0.1", 0, False) for i in range(2)), 0)


@pytest.fixture
def in_world(monkeypatch, group):
    def make(opened=lambda: group, starts=True):
        monkeypatch.setattr(TorchDistributed, "_open_groups", lambda *_, **__: (object(), opened()))
        made = TorchDistributed(TorchTensors(), Endpoint(store(), "lo"), by_nccl=True)
        if starts:
            made.start(WORLD)
        return made

    return make


def test_the_settings_are_for_the_constructor_alone(monkeypatch):
    seen = []

    class Group:
        Options = partial(SimpleNamespace, config=SimpleNamespace())

        def __init__(self, *_):
            seen.append({name: os.environ[name] for name in torch_groups.SETTINGS})

    before = {**dict.fromkeys(torch_groups.SETTINGS), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    for name, value in before.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch_groups.dist, "ProcessGroupNCCL", Group, raising=False)
    torch_groups._make_group(None, 0, 2)
    assert seen == [torch_groups.SETTINGS]
    assert {name: os.environ.get(name) for name in before} == before


def test_a_break_is_not_waited_for_and_wakes_who_waits(in_world, group, pool):
    made = in_world()
    transfer = made.begin_sum(ON_DEVICE, "t")
    assert made.in_flight(transfer)
    waited = pool.submit(made.finish, [transfer])
    made.break_world(3)
    assert isinstance(waited.exception(SOON), WorldBroken)
    made.stop()
    assert not made.in_flight(transfer)
    assert group._group.aborts == 1


def test_what_nccl_raises_is_a_broken_world_and_a_mistake_of_the_user_is_not_tried_again(in_world, group):
    made = in_world()
    transfer = made.begin_sum(ON_DEVICE, "t")
    group._group.works[0].error = torch.distributed.DistBackendError("NCCL error: remote process exited")
    group._group.works[0].on_device.set()
    with pytest.raises(WorldBroken, match="one of its workers is lost, or out of reach"):
        made.finish([transfer])
    refused("one GPU", lambda: in_world(lambda: exec("raise error", {"error": UserError("one GPU")})))


def test_a_group_that_comes_too_late_is_aborted(in_world, group, pool):
    opening, go = threading.Event(), threading.Event()
    made = in_world(lambda: opening.set() or (go.wait(SOON), group)[1], starts=False)
    started = pool.submit(made.start, WORLD)
    assert opening.wait(SOON)
    made.break_world(3)
    assert isinstance(started.exception(SOON), WorldBroken)
    go.set()
    made.close()
    group.close()
    assert group._group.aborts == 1


@pytest.mark.parametrize(
    ("version", "shares", "engine"),
    [((2, 27, 5), False, "torch with NCCL"), ((2, 27, 5), True, "torch"), ((2, 26, 5), False, "torch")],
)
def test_a_worker_with_a_gpu_of_its_own_takes_a_usable_nccl(monkeypatch, version, shares, engine):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch_groups.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    monkeypatch.delenv(SHARED_GPU, raising=False)
    if shares:
        monkeypatch.setenv(SHARED_GPU, "1")
    made = open_collective(Endpoint(store(), "lo"), "torch", TorchTensors())
    assert (made.engine, made._by_nccl, made.takes_gpu) == (engine, engine != "torch", True)
