"""The port between the elastic loop and the library that moves tensors, and Horovod's side of it.

What differs between frameworks (tensors and their reductions) is in the twins (`elasticdl.elastic.torch.collective`);
what is the same, starting, stopping and breaking a Horovod world inside a living process, is here.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from typing import Protocol

from elasticdl.elastic.collectives.breaking import SocketId, open_sockets, shut
from elasticdl.elastic.core.errors import WorldBroken
from elasticdl.elastic.core.world import World, horovod_host

log = logging.getLogger(__name__)


class Collective(Protocol):
    """One world's communication at a time."""

    def start(self, world: World) -> None:
        """Connect to the other members.

        Raises:
            WorldBroken: it did not come about; the caller may join the next world.
        """

    def stop(self) -> None:
        """Leave the world; nothing if there is none. Never raises on account of dead peers."""

    def break_world(self) -> None:
        """Make every blocked call of this world fail now, here and on the other members. From any thread."""


class HorovodModule(Protocol):
    """The part of ``horovod.torch`` (or ``.tensorflow``) that is the same for all frameworks."""

    def init(self) -> None: ...
    def shutdown(self) -> None: ...
    def is_initialized(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where this worker's Horovod finds its store and by which interface it talks."""

    store_port: int
    master_port: int
    interface: str


class HorovodWorld:
    """Starts, stops and breaks Horovod's Gloo world inside this process."""

    def __init__(self, hvd: HorovodModule, endpoint: Endpoint) -> None:
        self._hvd = hvd
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._before: frozenset[SocketId] | None = None  # open when the present init began
        self._sockets: frozenset[SocketId] = frozenset()

    def start(self, world: World) -> None:
        # Operations built outside a world (a hook, a traced function) must not assume that its size is for ever.
        os.environ.update(self._variables(world))
        with self._lock:
            self._before = open_sockets()
        try:
            # With elastic mode on, a second init would ask the store for its rank; here the rank is known.
            os.environ["HOROVOD_ELASTIC"] = "0"
            self._hvd.init()
        except (RuntimeError, ValueError) as error:
            raise WorldBroken(f"world {world.version} could not be connected: {error}") from error
        finally:
            os.environ["HOROVOD_ELASTIC"] = "1"
            with self._lock:
                self._sockets = open_sockets() - (self._before or frozenset())
                self._before = None

    def stop(self) -> None:
        self._hvd.shutdown()
        with self._lock:
            self._sockets = frozenset()

    def break_world(self) -> None:
        with self._lock:
            mine = self._sockets if self._before is None else open_sockets() - self._before
            spare = frozenset({self._endpoint.store_port, self._endpoint.master_port})
            count = shut(mine, spare_ports=spare)
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
            "GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "GLOO_RENDEZVOUS_PORT": self._endpoint.store_port,
            "GLOO_IFACE": self._endpoint.interface,
            "CONTROLLER": "gloo",
            "CPU_OPERATIONS": "gloo",
        }
        return {f"HOROVOD_{name}": str(value) for name, value in values.items()}
