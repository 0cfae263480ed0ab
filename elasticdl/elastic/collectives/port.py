"""The port between elastic training and a library that moves tensors: `Collective`.

An engine is a subclass: `elasticdl.elastic.collectives.horovod`, `elasticdl.elastic.collectives.torch_distributed`. Whose
tensors it moves is said by the adapter that it is given (`TensorAdapter`), so each engine
works with each framework.

And what an engine is given beside: the adapter of a framework's tensors, and how it waits.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from elasticdl.common.credentials import SHARED_GPU
from elasticdl.common.errors import ShortOfMemoryError, UserError
from elasticdl.common.reason import one_line
from elasticdl.elastic.core.protocol import ALONE, World, WorldBroken
from elasticdl.elastic.link.store import KvStore, Refusal
from elasticdl.elastic.link.witness import Operations

# What training asks of a framework whose tensors travel between workers: one adapter for each framework.

Bytes = npt.NDArray[np.uint8]


class TensorAdapter(Protocol):
    """How an engine gets at a framework's tensors, and how those become bytes. NumPy arrays are taken for tensors, too."""

    title: str  # the framework, as users know it
    horovod: str  # Horovod's module for the framework
    lends_gpu_memory: bool  # torch.distributed can have the framework's tensors on a GPU as they are

    @property
    def kind(self) -> type:
        """The class of its tensors."""

    @property
    def has_gpu(self) -> bool:
        """This worker computes on one."""

    def operations(self, module: ModuleType, *, on_gpu: bool) -> Any:
        """What of Horovod's module is used, by the names that ``horovod.torch`` has: Sum, allreduce_async_, broadcast_async_,
        alltoall_async, poll, synchronize. ``on_gpu``: tensors on a GPU are reduced there."""

    # -- sums --

    def lend(self, tensor: Any, *, natively: bool) -> Any:
        """What an engine works on, and may overwrite: the tensor's own memory if that can be.

        ``natively``: for Horovod, which has operations for the framework's own tensors. Else what torch makes a tensor of
        without a copy: one of its own, a NumPy array or a DLPack capsule.
        """

    def to_host(self, lent: Any) -> Any:
        """For an engine that can't be handed what is on a device: a copy of that, else the same."""

    def summed(self, tensor: Any, result: Any) -> Any:
        """What the caller gets for the tensor that it has given, from what the engine has made of that: in place if it can be."""

    # -- a state as bytes --

    def size(self, tensor: Any) -> int:
        """In bytes."""

    def describe(self, tensor: Any, *, on_host: bool) -> Any:
        """What `from_bytes` needs to know; it is pickled. ``on_host``: the tensor need not arrive on a device."""

    def to_bytes(self, tensor: Any) -> Any:
        """What `read` takes parts of, where the tensor is."""

    def read(self, content: Any, cut: slice) -> Bytes:
        """On the host."""

    def from_bytes(self, content: Bytes, description: Any) -> Any: ...


log = logging.getLogger(__name__)

MEMORY_ERRORS = ("MemoryError", "OutOfMemoryError", "ResourceExhaustedError")  # of Python, PyTorch and TensorFlow

HEAD_BYTES = 1 << 14
GATHERED_BYTES = 8 << 20  # of each member, that rank 0 receives at once

ENGINE = ("elasticdl", "engine")  # the entry of a world's store in which rank 0 says what it uses
ENGINE_SECONDS = 10.0
LAST_OPERATIONS = 8
TORCH, TORCH_NCCL = "torch", "torch with NCCL"

# What a script asks for by itself: whether all workers do, or some have gone on to something else. Who waits for long in one of
# these operations says so in the world's store. Who waits for long in any other looks there.
SCOPE = "asked"
PATIENCE = 1.0  # seconds of waiting, before a worker speaks or looks


