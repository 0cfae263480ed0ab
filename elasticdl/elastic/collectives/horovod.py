"""Horovod behind the port: its worlds on Gloo, and what its collectives share on all frameworks.

What moves a framework's own tensors is in `elasticdl.elastic.torch.collective` and `elasticdl.elastic.keras.collective`.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from elasticdl.common.environment import SHARED_GPU
from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.port import Bytes, Collective, Endpoint, memory_of_the_worker
from elasticdl.elastic.collectives.sockets import shut_published
from elasticdl.elastic.collectives.store import LOOPBACK, published_values
from elasticdl.elastic.core.errors import WorldBroken
from elasticdl.elastic.core.world import ALONE, World, horovod_host

log = logging.getLogger(__name__)

HEAD_BYTES = 1 << 14
GATHERED_BYTES = 8 << 20  # of each member, that rank 0 receives at once

RAISERS = ("horovod", "tensorflow")  # packages
TENSORFLOW_ERRORS = frozenset({"UnknownError", "AbortedError", "CancelledError"})

# By these names, too, a user's function may ask Horovod for the number of workers.
KERAS_ALIASES = ("horovod.keras", "horovod.tensorflow.keras")


class HorovodModule(Protocol):
    """The part of ``horovod.torch`` (or ``.tensorflow``) that is the same for all frameworks."""

    def init(self) -> None: ...
    def shutdown(self) -> None: ...
    def is_initialized(self) -> bool: ...


def is_failure(error: BaseException) -> bool:
    """Whether a lost member is the cause of an error that a Horovod operation has raised.

    In PyTorch Horovod raises one class for all that fails. In TensorFlow it says "unknown" when the wire fails and
    "aborted" when it was shut down by somebody. Where ranks disagree on a tensor, the caller is the cause.
    """
    names = {each.__name__ for each in type(error).__mro__ if each.__module__.partition(".")[0] in RAISERS}
    text = str(error)
    if "Horovod has not been initialized" in text:
        return bool(names) or isinstance(error, ValueError)
    in_tensorflow = "horovod" in text.lower() and bool(names & TENSORFLOW_ERRORS)
    return ("HorovodInternalError" in names or in_tensorflow) and "Mismatched" not in text


class HorovodWorld:
    """Starts, stops and breaks Horovod's Gloo world inside this process."""

    def __init__(self, hvd: HorovodModule, endpoint: Endpoint) -> None:
        self._hvd = hvd
        self._endpoint = endpoint

    def start(self, world: World) -> None:
        """Raises:
        WorldBroken: it could not be connected.
        """
        # Operations built outside a world (a hook, a traced function) must not assume that its size is for ever.
        os.environ.update(self._variables(world))
        try:
            # With elastic mode on, a second init would ask the store for its rank; here the rank is known.
            os.environ["HOROVOD_ELASTIC"] = "0"
            self._hvd.init()
        except (RuntimeError, ValueError) as error:
            raise WorldBroken(f"world {world.version} could not be connected: {error}") from error
        finally:
            os.environ["HOROVOD_ELASTIC"] = "1"

    def stop(self) -> None:
        self._hvd.shutdown()

    def break_world(self) -> None:
        """From any thread, also while the world is being connected."""
        try:
            count = shut_published(published_values(self._endpoint.store_port))
        except OSError as error:
            log.warning("the world's sockets could not be found: %s", error)
        else:
            log.debug("shut %d sockets of the world", count)

    def _variables(self, world: World) -> dict[str, str]:
        values = {
            "RANK": world.rank,
            "SIZE": world.size,
            "LOCAL_RANK": 0,
            "LOCAL_SIZE": 1,
            "CROSS_RANK": 0,
            "CROSS_SIZE": 1,
            "HOSTNAME": horovod_host(world),
            "GLOO_RENDEZVOUS_ADDR": LOOPBACK,
            "GLOO_RENDEZVOUS_PORT": self._endpoint.store_port,
            "GLOO_IFACE": self._endpoint.interface,
            "CONTROLLER": "gloo",
            "CPU_OPERATIONS": "gloo",
        }
        return {f"HOROVOD_{name}": str(value) for name, value in values.items()}


