"""Collectives over a stand-in for Horovod, whose failures are told apart; states and bytes on their way."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from elastic_kit import Board, SumOfThreads, in_threads
from refusal_kit import refused

from elasticdl.common.errors import ShortOfMemoryError, UserError
from elasticdl.elastic.collectives import transfer
from elasticdl.elastic.collectives.horovod import HorovodCollective, takes_horovod
from elasticdl.elastic.collectives.opening import require_collective
from elasticdl.elastic.collectives.port import ENGINE
from elasticdl.elastic.collectives.torch_distributed import TorchDistributed
from elasticdl.elastic.collectives.transfer import broadcast_state
from elasticdl.elastic.core.protocol import Member, World, WorldBroken
from elasticdl.elastic.link.store import Endpoint, KvStore
from elasticdl.elastic.torch_kit import tensors as tensors_of_torch
from elasticdl.elastic.torch_kit.tensors import TorchTensors
from elasticdl.tensorflow import tf


class HorovodSums:
    """They are done at once, or fail."""

    Sum = "sum"

    def __init__(self, error=None):
        self.error, self.given = error, []

    def allreduce_async_(self, tensor, op, name):
        self.given.append(tensor.tolist())
        return tensor

    def poll(self, tensor):
        return True

    def synchronize(self, tensor):
        if self.error:
            raise self.error
        return tensor


def two_workers(hvd):
    collective = HorovodCollective(TorchTensors(), hvd, SimpleNamespace(store=None, stop=lambda: None))
    collective.world = World.of(4, (Member(0, "h", 0, False), Member(1, "h", 0, False)), 0)
    return collective


def test_horovod_without_nccl_is_given_what_has_come_to_the_host(monkeypatch):
    def copies(tensor, stream):
        return SimpleNamespace(wait=lambda: torch.full(tensor.shape, 2.0))

    monkeypatch.setattr(tensors_of_torch, "HostCopy", copies)
    monkeypatch.setattr(tensors_of_torch, "new_stream", lambda _: "stream")
    made = two_workers(hvd := HorovodSums())
    made.finish([made.begin_sum(torch.ones(2, device="meta"), "a")])
    assert hvd.given == [[2.0, 2.0]]


@pytest.mark.parametrize(
    ("has_gloo", "engine", "wanted"), [(False, "auto", False), (True, "auto", True), (False, "horovod", True)]
)
def test_a_horovod_without_gloo_is_taken_only_where_it_is_asked_for(monkeypatch, has_gloo, engine, wanted):
    monkeypatch.setitem(sys.modules, "horovod.torch", SimpleNamespace(gloo_built=lambda: has_gloo))
    assert takes_horovod(engine, TorchTensors()) == wanted


def test_who_has_neither_engine_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match=r"Horovod with PyTorch, or PyTorch .*neither can be imported"):
        require_collective("auto", TorchTensors())


class HorovodInternalError(RuntimeError):
    """As Horovod's own, by its name and that of its module."""

    __module__ = "horovod.common.exceptions"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (HorovodInternalError("Connection closed by peer [127.0.0.1]:1234"), WorldBroken),
        (ValueError("Horovod has not been initialized"), WorldBroken),
        (HorovodInternalError("Mismatched ALLREDUCE tensor shapes: ..."), HorovodInternalError),
        (HorovodInternalError("CUDA out of memory. Tried to allocate 2 GiB"), ShortOfMemoryError),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), ShortOfMemoryError),
        (MemoryError(), ShortOfMemoryError),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), RuntimeError),
        (ValueError("bad shape"), ValueError),
        (tf.errors.UnknownError(None, None, "Read error: Connection reset [Op:HorovodAllreduce]"), WorldBroken),
        (tf.errors.InvalidArgumentError(None, None, "bad shape [Op:HorovodAllreduce]"), tf.errors.InvalidArgumentError),
        (tf.errors.UnknownError(None, None, "Mismatched tensor shapes [Op:HorovodAllreduce]"), tf.errors.UnknownError),
    ],
)
def test_what_fails_in_a_collective_is_told_apart_by_its_cause(error, told, caplog):
    """The journal is told what a broken world means; the library's own text is in the log."""
    caplog.set_level("INFO")
    with pytest.raises(told) as caught:
        two_workers(HorovodSums(error)).sum_([torch.ones(1)], "t")
    assert type(caught.value) is told
    if told is WorldBroken:
        assert re.fullmatch(r"a collective of world \d+ failed: one of its workers is lost, .*", str(caught.value))
        assert str(error).partition(" [Op:")[0] in caplog.text


def test_a_state_larger_than_the_buffer_arrives_in_pieces(monkeypatch):
    monkeypatch.setattr(transfer, "PIECE_BYTES", 64)
    state = {
        "model": {"large": torch.arange(100.0), "scalar": torch.tensor(7), "none": torch.empty(0, 3)},
        "optimizer": {"half": torch.ones(5, dtype=torch.bfloat16), "flags": torch.tensor([True, False])},
        "values": {"strided": torch.arange(6).view(2, 3).T, "text": "x"},
    }
    board, standing = Board(3), (Member(0, "h", 9, True), Member(2, "h", 9, True), Member(1, "h", 0, False))
    members = [SumOfThreads(rank, board) for rank in range(3)]
    for member in members:
        member.world = World.of(3, standing, member.world.rank)
    given = [state, {"own": 1}, {}]
    root, survivor, newcomer = in_threads(lambda each: broadcast_state(given[each.world.rank], each), members)
    assert root is state
    assert survivor == {"own": 1}  # it stands with rank 0: nothing is kept of what it received
    assert newcomer["values"].pop("text") == state["values"].pop("text")
    torch.testing.assert_close(newcomer, state, rtol=0, atol=0, check_stride=True)


def test_who_has_no_room_for_the_state_is_told_so(monkeypatch):
    monkeypatch.setattr(transfer.np, "empty", lambda *_: exec("raise MemoryError"))
    collective = SumOfThreads(0, Board(1))
    collective.world = World.of(3, (Member(0, "h", 9, True), Member(1, "h", 0, False)), 0)
    collective.broadcast_bytes = lambda data, name: data
    with pytest.raises(ShortOfMemoryError, match="too little memory for the training state"):
        broadcast_state({"model": torch.ones(2)}, collective)


def require_one_engine(told, rank=1, **options):
    """In world 3, in which rank 0 has told that it uses this engine; returns what is published."""
    published = []
    store = KvStore(lambda *entry: published.append(entry))
    store.open_world(3)
    if told is not None:
        store.receive(3, ENGINE, told)
    elif rank:
        store.break_world(3)
    world = World.of(3, tuple(Member(i, f"host-{i}", 0, False) for i in range(2)), rank)
    TorchDistributed(TorchTensors(), Endpoint(store, "lo"), **options).require_one_engine(store, world)
    return published


def test_rank_0_says_what_it_uses_and_hosts_that_have_different_libraries_are_refused():
    assert require_one_engine(None, rank=0) == [(3, ENGINE, b"torch")]
    assert require_one_engine(b"torch") == []
    with pytest.raises(WorldBroken, match="has not said"):  # rank 0 is gone
        require_one_engine(None)
    words = r"uses torch and rank 0 \(host-0\) uses horovod: install the same"
    refused(words, lambda: require_one_engine(b"horovod"))
    nccl = r"uses torch with NCCL and rank 0 .* uses torch: .* set ELASTICDL_SHARED_GPU=1"
    refused(nccl, lambda: require_one_engine(b"torch", by_nccl=True))
