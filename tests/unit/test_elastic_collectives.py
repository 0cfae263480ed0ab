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
from elasticdl.elastic.collectives.horovod import HorovodCollective, horovod_host, takes_horovod
from elasticdl.elastic.collectives.opening import require_collective
from elasticdl.elastic.collectives.port import ENGINE, HEAD_BYTES
from elasticdl.elastic.collectives.torch_distributed import TorchDistributed
from elasticdl.elastic.collectives.transfer import broadcast_state
from elasticdl.elastic.core.protocol import Member, World, WorldBroken
from elasticdl.elastic.link.store import Endpoint, KvStore
from elasticdl.elastic.torch_kit import tensors as tensors_of_torch
from elasticdl.elastic.torch_kit.tensors import TorchTensors
from elasticdl.tensorflow import tf

NOWHERE = Endpoint(KvStore(lambda *_: None), "lo")


class HorovodSums:
    """Collectives that are done at the third look, or fail then."""

    Sum = "sum"

    def __init__(self, error=None):
        self.looks, self.tensors = {}, {}
        self.error = error

    def allreduce_async_(self, tensor, op, name):
        tensor.mul_(2)
        self.looks[name], self.tensors[name] = 0, tensor
        return name

    def poll(self, handle):
        self.looks[handle] += 1
        return self.looks[handle] >= 3

    def synchronize(self, handle):
        if self.error:
            raise self.error
        return self.tensors[handle]


def two_workers(hvd):
    collective = HorovodCollective(TorchTensors(), hvd, SimpleNamespace(store=None, stop=lambda: None))
    collective.world = World.of(4, (Member(0, "h", 0, False), Member(1, "h", 0, False)), 0)
    return collective


def test_each_worker_is_a_host_of_its_own_to_horovod():
    members = tuple(Member(10 + i, host, 0, False) for i, host in enumerate("aab"))
    assert [horovod_host(World.of(1, members, rank)) for rank in range(3)] == ["a-10", "a-11", "b-12"]


def test_a_collective_is_waited_for_without_spinning():
    hvd, tensors = HorovodSums(), [torch.ones(2), torch.ones(3)]
    two_workers(hvd).sum_(tensors, "t")
    assert hvd.looks == {"t.0": 3, "t.1": 3}
    assert [tensor.tolist() for tensor in tensors] == [[2, 2], [2, 2, 2]]


def test_horovod_without_nccl_is_given_what_has_come_to_the_host(monkeypatch):
    def copies(tensor, stream):
        return SimpleNamespace(wait=lambda: torch.full(tensor.shape, 2.0))

    monkeypatch.setattr(tensors_of_torch, "HostCopy", copies)
    monkeypatch.setattr(tensors_of_torch, "new_stream", lambda _: "stream")
    made = two_workers(hvd := HorovodSums())
    made.finish([made.begin_sum(torch.ones(2, device="meta"), "a")])
    assert [tensor.tolist() for tensor in hvd.tensors.values()] == [[4.0, 4.0]]


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


@pytest.mark.parametrize("length", [0, HEAD_BYTES - 8, HEAD_BYTES - 7, 3 * HEAD_BYTES])
def test_bytes_of_any_length_arrive(length):
    data = bytes(index % 251 for index in range(length))
    board, given = Board(2), (data, b"other")
    assert in_threads(lambda rank: SumOfThreads(rank, board).broadcast_bytes(given[rank], "x"), range(2)) == [data] * 2


def broadcast(state, worlds):
    """What each rank has afterwards; ``worlds``: each rank's."""
    board = Board(len(worlds))
    members = [SumOfThreads(rank, board) for rank in range(len(worlds))]
    for member, world in zip(members, worlds, strict=True):
        member.world = world
    return in_threads(lambda c: broadcast_state(state if c.world.rank == 0 else {"own": c.world.rank}, c), members)


def test_a_state_larger_than_the_buffer_arrives_in_pieces(monkeypatch):
    monkeypatch.setattr(transfer, "PIECE_BYTES", 64)
    state = {
        "model": {"large": torch.arange(100.0), "scalar": torch.tensor(7), "none": torch.empty(0, 3)},
        "optimizer": {"half": torch.ones(5, dtype=torch.bfloat16), "flags": torch.tensor([True, False])},
        "values": {
            "strided": torch.arange(6).view(2, 3).T,
            "images": torch.randn(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
            "text": "x",
        },
    }
    standing = (Member(0, "h", 9, True), Member(2, "h", 9, True), Member(1, "h", 0, False))
    root, survivor, newcomer = broadcast(state, [World.of(3, standing, rank) for rank in range(3)])
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


def store_of(told=None):
    """Of world 3, in which rank 0 has told that it uses this engine."""
    published = []
    store = KvStore(lambda *entry: published.append(entry))
    store.open_world(3)
    if told is not None:
        store.receive(3, ENGINE, told)
    return store, published


def require_one_engine(rank, store, **options):
    world = World.of(3, tuple(Member(i, f"host-{i}", 0, False) for i in range(2)), rank)
    TorchDistributed(TorchTensors(), NOWHERE, **options).require_one_engine(store, world)


def test_rank_0_says_what_it_uses_and_the_others_look():
    store, published = store_of()
    require_one_engine(0, store)
    assert published == [(3, ENGINE, b"torch")]
    require_one_engine(1, store_of(b"torch")[0])
    require_one_engine(1, store)
    store, _ = store_of()
    store.break_world(3)  # rank 0 is gone
    with pytest.raises(WorldBroken, match="has not said"):
        require_one_engine(1, store)


def test_hosts_that_have_different_libraries_are_refused():
    horovod, torch_alone = (store_of(name)[0] for name in (b"horovod", b"torch"))
    refused(r"uses torch and rank 0 \(host-0\) uses horovod: install the same", lambda: require_one_engine(1, horovod))
    nccl = r"uses torch with NCCL and rank 0 .* uses torch: .* set ELASTICDL_SHARED_GPU=1"
    refused(nccl, lambda: require_one_engine(1, torch_alone, by_nccl=True))
