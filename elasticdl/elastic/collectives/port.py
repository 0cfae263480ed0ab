"""The port between elastic training and a library that moves tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from elasticdl.common.errors import ShortOfMemoryError
from elasticdl.common.reason import one_line
from elasticdl.elastic.core.world import World

MEMORY_ERRORS = frozenset(
    {"MemoryError", "OutOfMemoryError", "ResourceExhaustedError"}
)  # of Python, PyTorch and TensorFlow
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """By which interface this worker talks to the others, and the local port of its store."""

    store_port: int
    interface: str


class Collective(Protocol):
    """One world's communication at a time. What moves a framework's own tensors is added for each framework.

    All members call the same operations in the same order. Those that move data raise `WorldBroken` if a member was lost:
    nothing was received then.
    """

    world: World

    def start(self, world: World) -> None:
        """Connect to the other members.

        Raises:
            WorldBroken: it did not come about; the caller may join the next world.
        """

    def stop(self) -> None:
        """Leave the world; nothing if there is none. Never raises on account of dead peers."""

    def break_world(self) -> None:
        """Make every blocked call of this world fail now, here and on the other members. From any thread."""

    def barrier(self, name: str) -> None:
        """Return when every member has come here."""

    def broadcast_bytes(self, data: bytes, name: str) -> bytes:
        """The bytes of rank 0; what the others pass is not looked at."""

    def broadcast_array(self, array: Bytes, name: str) -> Bytes:
        """Rank 0's array; all pass one of the same length. May be the given one, overwritten."""

    def gather(self, array: Bytes, name: str) -> list[Bytes]:
        """On rank 0 the arrays of all members by rank, of any lengths; on the others nothing."""

    def pretend_size(self, workers: int) -> contextlib.AbstractContextManager[None]:
        """Within, the world tells this number of workers: to see whether a user's function depends on it."""


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