class Asked:
    """What this worker's script has asked for in the present world."""

    def __init__(self, store: KvStore) -> None:
        self._store = store
        self._world = ALONE
        self._number = 0  # of those that were asked for
        self._after = 0  # operations were begun before the last one
        self._what = ""
        self._is_asking = self._has_spoken = False

    @contextlib.contextmanager
    def asking(self, world: World, begun: int, what: str) -> Iterator[None]:
        """Within, the script waits for what it has asked for, after so many operations of this world. ``what``: in words."""
        self._number = 1 + (self._number if self._world is world else 0)
        self._world, self._after, self._what = world, begun, what
        self._is_asking, self._has_spoken = True, False
        try:
            yield
        finally:
            self._is_asking = False

    def meet(self) -> None:
        """Return when all members ask for the first in this world.

        Raises:
            WorldBroken: a member was lost.
        """
        self._speak()
        try:
            for rank in range(self._world.size):
                while self._store.get((SCOPE, str(rank)), PATIENCE, self._world.version) is None:
                    pass
        except Refusal as refusal:
            raise WorldBroken(f"world {self._world.version} broke while it was waited for {self._what}") from refusal

    def look(self, world: World, begun: int, last: str) -> None:
        """This worker waits for long in the operation of this name, the last of so many.

        Raises:
            UserError: another waits for what this one has passed by.
        """
        if self._is_asking:
            if not self._has_spoken:
                self._speak()
            return
        mine = self._number if self._world is world else 0
        with contextlib.suppress(Refusal):  # the world is broken, which is told elsewhere
            for rank in range(world.size):
                entry = self._store.get((SCOPE, str(rank)), 0.0, world.version)
                number, after, worker, what = (entry or b"0 0 0 ").decode().split(" ", 3)
                if int(number) > mine and int(after) < begun:
                    raise UserError(
                        f"worker {worker} waits for all workers at {what}, and worker {world.own.worker_id} has gone on to {last}: their scripts "
                        "must go one way, not another below `if rank == 0:`, nor by what one worker has seen of its part of a batch"
                    )

    def _speak(self) -> None:
        self._has_spoken = True
        world = self._world
        entry = f"{self._number} {self._after} {world.own.worker_id} {self._what}".encode()
        with contextlib.suppress(Refusal):
            self._store.put((SCOPE, str(world.rank)), entry, world.version)


class Inside:
    """The processes of one worker, and what they tell each other so that all go one way. By itself it knows workers of one process."""

    rank, size = 0, 1

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Each summed over the processes, which all call it alike."""
        return list(numbers)

    def sum_(self, tensor: Any) -> None:
        """As `sum`, of a tensor and in place."""

    def any(self, holds: bool) -> bool:
        """Whether it does in one of them."""
        return self.sum([float(holds)])[0] > 0

    def all(self, holds: bool) -> bool:
        """Whether it does in each."""
        return not self.any(not holds)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A sum under way."""

    tensor: Any  # as the caller has given it
    handle: Any = None  # the engine's


