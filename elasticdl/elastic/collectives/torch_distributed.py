"""torch.distributed behind the port: each world has process groups of its own, made and dropped inside the process.

Gloo moves what is on the host, and what is on a GPU where NCCL can't: it brings that to pinned memory itself, on streams of
its own. Where each worker has a GPU to itself a second group (`NcclGroup`) moves what is there.

Nothing global of torch.distributed is touched: `init_process_group` is the user's.

Gloo can't be told to give up. So a world is connected in a thread of its own, which is left to itself if the world breaks
meanwhile: its timeouts end it, and it is waited for at the end. Who waits in a collective is woken by shutting the world's
connections; but not who is in the middle of a transfer, which Gloo forgets when a connection ends (`Pair::signalException`
passes over it). That collective is left to itself, too: its thread stays until `COLLECTIVE_TIMEOUT`.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.port import TORCH, TORCH_NCCL, Collective, TensorAdapter, Transfer, world_broken
from elasticdl.elastic.collectives.torch_groups import (
    COLLECTIVE_TIMEOUT,
    CONNECT_SECONDS,
    NcclGroup,
    NcclWork,
    WorldStore,
    all_reduce,
    open_nccl,
)
from elasticdl.elastic.core.protocol import World, WorldBroken
from elasticdl.elastic.link.store import Endpoint, shut_published

# In a broken world: until a collective has failed by itself, or is left alone.
GRACE_SECONDS = 0.05
LOOK = timedelta(milliseconds=25)  # while waiting, for a break
DEVICE_SECONDS = 60.0  # at most until a world's group for its GPUs is connected, or has failed
Group: Any = dist.ProcessGroupGloo  # of which torch's annotations tell nothing


Groups = tuple[Any, NcclGroup | None]  # for the host; for the device


class _Attempt:
    """To connect one world, in a thread of its own."""

    def __init__(self, world: World, connect: Callable[[Callable[[], bool]], Groups]) -> None:
        """``connect`` is told whether the world is no longer wanted."""
        self._world = world
        self._outcome: Future[Groups] = Future()
        name = f"elasticdl-connect-{world.version}"
        self.thread = threading.Thread(target=self._connect, args=(connect,), name=name, daemon=True)

    def run(self, seconds: float) -> Groups:
        """Raises:
        WorldBroken: it could not be connected, or was given up.
        UserError: it never can be.
        """
        self.thread.start()
        try:
            with contextlib.suppress(TimeoutError):
                return self._outcome.result(seconds)
            self.give_up()
            return self._outcome.result()
        except UserError:
            raise
        except Exception as error:
            raise world_broken(f"world {self._world.version} could not be connected", error) from error

    def give_up(self) -> None:
        with contextlib.suppress(InvalidStateError):  # it is over already
            self._outcome.set_exception(WorldBroken("it is broken"))

    def _connect(self, connect: Callable[[Callable[[], bool]], Groups]) -> None:
        try:
            groups = connect(self._outcome.done)
        except Exception as error:  # noqa: BLE001  whatever it is, the world has not come about
            with contextlib.suppress(InvalidStateError):
                self._outcome.set_exception(error)
            return
        try:
            self._outcome.set_result(groups)
        except InvalidStateError:
            if groups[1] is not None:
                groups[1].abort()


@dataclass(slots=True, eq=False)
class _GlooWork:
    """A collective under way."""

    work: Any  # torch's
    result: torch.Tensor

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def is_over(self) -> bool:
        """Waits a little for it. Raises what has made it fail."""
        try:
            self.work.wait(LOOK)
        except RuntimeError:
            if not self.work.is_completed():
                return False
            self.work.wait()  # it has failed, or was done just now
        return True


Work = _GlooWork | NcclWork


class TorchDistributed(Collective):
    """In a world of one nothing is connected. Gloo takes tensors on a GPU as they are, too."""

    takes_gpu = True

    def __init__(self, tensors: TensorAdapter, endpoint: Endpoint, *, by_nccl: bool = False) -> None:
        """``by_nccl``: tensors on a GPU travel by NCCL; else by Gloo, as all others."""
        super().__init__(tensors, endpoint.store)
        self.engine = TORCH_NCCL if by_nccl else TORCH
        self._endpoint, self._by_nccl = endpoint, by_nccl
        self._device_group: NcclGroup | None = None
        self._device: object | None = None  # of Gloo; its thread serves one world after another
        self._changing = threading.Lock()
        self._attempt: _Attempt | None = None
        self._left_alone: list[threading.Thread] = []  # they connect to worlds that were given up, or close others
        self._group: Any = None
        self._group_asked: Any = None  # for what scripts ask for, from the first time in a world on
        self._works: list[_GlooWork] = []  # begun by Gloo and not waited for
        self._broken_since: float | None = None

    # -- worlds --

    def start(self, world: World) -> None:
        with self._changing:
            super().start(world)
            self._broken_since = None
        if world.size == 1:
            return
        if self._device is None:
            self._device = Group.create_device(interface=self._endpoint.interface)
        group, device_group = self._connect("gloo", by_nccl=self._by_nccl)
        with self._changing:
            self._group, self._device_group = group, device_group
            is_broken = self._broken_since is not None
        if is_broken and device_group is not None:
            device_group.abort()

    def _connect(self, scope: str, *, by_nccl: bool) -> Groups:
        # The thread may be left alone: it is given all that another world has otherwise.
        store = WorldStore(self._endpoint.store, self.world.version, scope)
        attempt = _Attempt(self.world, partial(self._open_groups, store, self.world, self._device, by_nccl=by_nccl))
        with self._changing:
            self._attempt = attempt
        try:
            # The store's and Gloo's timeouts come one after the other.
            return attempt.run(3 * CONNECT_SECONDS + DEVICE_SECONDS * by_nccl)
        finally:
            with self._changing:
                self._attempt = None
            self._leave_alone(attempt.thread)

    @staticmethod
    def _open_groups(
        store: WorldStore, world: World, device: object, is_given_up: Callable[[], bool], *, by_nccl: bool
    ) -> Groups:
        options = Group._Options()
        options._timeout = timedelta(seconds=CONNECT_SECONDS)
        options._devices, options._threads = [device], 1
        group = Group(store, world.rank, world.size, options)
        if not by_nccl:
            return group, None
        return group, open_nccl(store.beside("device"), world.rank, world.size, is_given_up)

    def stop(self) -> None:
        if not all(begun.is_completed() for begun in self._works):
            for group in (self._group, self._group_asked):  # their destructors would wait for what is under way
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
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

    def _leave_alone(self, thread: threading.Thread) -> None:
        self._left_alone = [each for each in (*self._left_alone, thread) if each.is_alive()]

    def close(self) -> None:
        self._device = None
        deadline = time.monotonic() + 2 * CONNECT_SECONDS + DEVICE_SECONDS * self._by_nccl
        for thread in self._left_alone:  # Python would end the process while it is in C++
            thread.join(max(0.0, deadline - time.monotonic()))

    def break_world(self, version: int) -> None:
        with self._changing:
            if version != self.world.version:
                return
            self._broken_since = time.monotonic()
            if self._attempt is not None:
                self._attempt.give_up()
            if self._device_group is not None:
                self._device_group.abort()
        shut_published(self._endpoint.store.values(version), listening=False)

    # -- operations --

    def in_flight(self, transfer: Transfer) -> bool:
        work = transfer.handle
        # Gloo has done its work when it has begun to copy the sum back; memory that is freed is kept until it is there.
        copies_back = isinstance(work, _GlooWork) and work.result.device.type != "cpu"
        return work is not None and (copies_back or not work.is_completed())

    def _is_failure(self, error: Exception) -> bool:
        # NCCL's errors are `DistBackendError`s.
        from_gloo = isinstance(error, RuntimeError) and "gloo" in str(error).lower()
        return from_gloo or isinstance(error, dist.DistBackendError)

    def _begin_sum(self, lent: Any, name: str) -> Work:
        tensor = _as_torch(lent)
        if tensor.device.type != "cpu" and self._device_group is not None:
            return self._device_group.begin_sum(tensor)
        return self._by_gloo(all_reduce(self._group, tensor), tensor)

    def _begin_broadcast(self, lent: Any, name: str) -> Work:
        options, tensor = dist.BroadcastOptions(), _as_torch(lent)
        options.rootRank, options.rootTensor, options.timeout = 0, 0, COLLECTIVE_TIMEOUT
        return self._by_gloo(self._group.broadcast([tensor], options), tensor)

    def _begin_exchange(self, lent: Any, sent: list[int], received: list[int], name: str) -> Work:
        options, tensor = dist.AllToAllOptions(), _as_torch(lent)
        options.timeout = COLLECTIVE_TIMEOUT
        arrived = tensor.new_empty(sum(received))
        return self._by_gloo(self._group.alltoall_base(arrived, tensor, received, sent, options), arrived)

    def _by_gloo(self, work: Any, result: torch.Tensor) -> _GlooWork:
        self._works.append(_GlooWork(work, result))
        return self._works[-1]

    def _sum_asked(self, tensor: torch.Tensor) -> None:
        """It travels by a group of its own: a member that does not ask meets nothing of another size, which ends its process."""
        assert self._asked is not None, "there is a world of several workers"
        with self._guard():
            if self._group_asked is None:
                self._asked.meet()
                self._group_asked, _ = self._connect("asked.gloo", by_nccl=False)
            self._wait(self._by_gloo(all_reduce(self._group_asked, tensor), tensor))

    def _wait(self, handle: Work) -> torch.Tensor:
        if isinstance(handle, NcclWork):
            handle.wait()
            return handle.result
        began = time.monotonic()
        while not handle.is_over():
            if self._broken_since is None:
                self._look_for_asked(began)
            elif time.monotonic() - self._broken_since >= GRACE_SECONDS:
                raise WorldBroken(f"world {self.world.version} broke in the middle of a transfer")
        self._works.remove(handle)
        return handle.result


def _as_torch(lent: Any) -> torch.Tensor:
    if isinstance(lent, torch.Tensor):
        return lent
    return torch.from_numpy(lent) if isinstance(lent, np.ndarray) else torch.utils.dlpack.from_dlpack(lent)
