"""Horovod behind the port. Its worlds are on Gloo; tensors on a GPU travel by NCCL where Horovod was built with it."""

from __future__ import annotations

import atexit
import importlib
import os
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from elasticdl.common.credentials import SHARED_GPU, refuse_variables
from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.port import Collective, TensorAdapter, naps, world_broken
from elasticdl.elastic.core.protocol import World
from elasticdl.elastic.link.store import LOOPBACK, KvServer, shut_published

RAISERS = ("horovod", "tensorflow")  # packages
TENSORFLOW_ERRORS = frozenset({"UnknownError", "AbortedError", "CancelledError"})
# Known to Horovod as `scripts/build_horovod.py` builds it, and to no other: its thread sleeps while there is nothing to sum.
IDLE_CYCLE_MS = 20


def prepare_horovod(environ: Mapping[str, str]) -> None:
    """Before anything of the user's is built on Horovod: what is built while it is off assumes a fixed world.

    Raises:
        UserError: the environment holds variables that an elastic Horovod can't bear.
    """
    refuse_variables(environ)
    os.environ["HOROVOD_ELASTIC"] = "1"


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


def horovod_host(world: World) -> str:
    """The name of the host that Horovod is told this worker runs on: one of its own.

    A worker sees one device, so its local rank is 0. And a host of its own saves Horovod two of the three full meshes
    that it builds on each init (all workers, those of one host, those with one local rank on all hosts).
    """
    return f"{world.own.host}-{world.own.worker_id}"


class HorovodWorld:
    """Starts, stops and breaks Horovod's Gloo world inside this process."""

    def __init__(self, hvd: Any, server: KvServer, interface: str) -> None:
        self.store = server.store
        self._hvd = hvd
        self._server = server
        self._interface = interface

    def start(self, world: World) -> None:
        """Raises:
        WorldBroken: it could not be connected.
        """
        os.environ.update(self._variables(world))
        # In its elastic mode it asks for its place when it is started a second time.
        place = f"{world.rank},{world.size},0,1,0,1".encode()
        self.store.receive(world.version, ("rank_and_size", f"{horovod_host(world)}:0"), place)
        try:
            self._hvd.init()
        except (RuntimeError, ValueError) as error:
            raise world_broken(f"world {world.version} could not be connected", error) from error

    def stop(self) -> None:
        self._hvd.shutdown()

    def break_world(self, version: int) -> None:
        """From any thread, also while the world is being connected."""
        shut_published(self.store.values(version), listening=True)

    def close(self) -> None:
        self._server.close()

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


def takes_horovod(engine: str, tensors: TensorAdapter) -> bool:
    """``engine``: as ``--collective``, where auto is Horovod if it can be imported and has Gloo."""
    if engine == "auto":
        try:
            return bool(importlib.import_module(tensors.horovod).gloo_built())
        except ImportError:
            return False
    return engine == "horovod"


def require_horovod(tensors: TensorAdapter) -> ModuleType:
    """Horovod's module for the framework, or one line that says what is missing.

    Raises:
        UserError: Horovod is not installed, was built without the framework, or without Gloo.
    """
    try:
        hvd = importlib.import_module(tensors.horovod)
    except ImportError as error:
        raise UserError(
            f"Horovod with {tensors.title} is needed and can't be imported ({error}); `make setup` builds it, --collective torch "
            f"does without, or install it with HOROVOD_WITH_{tensors.title.upper()}=1 HOROVOD_WITH_GLOO=1"
        ) from error
    if not hvd.gloo_built():
        raise UserError(
            "this Horovod was built without Gloo, which elastic jobs need: rebuild with HOROVOD_WITH_GLOO=1"
        )
    return hvd


class HorovodCollective(Collective):
    """In a world of one, too, Horovod is there for the user."""

    engine = "horovod"
    is_native = True

    def __init__(self, tensors: TensorAdapter, hvd: ModuleType, connection: HorovodWorld) -> None:
        """``hvd``: Horovod's module for the framework."""
        super().__init__(tensors, connection.store)
        self._hvd, self._connection = hvd, connection
        # NCCL refuses two ranks on one GPU.
        self.takes_gpu = tensors.has_gpu and bool(hvd.nccl_built()) and SHARED_GPU not in os.environ
        self._operations: Any = tensors.operations(hvd, on_gpu=self.takes_gpu)  # of the framework
        atexit.register(connection.stop)

    def start(self, world: World) -> None:
        super().start(world)
        self._connection.start(world)
        # By which each `init` has the world end before what was registered earlier, as the last vote of a script.
        atexit.unregister(self._hvd.mpi_ops._basics.shutdown)

    def stop(self) -> None:
        self._connection.stop()

    def break_world(self, version: int) -> None:
        self._connection.break_world(version)

    def close(self) -> None:
        self._connection.close()

    def _is_failure(self, error: Exception) -> bool:
        return is_failure(error)

    def _begin_sum(self, lent: Any, name: str) -> Any:
        return self._operations.allreduce_async_(lent, op=self._operations.Sum, name=name)

    def _begin_broadcast(self, lent: Any, name: str) -> Any:
        return self._operations.broadcast_async_(lent, root_rank=0, name=name)

    def _begin_exchange(self, lent: Any, sent: list[int], received: list[int], name: str) -> Any:
        splits = self.tensors.lend(np.array(sent, np.int32), natively=True)
        return self._operations.alltoall_async(lent, splits, name)

    def _wait(self, handle: Any) -> Any:
        """``synchronize`` alone spins, on a core that the transfer itself may need."""
        began = time.monotonic()
        for _ in naps():
            if self._operations.poll(handle):
                break
            self._look_for_asked(began)
        result = self._operations.synchronize(handle)
        return result[0] if isinstance(result, tuple) else result  # of an exchange, beside what has come from whom