class Collective:
    """One world's communication at a time. In a world of one collectives cost nothing.

    By itself it knows worlds of one only, as of a script that runs alone. An engine is a subclass, for worlds of several.

    All members call the same operations in the same order. Those that move data raise `WorldBroken` if a member was lost:
    the contents of the tensors that were to be filled are undefined then.
    """

    engine = "none"  # the library, as users name it
    is_native = False  # it has operations for the framework's own tensors
    takes_gpu = False  # it may be handed tensors on a GPU; else they travel through host memory
    inside = Inside()

    def __init__(self, tensors: TensorAdapter, store: KvStore | None = None) -> None:
        """``store``: where members publish, if there may be others."""
        self.tensors = tensors
        self.world: World = ALONE
        self._has_compared = False  # its engine with rank 0's
        self._asked = Asked(store) if store else None
        self._looked = 0.0  # last, whether another member waits for what its script has asked for
        self._begun, self._begun_in = 0, ALONE  # operations, and in which world
        self._last: deque[str] = deque(maxlen=LAST_OPERATIONS)

    # -- worlds --

    def start(self, world: World) -> None:
        """Connect to the other members.

        Raises:
            WorldBroken: it did not come about; the caller may join the next world.
        """
        self.world = world

    def require_one_engine(self, store: KvStore, world: World) -> None:
        """With ``--collective auto`` each worker takes what it has, and hosts may differ. Of use before `start`.

        Raises:
            UserError: rank 0 has taken another engine.
            WorldBroken: it has not said which.
        """
        if world.size == 1:
            return
        if world.rank == 0:
            store.put(ENGINE, self.engine.encode(), world.version)
        elif not self._has_compared:
            try:
                told = store.get(ENGINE, ENGINE_SECONDS, world.version)
            except Refusal:
                told = None
            if told is None:
                raise WorldBroken(f"rank 0 of world {world.version} has not said which library it uses")
            if told.decode() != self.engine:
                remedy = "give --collective torch"
                if {self.engine, told.decode()} == {TORCH, TORCH_NCCL}:
                    remedy = f"set {SHARED_GPU}=1 for all of them: tensors travel through host memory then"
                raise UserError(
                    f"this worker uses {self.engine} and rank 0 ({world.root.host}) uses {told.decode()}: install the "
                    f"same on all hosts, or {remedy}"
                )
            self._has_compared = True

    def stop(self) -> None:
        """Leave the world; nothing if there is none. Never raises on account of dead peers."""

    def break_world(self, version: int) -> None:
        """Make every blocked call of this world fail now, here and on the other members; nothing if it is not the present one.

        From any thread, also while the world is being connected. The store is told before (`KvStore.break_world`).
        """

    def close(self) -> None:
        """Free what outlives worlds."""

    # -- operations --

    def sum(self, tensor: Any, name: str) -> Any:
        """The sum over the world. All ranks get the same bits. The given tensor may hold the sum then, and is not to be used."""
        return self.sum_([tensor], name)[0]

    def sum_(self, tensors: Sequence[Any], name: str) -> list[Any]:
        """Their sums, all under way at once: in place, if the framework's tensors can be written to."""
        return self.finish([self.begin_sum(tensor, f"{name}.{index}") for index, tensor in enumerate(tensors)])

    def begin_sum(self, tensor: Any, name: str) -> Transfer:
        """As `sum`, without waiting for it: `finish` does. All members begin in the same order."""
        if self.world.size == 1:
            return Transfer(tensor)
        with self._guard():
            self._count(name)
            lent = self.tensors.lend(tensor, natively=self.is_native)
            return Transfer(tensor, self._begin_sum(lent if self.takes_gpu else self.tensors.to_host(lent), name))

    def finish(self, transfers: Iterable[Transfer]) -> list[Any]:
        """Wait until all have come to their end. Returns the sums."""
        if self.world.size == 1:
            return [transfer.tensor for transfer in transfers]
        with self._guard():
            return [self._summed(transfer.tensor, self._wait(transfer.handle)) for transfer in transfers]

    def in_flight(self, transfer: Transfer) -> bool:
        """Whether what has begun may still write to its tensor, though the world is gone."""
        return False

    def sum_asked(self, tensor: Any, what: str) -> None:
        """As `sum_`, where a script decides that it comes to this: a worker that does not is told of. ``what``: in words."""
        if self.world.size > 1:
            begun = self.last_operations().begun
            with self._asked.asking(self.world, begun, what) if self._asked else contextlib.nullcontext():
                self._sum_asked(tensor)

    def barrier(self, name: str) -> None:
        """Return when every member has come here."""
        self.sum(np.zeros(1, np.float32), name)

    def broadcast_array(self, array: Bytes, name: str) -> Bytes:
        """Rank 0's array; all pass one of the same length. May be the given one, overwritten."""
        return self._move(array, name, lambda lent: self._begin_broadcast(lent, name))

    def exchange(self, array: Bytes, sent: list[int], received: list[int], name: str) -> Bytes:
        """The parts of the array go to the ranks in turn, one to each. Returns what has come from the ranks in turn.

        ``sent``, ``received``: by rank, how many bytes; parts may be unequal, or empty. What one member sends to another is
        what that one expects from it.
        """
        return self._move(array, name, lambda lent: self._begin_exchange(lent, sent, received, name))

    def send_array(self, array: Bytes, receiver: int, name: str) -> Bytes:
        """Rank 0's array on the rank ``receiver``, on the others nothing; all pass one of the same length."""
        sent, received = [0] * self.world.size, [0] * self.world.size
        if self.world.rank == 0:
            sent[receiver] = len(array)
        elif self.world.rank == receiver:
            received[0] = len(array)
        return self.exchange(array[: sum(sent)], sent, received, name)

    def broadcast_bytes(self, data: bytes, name: str) -> bytes:
        """The bytes of rank 0; what the others pass is not looked at."""
        if self.world.size == 1:
            return data
        # Length and beginning travel together: one round trip less for what is small, as is mostly the case.
        head, is_root = np.zeros(HEAD_BYTES, np.uint8), self.world.rank == 0
        if is_root:
            start = len(data).to_bytes(8, "little") + data[: HEAD_BYTES - 8]
            head[: len(start)] = np.frombuffer(start, np.uint8)
        received = self.broadcast_array(head, f"{name}.head").tobytes()
        length = int.from_bytes(received[:8], "little")
        if length <= HEAD_BYTES - 8:
            return received[8 : 8 + length]
        rest = np.empty(length - (HEAD_BYTES - 8), np.uint8)
        if is_root:
            rest[:] = np.frombuffer(data, np.uint8, offset=HEAD_BYTES - 8)
        return received[8:] + self.broadcast_array(rest, f"{name}.rest").tobytes()

    def gather(self, array: Bytes, name: str) -> list[Bytes]:
        """On rank 0 the arrays of all members by rank, of any lengths; on the others nothing."""
        if self.world.size == 1:
            return [array]
        mine = np.zeros(self.world.size)
        mine[self.world.rank] = len(array)
        lengths = np.asarray(self.sum(mine, f"{name}.lengths")).astype(np.int64)
        parts: list[list[Bytes]] = [[] for _ in lengths]
        for start in range(0, int(lengths.max()), GATHERED_BYTES):
            sizes = np.clip(lengths - start, 0, GATHERED_BYTES)
            piece = array[start : start + GATHERED_BYTES]
            sent = [len(piece), *[0] * (self.world.size - 1)]
            received = sizes.tolist() if self.world.rank == 0 else [0] * self.world.size
            piece = self.exchange(piece, sent, received, f"{name}.piece")
            if self.world.rank == 0:
                for whole, part in zip(parts, np.split(piece, np.cumsum(sizes)[:-1]), strict=True):
                    whole.append(part)
        return [np.concatenate(part) if part else np.empty(0, np.uint8) for part in parts if self.world.rank == 0]

    def last_operations(self) -> Operations:
        """What this member has begun in the present world, ended or not; from any thread. For people who look for the member
        that does something else than the others."""
        return Operations(self._begun, tuple(self._last)) if self._begun_in is self.world else Operations()

    # -- what engines have --

    def _summed(self, tensor: Any, result: Any) -> Any:
        return np.asarray(result) if isinstance(tensor, np.ndarray) else self.tensors.summed(tensor, result)

    def _move(self, array: Bytes, name: str, begin: Callable[[Any], Any]) -> Bytes:
        """What an operation on the host makes of the array."""
        if self.world.size == 1:
            return array
        with self._guard():
            self._count(name)
            return np.asarray(self._wait(begin(self.tensors.lend(array, natively=self.is_native))))

    def _sum_asked(self, tensor: Any) -> None:
        self.sum_([tensor], "elasticdl.asked")

    def _look_for_asked(self, began: float) -> None:
        """For engines, now and then while they wait since ``began``.

        Raises:
            UserError: this member waits for long, and another waits for what its script alone has asked for.
        """
        now = time.monotonic()
        if self._asked is not None and now - max(began, self._looked) > PATIENCE:
            self._looked = now
            told = self.last_operations()
            last = told.last[-1].rstrip(".0123456789") if told.last else "the next world"
            self._asked.look(self.world, told.begun, last)

    def _count(self, name: str) -> None:
        """An operation of this name begins."""
        if self._begun_in is not self.world:
            self._begun, self._begun_in = 0, self.world
            self._last.clear()
        self._begun += 1
        self._last.append(name)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Within, an error whose cause is the world becomes `WorldBroken`, and one of memory the worker's; others pass."""
        try:
            with memory_of_the_worker(f"a collective of world {self.world.version}"):
                yield
        except Exception as error:
            if not self._is_failure(error):
                raise
            raise world_broken(f"a collective of world {self.world.version} failed", error) from error

    def _is_failure(self, error: Exception) -> bool:
        """Whether a lost member is the cause."""
        return False

    def _begin_sum(self, lent: Any, name: str) -> Any:
        """Returns what `_wait` takes. The engine may write to the memory that it is lent."""

    def _begin_broadcast(self, lent: Any, name: str) -> Any:
        """From rank 0. What is lent is on the host."""

    def _begin_exchange(self, lent: Any, sent: list[int], received: list[int], name: str) -> Any:
        """As the last one."""

    def _wait(self, handle: Any) -> Any:
        """The result, in the memory that was lent or in other."""


