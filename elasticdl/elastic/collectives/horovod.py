"""Horovod behind the port: its worlds on Gloo, and what its collectives share on all frameworks.

What moves a framework's own tensors is in `elasticdl.elastic.torch_kit.collective` and `elasticdl.elastic.keras.collective`.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import ClassVar, Protocol, Self

from elasticdl.common.environment import SHARED_GPU
from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.asked import Asked
from elasticdl.elastic.collectives.port import Collective, memory_of_the_worker
from elasticdl.elastic.core.errors import WorldBroken
from elasticdl.elastic.core.world import World, horovod_host
from elasticdl.elastic.link.sockets import break_connections
from elasticdl.elastic.link.store import LOOPBACK, Endpoint, KvServer

RAISERS = ("horovod", "tensorflow")  # packages
TENSORFLOW_ERRORS = frozenset({"UnknownError", "AbortedError", "CancelledError"})
# Known to Horovod as `scripts/build_horovod.py` builds it, and to no other: its thread sleeps while there is nothing to sum.
IDLE_CYCLE_MS = 20

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

    def __init__(self, hvd: HorovodModule, server: KvServer, interface: str) -> None:
        self._hvd = hvd
        self._server = server
        self._interface = interface

    def start(self, world: World) -> None:
        """Raises:
        WorldBroken: it could not be connected.
        """
        os.environ.update(self._variables(world))
        try:
            self._hvd.init()
        except (RuntimeError, ValueError) as error:
            raise WorldBroken(f"world {world.version} could not be connected: {error}") from error

    def stop(self) -> None:
        self._hvd.shutdown()

    def break_world(self, version: int) -> None:
        """From any thread, also while the world is being connected."""
        break_connections(self._server.store.values(version), listening=True)

    def _variables(self, world: World) -> dict[str, str]:
        values = {
            # Operations built outside a world (a hook, a traced function) must not assume that its size is for ever. And
            # `init` reads here whether NCCL's communicators are aborted, and not waited for, when a member is lost.
            "ELASTIC": 1,
            "RANK": world.rank,
            "SIZE": world.size,
            "LOCAL_RANK": 0,
            "LOCAL_SIZE": 1,
            "CROSS_RANK": 0,
            "CROSS_SIZE": 1,
            "HOSTNAME": horovod_host(world),
            "GLOO_RENDEZVOUS_ADDR": LOOPBACK,
            "GLOO_RENDEZVOUS_PORT": self._server.port,
            "GLOO_IFACE": self._interface,
            "CONTROLLER": "gloo",
            "CPU_OPERATIONS": "gloo",
            "IDLE_CYCLE_TIME": IDLE_CYCLE_MS,
        }
        return {f"HOROVOD_{name}": str(value) for name, value in values.items()}


class HorovodCollective(Collective):
    """In a world of one, too, Horovod is there for the user."""

    engine = "horovod"

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
    def is_wanted(cls, engine: str) -> bool:
        """``engine``: as ``--collective``, where auto is Horovod if it can be imported and has Gloo."""
        if engine == "auto":
            try:
                return bool(importlib.import_module(cls.module).gloo_built())
            except ImportError:
                return False
        return engine != "torch"

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
                f"Horovod with {cls.title} is needed and can't be imported ({error}); `make setup` builds it, --collective torch does without, "
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
        super().__init__()
        self._hvd = hvd
        self._server: KvServer | None = None
        self._connection: HorovodWorld | None = None
        if hvd and endpoint:
            self._asked = Asked(endpoint.store)
            self._server = KvServer(endpoint.store)
            self._connection = HorovodWorld(hvd, self._server, endpoint.interface)
            atexit.register(self._connection.stop)
        self._reduce_on_gpu = reduce_on_gpu

    def start(self, world: World) -> None:
        self.world = world
        if self._connection:
            self._connection.start(world)
            # By which each `init` has the world end before what was registered earlier, as the last vote of a script.
            atexit.unregister(self._horovod.mpi_ops._basics.shutdown)

    def stop(self) -> None:
        if self._connection:
            self._connection.stop()

    def break_world(self, version: int) -> None:
        if self._connection:
            self._connection.break_world(version)

    def close(self) -> None:
        if self._server:
            self._server.close()

    @contextlib.contextmanager
    def _guard(self) -> Iterator[ModuleType]:
        """Within, an error whose cause is the world becomes `WorldBroken`, and one of memory the worker's; others pass."""
        try:
            with memory_of_the_worker(f"a collective of world {self.world.version}"):
                yield self._horovod
        except Exception as error:
            if not is_failure(error):
                raise
            raise WorldBroken(f"a collective of world {self.world.version} failed: {error}") from error

    @property
    def _horovod(self) -> ModuleType:
        assert self._hvd is not None, "a world of several workers needs Horovod"
        return self._hvd

    def _modules(self) -> list[ModuleType]:
        if self._hvd is None:
            return []
        return [self._hvd, *(sys.modules[name] for name in KERAS_ALIASES if name in sys.modules)]
