"""torch.distributed behind the port: each world has process groups of its own, made and dropped inside the process.

Gloo moves what is on the host, and what is on a GPU where NCCL can't: it brings that to pinned memory itself, on streams of
its own. Where each worker has a GPU to itself a second group (`DeviceGroup`) moves what is there.

Nothing global of torch.distributed is touched: `init_process_group` is the user's.

Gloo can't be told to give up. So a world is connected in a thread of its own, which is left to itself if the world breaks
meanwhile: its timeouts end it, and it is waited for at the end. Who waits in a collective is woken by shutting the world's
connections; but not who is in the middle of a transfer, which Gloo forgets when a connection ends (`Pair::signalException`
passes over it). That collective is left to itself, too: its thread stays until `COLLECTIVE_TIMEOUT`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.asked import PATIENCE, Asked
from elasticdl.elastic.collectives.port import TORCH, Bytes, Collective, memory_of_the_worker
from elasticdl.elastic.core.errors import WorldBroken
from elasticdl.elastic.core.world import World
from elasticdl.elastic.link.sockets import break_connections
from elasticdl.elastic.link.store import Endpoint, KvStore
from elasticdl.elastic.link.witness import Operations

CONNECT_SECONDS = 10.0
# Ranks may be apart for as long as an evaluation takes. After this time the world is left, and the next one goes on.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
# In a broken world: until a collective has failed by itself, or is left alone.
GRACE_SECONDS = 0.05
LOOK = timedelta(milliseconds=25)  # while waiting, for a break
DEVICE_SECONDS = 60.0  # at most until a world's group for its GPUs is connected, or has failed
FLIGHT_RECORDS = 4  # told of those that torch has kept
Group: Any = dist.ProcessGroupGloo  # of which torch's annotations tell nothing


class WorldStore(dist.Store):  # type: ignore[misc, name-defined]
    """The entries of one world, as torch's C++ asks for them."""

    def __init__(self, store: KvStore, version: int, scope: str) -> None:
        super().__init__()
        self.version = version
        self._store = store
        self._scope = scope

    def set(self, key: str, value: str | bytes) -> None:
        self._store.put((self._scope, key), value.encode() if isinstance(value, str) else bytes(value), self.version)

    def get(self, key: str) -> bytes:
        value = self._store.get((self._scope, key), CONNECT_SECONDS, self.version)
        if value is None:
            raise TimeoutError(f"{key} of world {self.version} has not come for {CONNECT_SECONDS:g} s")
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


class DeviceWork(Protocol):
    """A collective under way on a device."""

    def wait(self) -> None:
        """Raises:
        WorldBroken: the contents of the tensor are undefined.
        """

    def is_completed(self) -> bool:
        """Nothing is written to the tensor any more."""


class DeviceGroup(Protocol):
    """The members' way from device to device in one world."""

    def begin_sum(self, tensor: torch.Tensor) -> DeviceWork: ...

    def begin_broadcast(self, tensor: torch.Tensor) -> DeviceWork: ...

    def abort(self) -> None:
        """From any thread, which does not wait for it: what is under way fails soon."""

    def close(self) -> None:
        """The world is left."""


# Store, rank, size, and whether the world is no longer wanted; a group that is connected.
OpenDeviceGroup = Callable[[WorldStore, int, int, Callable[[], bool]], DeviceGroup]


def all_reduce(group: Any, tensor: torch.Tensor) -> Any:
    options = dist.AllreduceOptions()
    options.timeout = COLLECTIVE_TIMEOUT
    return group.allreduce([tensor], options)


