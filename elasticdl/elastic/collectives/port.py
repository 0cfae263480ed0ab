"""The port between elastic training and a library that moves tensors.

`elasticdl.elastic.collectives.horovod` and `elasticdl.elastic.collectives.torch_distributed` are behind it. What moves a
framework's own tensors is added in `elasticdl.elastic.torch_kit.collective` and `elasticdl.elastic.keras.collective`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticdl.common.environment import SHARED_GPU
from elasticdl.common.errors import ShortOfMemoryError, UserError
from elasticdl.common.reason import one_line
from elasticdl.elastic.collectives.asked import Asked
from elasticdl.elastic.core.errors import WorldBroken
from elasticdl.elastic.core.world import ALONE, World
from elasticdl.elastic.link.store import KvStore, Refusal
from elasticdl.elastic.link.witness import Operations

MEMORY_ERRORS = ("MemoryError", "OutOfMemoryError", "ResourceExhaustedError")  # of Python, PyTorch and TensorFlow
Bytes = npt.NDArray[np.uint8]

HEAD_BYTES = 1 << 14
GATHERED_BYTES = 8 << 20  # of each member, that rank 0 receives at once

ENGINE = ("elasticdl", "engine")  # the entry of a world's store in which rank 0 says what it uses
ENGINE_SECONDS = 10.0
LAST_OPERATIONS = 8
TORCH, TORCH_NCCL = "torch", "torch with NCCL"


class Collective(ABC):
    """One world's communication at a time. In a world of one collectives cost nothing.

    All members call the same operations in the same order. Those that move data raise `WorldBroken` if a member was lost:
    nothing was received then.
    """

    engine: str  # the library, as users name it

    def __init__(self) -> None:
        self.world: World = ALONE
        self._has_compared = False  # its engine with rank 0's
        self._asked: Asked | None = None  # where there may be several members
        self._begun, self._begun_in = 0, ALONE  # operations, and in which world
        self._last: deque[str] = deque(maxlen=LAST_OPERATIONS)

    @abstractmethod
    def start(self, world: World) -> None:
        """Connect to the other members.

        Raises:
            WorldBroken: it did not come about; the caller may join the next world.
        """

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
                    f"this worker uses {self.engine} and rank 0 ({world.members[0].host}) uses {told.decode()}: install the "
                    f"same on all hosts, or {remedy}"
                )
            self._has_compared = True

    @abstractmethod
    def stop(self) -> None:
        """Leave the world; nothing if there is none. Never raises on account of dead peers."""

    @abstractmethod
    def break_world(self, version: int) -> None:
        """Make every blocked call of this world fail now, here and on the other members; nothing if it is not the present one.

        From any thread, also while the world is being connected. The store is told before (`KvStore.break_world`).
        """

    @abstractmethod
    def close(self) -> None:
        """Free what outlives worlds."""

    @abstractmethod
    def barrier(self, name: str) -> None:
        """Return when every member has come here."""

    @abstractmethod
    def broadcast_array(self, array: Bytes, name: str) -> Bytes:
        """Rank 0's array; all pass one of the same length. May be the given one, overwritten."""

    def send_array(self, array: Bytes, receiver: int, name: str) -> Bytes:
        """Rank 0's array on the rank ``receiver``, on the others nothing; all pass one of the same length."""
        sent, received = [0] * self.world.size, [0] * self.world.size
        if self.world.rank == 0:
            sent[receiver] = len(array)
        elif self.world.rank == receiver:
            received[0] = len(array)
        return self._exchange(array[: sum(sent)], sent, received, name)

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
        lengths = self._sum_array(mine, f"{name}.lengths").astype(np.int64)
        parts: list[list[Bytes]] = [[] for _ in lengths]
        for start in range(0, int(lengths.max()), GATHERED_BYTES):
            sizes = np.clip(lengths - start, 0, GATHERED_BYTES)
            piece = array[start : start + GATHERED_BYTES]
            sent = [len(piece), *[0] * (self.world.size - 1)]
            received = sizes.tolist() if self.world.rank == 0 else [0] * self.world.size
            piece = self._exchange(piece, sent, received, f"{name}.piece")
            if self.world.rank == 0:
                for whole, part in zip(parts, np.split(piece, np.cumsum(sizes)[:-1]), strict=True):
                    whole.append(part)
        return [np.concatenate(part) if part else np.empty(0, np.uint8) for part in parts if self.world.rank == 0]

    def last_operations(self) -> Operations:
        """What this member has begun in the present world, ended or not; from any thread. For people who look for the member
        that does something else than the others."""
        return Operations(self._begun, tuple(self._last)) if self._begun_in is self.world else Operations()

    def _look_for_asked(self, asked: Asked) -> None:
        """This member waits for long.

        Raises:
            UserError: another waits for what its script alone has asked for.
        """
        told = Collective.last_operations(self)
        last = told.last[-1].rstrip(".0123456789") if told.last else "the next world"
        asked.look(self.world, told.begun, last)

    def _count(self, name: str) -> None:
        """An operation of this name begins."""
        if self._begun_in is not self.world:
            self._begun, self._begun_in = 0, self.world
            self._last.clear()
        self._begun += 1
        self._last.append(name)

    @abstractmethod
    def _sum_array(self, array: Any, name: str) -> Any:
        """The sum over the world of a float64 array."""

    @abstractmethod
    def _exchange(self, array: Bytes, sent: list[int], received: list[int], name: str) -> Bytes:
        """The parts of the array go to the ranks in turn; what came from them in turn. Both lists: bytes, by rank."""


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
