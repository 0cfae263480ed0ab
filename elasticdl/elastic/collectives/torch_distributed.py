"""torch.distributed behind the port: each world has a process group of its own, made and dropped inside the process.

Nothing global of torch.distributed is touched: `init_process_group` is the user's.

Gloo can't be told to give up. So a world is connected in a thread of its own, which is left to itself if the world breaks
meanwhile: it ends within twice `CONNECT_SECONDS`, and is waited for at the end. Who waits in a collective is woken by shutting the world's connections; but not
who is in the middle of a transfer, which Gloo forgets when a connection ends (`Pair::signalException` passes over it). That
collective is left to itself, too: its thread stays until `COLLECTIVE_TIMEOUT`.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elasticdl.elastic.collectives.port import Bytes, Collective, Endpoint, memory_of_the_worker
from elasticdl.elastic.collectives.sockets import break_connections
from elasticdl.elastic.collectives.store import KvStore
from elasticdl.elastic.core.errors import WorldBroken
from elasticdl.elastic.core.world import World

CONNECT_SECONDS = 10.0
# Ranks may be apart for as long as an evaluation takes. After this time the world is left, and the next one goes on.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
# In a broken world: until a collective has failed by itself, or is left alone.
GRACE_SECONDS = 0.05
LOOK = timedelta(milliseconds=25)  # while waiting, for a break
SCOPE = "gloo"
Group: Any = dist.ProcessGroupGloo  # of which torch's annotations tell nothing


class WorldStore(dist.Store):  # type: ignore[misc, name-defined]
    """The entries of one world, as torch's C++ asks for them."""

    def __init__(self, store: KvStore, version: int) -> None:
        super().__init__()
        self._store = store
        self._version = version

    def set(self, key: str, value: str | bytes) -> None:
        self._store.put((SCOPE, key), value.encode() if isinstance(value, str) else bytes(value), self._version)

    def get(self, key: str) -> bytes:
        value = self._store.get((SCOPE, key), CONNECT_SECONDS, self._version)
        if value is None:
            raise TimeoutError(f"{key} of world {self._version} has not come for {CONNECT_SECONDS:g} s")
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


class _Attempt:
    """To connect one world."""

    def __init__(self, store: KvStore, world: World, device: object) -> None:
        self._store = store
        self._world = world
        self._device = device
        self.thread = threading.Thread(target=self._connect, name=f"elasticdl-connect-{world.version}", daemon=True)
        self._changed = threading.Condition()
        self._over = self._given_up = False
        self._group: Any = None
        self._error: Exception | None = None

    def run(self) -> Any:
        """Raises:
        WorldBroken: it could not be connected, or was given up.
        """
        self.thread.start()
        with self._changed:
            # The store's and Gloo's timeouts come one after the other.
            self._changed.wait_for(lambda: self._over or self._given_up, 3 * CONNECT_SECONDS)
            group, self._group = self._group, None
            self._given_up = True
        if group is None:
            why = self._error or "it is broken"
            raise WorldBroken(f"world {self._world.version} could not be connected: {why}") from self._error
        return group

    def give_up(self) -> None:
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def _connect(self) -> None:
        group, error = None, None
        options = Group._Options()
        options._timeout = timedelta(seconds=CONNECT_SECONDS)
        options._devices, options._threads = [self._device], 1
        world = self._world
        try:
            group = Group(WorldStore(self._store, world.version), world.rank, world.size, options)
        except Exception as failure:  # noqa: BLE001  whatever it is, the world has not come about
            error = failure
        with self._changed:
            self._over, self._error = True, error
            self._group = None if self._given_up else group
            self._changed.notify_all()


class TorchDistributed(Collective):
    """Collectives on torch tensors in host memory. In a world of one nothing is connected."""

    engine = "torch"

    def __init__(self, endpoint: Endpoint | None) -> None:
        """Without an endpoint only worlds of one are possible (a script that runs alone)."""
        super().__init__()
        self._endpoint = endpoint
        self._device: object | None = None  # its thread serves one world after another
        self._changing = threading.Lock()
        self._attempt: _Attempt | None = None
        self._left_alone: list[threading.Thread] = []  # they connect to worlds that were given up
        self._group: Any = None
        self._works: list[Any] = []  # begun and not waited for
        self._broken_since: float | None = None

    def start(self, world: World) -> None:
        with self._changing:
            self.world, self._broken_since = world, None
        if self._endpoint is None or world.size == 1:
            return
        if self._device is None:
            self._device = Group.create_device(interface=self._endpoint.interface)
        attempt = _Attempt(self._endpoint.store, world, self._device)
        with self._changing:
            self._attempt = attempt
        try:
            self._group = attempt.run()
        finally:
            with self._changing:
                self._attempt = None
            self._left_alone = [each for each in (*self._left_alone, attempt.thread) if each.is_alive()]

    def stop(self) -> None:
        if any(not work.is_completed() for work in self._works):
            self._keep_group()
        self._group = None
        self._works.clear()

    def close(self) -> None:
        self._device = None
        for thread in self._left_alone:  # Python would end the process while it is in C++
            thread.join(2 * CONNECT_SECONDS)

    def break_world(self, version: int) -> None:
        if self._endpoint is None:
            return
        with self._changing:
            if version != self.world.version:
                return
            self._broken_since = time.monotonic()
            if self._attempt is not None:
                self._attempt.give_up()
        break_connections(self._endpoint.store.values(version), listening=False)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[Any]:
        """Within, an error whose cause is the world becomes `WorldBroken`, and one of memory the worker's; others pass."""
        try:
            with memory_of_the_worker(f"a collective of world {self.world.version}"):
                yield self._connected
        except RuntimeError as error:
            if "gloo" not in str(error).lower():
                raise
            raise WorldBroken(f"a collective of world {self.world.version} failed: {error}") from error

    @property
    def _connected(self) -> Any:
        assert self._group is not None, "a world of several workers is connected"
        return self._group

    def _begin_sum(self, tensor: torch.Tensor, name: str) -> Any:
        options = dist.AllreduceOptions()
        options.timeout = COLLECTIVE_TIMEOUT
        return self._note(self._connected.allreduce([tensor], options))

    def _begin_broadcast(self, tensor: torch.Tensor, name: str) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, COLLECTIVE_TIMEOUT
        return self._note(self._connected.broadcast([tensor], options))

    def _note(self, work: Any) -> Any:
        self._works.append(work)
        return work

    def _wait(self, work: Any) -> None:
        while True:
            try:
                work.wait(LOOK)
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # it has failed, or was done just now
                elif self._broken_since is None or time.monotonic() - self._broken_since < GRACE_SECONDS:
                    continue
                else:
                    raise WorldBroken(f"world {self.world.version} broke in the middle of a transfer") from None
            self._works.remove(work)
            return

    def _keep_group(self) -> None:
        """Never free the group: its destructor would wait for what is under way."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    def _send_to_root(self, array: Bytes, sizes: list[int], name: str) -> Bytes:
        sent = [len(array), *[0] * (self.world.size - 1)]
        received = sizes if self.world.rank == 0 else [0] * self.world.size
        out = torch.empty(sum(received), dtype=torch.uint8)
        options = dist.AllToAllOptions()
        options.timeout = COLLECTIVE_TIMEOUT
        with self._guard() as group:
            self._wait(self._note(group.alltoall_base(out, torch.from_numpy(array), received, sent, options)))
        return out.numpy()