def world_broken(what: str, error: BaseException) -> WorldBroken:
    """For the journal. What the library says of it ("Connection closed by peer") goes to this worker's log alone."""
    log.info("%s: %s", what, one_line(error))
    return WorldBroken(f"{what}: one of its workers is lost, or out of reach")


@contextlib.contextmanager
def memory_of_the_worker(what: str) -> Iterator[None]:
    """Within, an error that says so becomes one whose cause is this worker, and not the user's code.

    Raises:
        ShortOfMemoryError: there was too little memory for it, on the device or the host.
    """
    try:
        yield
    except Exception as error:
        if any(each.__name__ in MEMORY_ERRORS for each in type(error).__mro__) or "out of memory" in str(error).lower():
            raise ShortOfMemoryError(f"too little memory for {what}: {one_line(error)}") from error
        raise


# Waiting for what can only be looked at.

# Between two looks: a small part of the time waited so far, within bounds in seconds.
SLEEP_PART = 1 / 16
SHORTEST_SLEEP = 50e-6
LONGEST_SLEEP = 1e-3


def naps() -> Iterator[float]:
    """The seconds waited so far, again and again, with a sleep in between."""
    began = time.monotonic()
    while True:
        waited = time.monotonic() - began
        yield waited
        time.sleep(min(max(waited * SLEEP_PART, SHORTEST_SLEEP), LONGEST_SLEEP))