class HorovodCollective(Collective, ABC):
    """One world at a time; in a world of one collectives cost nothing, and Horovod is still there for the user."""

    module: ClassVar[str]  # of Horovod's, for the framework
    title: ClassVar[str]  # of the framework

    @classmethod
    def open(cls, endpoint: Endpoint | None, *, has_gpu: bool) -> Self:
        """For worlds of one, without Horovod, if there is no endpoint. ``has_gpu``: this worker sees one.

        Raises:
            UserError: as `require_horovod`.
        """
        if endpoint is None:
            return cls(None, None, reduce_on_gpu=False)
        hvd = cls.require_horovod()
        # NCCL refuses two ranks on one GPU.
        return cls(hvd, endpoint, reduce_on_gpu=has_gpu and bool(hvd.nccl_built()) and SHARED_GPU not in os.environ)

    @classmethod
    def require_horovod(cls) -> ModuleType:
        """Horovod's module for the framework, or one line that says what is missing.

        Raises:
            UserError: Horovod is not installed, was built without the framework, or without Gloo.
        """
        try:
            hvd = importlib.import_module(cls.module)
        except ImportError as error:
            raise UserError(
                f"Horovod with {cls.title} is needed and can't be imported ({error}); `make setup` builds it, "
                f"or install it with HOROVOD_WITH_{cls.title.upper()}=1 HOROVOD_WITH_GLOO=1"
            ) from error
        if not hvd.gloo_built():
            raise UserError(
                "this Horovod was built without Gloo, which elastic jobs need: rebuild with HOROVOD_WITH_GLOO=1"
            )
        return hvd

    def __init__(self, hvd: ModuleType | None, endpoint: Endpoint | None, *, reduce_on_gpu: bool) -> None:
        """Without ``hvd`` only worlds of one are possible (a script that runs alone).

        ``reduce_on_gpu``: Horovod may be handed tensors on a GPU; else they travel through host memory.
        """
        self._hvd = hvd
        self._connection = HorovodWorld(hvd, endpoint) if hvd and endpoint else None
        self._reduce_on_gpu = reduce_on_gpu
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

    def broadcast_bytes(self, data: bytes, name: str) -> bytes:
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
        if self.world.size == 1:
            return [array]
        mine = np.zeros(self.world.size)
        mine[self.world.rank] = len(array)
        lengths = self._sum_array(mine, f"{name}.lengths").astype(np.int64)
        parts: list[list[Bytes]] = [[] for _ in lengths]
        for start in range(0, int(lengths.max()), GATHERED_BYTES):
            piece = self._send_to_root(array[start : start + GATHERED_BYTES], f"{name}.piece")
            if self.world.rank == 0:
                ends = np.cumsum(np.clip(lengths - start, 0, GATHERED_BYTES))
                for received, part in zip(parts, np.split(piece, ends[:-1]), strict=True):
                    received.append(part)
        return [np.concatenate(part) if part else np.empty(0, np.uint8) for part in parts if self.world.rank == 0]

    @contextlib.contextmanager
    def pretend_size(self, workers: int) -> Iterator[None]:
        """So does ``hvd.size()``."""
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
    def _sum_array(self, array: Any, name: str) -> Any:
        """The sum over the world of a float64 array."""

    @abstractmethod
    def _send_to_root(self, array: Bytes, name: str) -> Bytes:
        """On rank 0 the arrays of all members one after the other, on others nothing."""

    @contextlib.contextmanager
    def _guard(self) -> Iterator[ModuleType]:
        """Within, an error whose cause is the world becomes `WorldBroken`, and one of memory the worker's; others pass."""
        assert self._hvd is not None, "a world of several workers needs Horovod"
        try:
            with memory_of_the_worker(f"a collective of world {self.world.version}"):
                yield self._hvd
        except Exception as error:
            if not is_failure(error):
                raise
            raise WorldBroken(f"a collective of world {self.world.version} failed: {error}") from error

    def _modules(self) -> list[ModuleType]:
        if self._hvd is None:
            return []
        return [self._hvd, *(sys.modules[name] for name in KERAS_ALIASES if name in sys.modules)]