def broadcast(group: Any, tensor: torch.Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, COLLECTIVE_TIMEOUT
    return group.broadcast([tensor], options)


def flight_record() -> tuple[str, ...]:
    """The last collectives of all groups of this process, as in ``torch 12: gloo:all_reduce of Float [[100]]``."""
    # Not public in torch: without it there is no record.
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    try:
        entries = json.loads(dump())["entries"] if dump is not None else []
    except (ValueError, KeyError, RuntimeError):
        return ()
    return tuple(
        f"torch {entry.get('collective_seq_id')}: {entry.get('profiling_name')} of "
        f"{', '.join(entry.get('input_dtypes', ()))} {entry.get('input_sizes')}"
        for entry in entries[-FLIGHT_RECORDS:]
    )


class _Attempt:
    """To connect one world."""

    def __init__(
        self,
        store: KvStore,
        world: World,
        device: object,
        open_device_group: OpenDeviceGroup | None = None,
        scope: str = "gloo",
    ) -> None:
        self._store = store
        self._scope = scope
        self._world = world
        self._device = device
        self._open_device_group = open_device_group
        self.thread = threading.Thread(target=self._connect, name=f"elasticdl-connect-{world.version}", daemon=True)
        self._changed = threading.Condition()
        self._over = self._given_up = False
        self._groups: tuple[Any, DeviceGroup | None] | None = None
        self._error: Exception | None = None

    def run(self) -> tuple[Any, DeviceGroup | None]:
        """Raises:
        WorldBroken: it could not be connected, or was given up.
        UserError: it never can be.
        """
        self.thread.start()
        with self._changed:
            # The store's and Gloo's timeouts come one after the other.
            longest = 3 * CONNECT_SECONDS + (DEVICE_SECONDS if self._open_device_group else 0.0)
            self._changed.wait_for(lambda: self._over or self._given_up, longest)
            groups, self._groups = self._groups, None
            self._given_up = True
        if isinstance(self._error, UserError):
            raise self._error
        if groups is None:
            why = self._error or "it is broken"
            raise WorldBroken(f"world {self._world.version} could not be connected: {why}") from self._error
        return groups

    def give_up(self) -> None:
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def _connect(self) -> None:
        groups, error = None, None
        try:
            groups = self._open()
        except Exception as failure:  # noqa: BLE001  whatever it is, the world has not come about
            error = failure
        with self._changed:
            self._over, self._error = True, error
            is_wanted = not self._given_up
            self._groups = groups if is_wanted else None
            self._changed.notify_all()
        if groups and groups[1] and not is_wanted:
            groups[1].abort()

    def _open(self) -> tuple[Any, DeviceGroup | None]:
        options = Group._Options()
        options._timeout = timedelta(seconds=CONNECT_SECONDS)
        options._devices, options._threads = [self._device], 1
        version, rank, size = self._world.version, self._world.rank, self._world.size
        group = Group(WorldStore(self._store, version, self._scope), rank, size, options)
        if self._open_device_group is None:
            return group, None
        store = WorldStore(self._store, version, "device")
        return group, self._open_device_group(store, rank, size, lambda: self._given_up)


class TorchDistributed(Collective):
    """Collectives on torch tensors. In a world of one nothing is connected."""

    engine = TORCH

    def __init__(self, endpoint: Endpoint | None, open_device_group: OpenDeviceGroup | None = None) -> None:
        """Without an endpoint only worlds of one are possible (a script that runs alone).

        ``open_device_group``: how tensors on a GPU travel; None: by Gloo, as all others.
        """
        super().__init__()
        self._endpoint = endpoint
        self._open_device_group = open_device_group
        self._device_group: DeviceGroup | None = None
        self._device: object | None = None  # its thread serves one world after another
        self._changing = threading.Lock()
        self._attempt: _Attempt | None = None
        self._left_alone: list[threading.Thread] = []  # they connect to worlds that were given up, or close others
        self._group: Any = None
        self._asked = Asked(endpoint.store) if endpoint else None
        self._group_asked: Any = None  # for what scripts ask for, from the first time in a world on
        self._works: list[Any] = []  # begun and not waited for
        self._broken_since: float | None = None

    def start(self, world: World) -> None:
        with self._changing:
            self.world, self._broken_since = world, None
        if self._endpoint is None or world.size == 1:
            return
        if self._device is None:
            self._device = Group.create_device(interface=self._endpoint.interface)
        with self._attempting(_Attempt(self._endpoint.store, world, self._device, self._open_device_group)) as attempt:
            group, device_group = attempt.run()
            with self._changing:
                self._group, self._device_group = group, device_group
                is_broken = self._broken_since is not None
            if is_broken and device_group is not None:
                device_group.abort()

    @contextlib.contextmanager
    def _attempting(self, attempt: _Attempt) -> Iterator[_Attempt]:
        with self._changing:
            self._attempt = attempt
        try:
            yield attempt
        finally:
            with self._changing:
                self._attempt = None
            self._leave_alone(attempt.thread)

    def stop(self) -> None:
        if any(not work.is_completed() for work in self._works):
            self._keep_group()
        with self._changing:
            groups, device_group = [each for each in (self._group, self._group_asked) if each], self._device_group
            self._group = self._group_asked = self._device_group = None
        self._works.clear()
        if device_group is not None:
            device_group.close()
        if groups:  # Gloo takes up to 10 ms for each connection, which the next world need not wait for
            closing = threading.Thread(target=groups.clear, name=f"elasticdl-close-{self.world.version}", daemon=True)
            closing.start()
            self._leave_alone(closing)

    def close(self) -> None:
        self._device = None
        deadline = time.monotonic() + 2 * CONNECT_SECONDS + (DEVICE_SECONDS if self._open_device_group else 0.0)
        for thread in self._left_alone:  # Python would end the process while it is in C++
            thread.join(max(0.0, deadline - time.monotonic()))

    def break_world(self, version: int) -> None:
        if self._endpoint is None:
            return
        with self._changing:
            if version != self.world.version:
                return
            self._broken_since = time.monotonic()
            if self._attempt is not None:
                self._attempt.give_up()
            if self._device_group is not None:
                self._device_group.abort()
        break_connections(self._endpoint.store.values(version), listening=False)

    def last_operations(self) -> Operations:
        """With what torch's own recorder has of all groups of this process, the user's included."""
        told = super().last_operations()
        return replace(told, last=(*told.last, *flight_record()))

    @contextlib.contextmanager
    def _guard(self) -> Iterator[Any]:
        """Within, an error whose cause is the world becomes `WorldBroken`, and one of memory the worker's; others pass."""
        try:
            with memory_of_the_worker(f"a collective of world {self.world.version}"):
                yield self._connected
        except RuntimeError as error:
            if "gloo" not in str(error).lower() and not isinstance(error, dist.DistBackendError):  # of which NCCL's are
                raise
            raise WorldBroken(f"a collective of world {self.world.version} failed: {error}") from error

    @property
    def _connected(self) -> Any:
        assert self._group is not None, "a world of several workers is connected"
        return self._group

    def _begin_sum(self, tensor: torch.Tensor, name: str) -> Any:
        if tensor.device.type != "cpu" and self._device_group is not None:
            return self._device_group.begin_sum(tensor)
        return self._note(all_reduce(self._connected, tensor))

    def _begin_broadcast(self, tensor: torch.Tensor, name: str) -> Any:
        if tensor.device.type != "cpu" and self._device_group is not None:
            return self._device_group.begin_broadcast(tensor)
        return self._note(broadcast(self._connected, tensor))

    def _begin_asked_sum(self, tensor: torch.Tensor) -> Any:
        """Of what all members ask for at one place. It travels by itself: one that does not ask meets nothing of another size.

        Raises:
            WorldBroken: the members could not be connected for it.
        """
        assert self._asked is not None, "there is a world of several workers"
        if self._group_asked is None:
            assert self._endpoint is not None, "it has connected the world"
            self._asked.meet()
            with self._attempting(
                _Attempt(self._endpoint.store, self.world, self._device, scope="asked.gloo")
            ) as attempt:
                self._group_asked, _ = attempt.run()
        return self._note(all_reduce(self._group_asked, tensor))

    def _note(self, work: Any) -> Any:
        self._works.append(work)
        return work

    def _wait(self, work: Any) -> None:
        if work not in self._works:  # it is the device group's
            work.wait()
            return
        began = time.monotonic()
        while True:
            try:
                work.wait(LOOK)
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # it has failed, or was done just now
                elif self._asked is not None and time.monotonic() - began > PATIENCE and self._broken_since is None:
                    self._look_for_asked(self._asked)
                    continue
                elif self._broken_since is None or time.monotonic() - self._broken_since < GRACE_SECONDS:
                    continue
                else:
                    raise WorldBroken(f"world {self.world.version} broke in the middle of a transfer") from None
            self._works.remove(work)
            return

    def _leave_alone(self, thread: threading.Thread) -> None:
        self._left_alone = [each for each in (*self._left_alone, thread) if each.is_alive()]

    def _keep_group(self) -> None:
        """Never free the groups: their destructors would wait for what is under way."""
        for group in (self._group, self._group_asked):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def _exchange(self, array: Bytes, sent: list[int], received: list[int], name: str) -> Bytes:
        self._count(name)
        out = torch.empty(sum(received), dtype=torch.uint8)
        options = dist.AllToAllOptions()
        options.timeout = COLLECTIVE_TIMEOUT
        with self._guard() as group:
            self._wait(self._note(group.alltoall_base(out, torch.from_numpy(array), received, sent, options)))
        return out.numpy()
