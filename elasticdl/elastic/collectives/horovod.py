"""What the collectives of all frameworks share, on top of one Horovod world after the other."""

from __future__ import annotations

import contextlib
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.port import Collective, Endpoint, HorovodWorld
from elasticdl.elastic.core.errors import WorldBroken
from elasticdl.elastic.core.world import ALONE, World

Bytes = npt.NDArray[np.uint8]

HEAD_BYTES = 1 << 14

# By these names, too, a user's function may ask Horovod for the number of workers.
KERAS_ALIASES = ("horovod.keras", "horovod.tensorflow.keras")


def import_horovod_for(framework: str, title: str) -> ModuleType:
    """``horovod.<framework>``, or one line that says what is missing.

    Raises:
        UserError: Horovod is not installed, was built without the framework, or without Gloo.
    """
    try:
        hvd = importlib.import_module(f"horovod.{framework}")
    except ImportError as error:
        raise UserError(
            f"Horovod with {title} is needed and can't be imported ({error}); `make setup` builds it, "
            f"or install it with HOROVOD_WITH_{title.upper()}=1 HOROVOD_WITH_GLOO=1"
        ) from error
    if not hvd.gloo_built():
        raise UserError(
            "this Horovod was built without Gloo, which elastic jobs need: rebuild with HOROVOD_WITH_GLOO=1"
        )
    return hvd


class HorovodCollective(Collective, ABC):
    """One world at a time; in a world of one collectives cost nothing, and Horovod is still there for the user."""

    def __init__(self, hvd: ModuleType | None, endpoint: Endpoint | None) -> None:
        """Without ``hvd`` only worlds of one are possible (a script that runs alone)."""
        self._hvd = hvd
        self._connection = HorovodWorld(hvd, endpoint) if hvd and endpoint else None
        self.world: World = ALONE

    def start(self, world: World) -> None:
        self.world = world
        if self._connection:
            self._connection.start(world)

    def stop(self) -> None:
        if self._connection:
            self._connection.stop()

    def break_world(self) -> None:
        if self._connection:
            self._connection.break_world()

    @abstractmethod
    def barrier(self, name: str) -> None:
        """Return when every member has come here.

        Raises:
            WorldBroken: one of them never will.
        """

    def broadcast_bytes(self, data: bytes, name: str) -> bytes:
        """The bytes of rank 0; what the others pass is not looked at.

        Raises:
            WorldBroken: nothing was received.
        """
        if self.world.size == 1:
            return data
        # Length and beginning travel together: one round trip less for what is small, as an outline mostly is.
        head, is_root = np.zeros(HEAD_BYTES, np.uint8), self.world.rank == 0
        if is_root:
            start = len(data).to_bytes(8, "little") + data[: HEAD_BYTES - 8]
            head[: len(start)] = np.frombuffer(start, np.uint8)
        received = self._broadcast_array(head, f"{name}.head").tobytes()
        length = int.from_bytes(received[:8], "little")
        if length <= HEAD_BYTES - 8:
            return received[8 : 8 + length]
        rest = np.empty(length - (HEAD_BYTES - 8), np.uint8)
        if is_root:
            rest[:] = np.frombuffer(data, np.uint8, offset=HEAD_BYTES - 8)
        return received[8:] + self._broadcast_array(rest, f"{name}.rest").tobytes()

    @contextlib.contextmanager
    def pretend_size(self, workers: int) -> Iterator[None]:
        """Within, ``hvd.size()`` and the world tell this number: to see whether a user's function depends on it."""
        world = self.world
        modules: list[dict[str, Any]] = [vars(module) for module in self._modules()]
        real = [functions.get("size") for functions in modules]
        self.world = replace(world, members=(world.members * workers)[:workers])
        for functions in modules:
            functions["size"] = lambda *_: workers
        try:
            yield
        finally:
            self.world = world
            for functions, size in zip(modules, real, strict=True):
                functions["size"] = size

    @abstractmethod
    def _broadcast_array(self, array: Bytes, name: str) -> Bytes:
        """Rank 0's array; all have the same length. May be the given one, overwritten."""

    @abstractmethod
    def _is_failure(self, error: Exception) -> bool:
        """Whether the world is the cause of this error, and not the caller."""

    @contextlib.contextmanager
    def _guard(self) -> Iterator[ModuleType]:
        """Within, an error whose cause is the world becomes `WorldBroken`; others pass."""
        assert self._hvd is not None, "a world of several workers needs Horovod"
        try:
            yield self._hvd
        except Exception as error:
            if not self._is_failure(error):
                raise
            raise WorldBroken(f"a collective of world {self.world.version} failed: {error}") from error

    def _modules(self) -> list[ModuleType]:
        if self._hvd is None:
            return []
        return [self._hvd, *(sys.modules[name] for name in KERAS_ALIASES if name in sys.modules)]
