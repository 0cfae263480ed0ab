"""A worker of several processes: each meets its equals in the other workers, and what fails in one of them fails in all.

The processes share a model among themselves by a process group of the script's own, whose collectives nothing here may disturb: a process
that left a backward pass alone would leave the others in one for ever. So nothing about other workers is raised while sums begin. Whether an
operation has succeeded is agreed upon behind it, over a small group of Gloo's that is only for this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from elasticdl.common.credentials import LOOPBACK, Processes, interface_of
from elasticdl.elastic.collectives.port import Bytes, Inside, TensorAdapter, Transfer
from elasticdl.elastic.collectives.torch_distributed import TorchDistributed
from elasticdl.elastic.collectives.torch_groups import COLLECTIVE_TIMEOUT
from elasticdl.elastic.core.protocol import World, WorldBroken
from elasticdl.elastic.link.store import Endpoint

Group: Any = dist.ProcessGroupGloo  # of which torch's annotations tell nothing
MEET_SECONDS = timedelta(seconds=300)  # for the processes of a worker to connect; their scripts begin together
GONE_SECONDS = 10.0
T = TypeVar("T")


class TorchInside(Inside):
    """By Gloo, on the host. A process that ends takes the others with it (`elasticdl.places.worker_group`), so nobody waits for it."""

    def __init__(self, processes: Processes) -> None:
        self.rank, self.size = processes.number, processes.count
        made: Any = dist  # whose annotations lack its stores
        store = made.FileStore(processes.meeting, self.size)
        store.set_timeout(MEET_SECONDS)
        options = Group._Options()
        options._timeout, options._threads = COLLECTIVE_TIMEOUT, 1
        options._devices = [Group.create_device(interface=interface_of(LOOPBACK))]
        self._store = store  # the others ask it as long as they connect
        self._group: Any = Group(made.PrefixStore("elasticdl.inside", store), self.rank, self.size, options)

    def sum(self, numbers: Sequence[float]) -> list[float]:
        tensor = torch.tensor(numbers, dtype=torch.float64)
        self.sum_(tensor)
        found: list[float] = tensor.tolist()
        return found

    def sum_(self, tensor: torch.Tensor) -> None:
        """In place; on a device by way of the host."""
        on_host = tensor.cpu()
        try:
            self._group.allreduce([on_host]).wait()
        except RuntimeError as error:
            time.sleep(GONE_SECONDS)  # who has ended takes this process along, and there is nothing to be said
            raise RuntimeError("another process of this worker is gone") from error
        if on_host is not tensor:
            tensor.copy_(on_host)


@dataclass(frozen=True, slots=True)
class _NotBegun:
    """In the place of what the engine would wait for."""

    why: WorldBroken


class TorchOfSeveral(TorchDistributed):
    """What the processes of one number in all workers do together. Each operation succeeds in all processes of a worker, or in none."""

    def __init__(self, tensors: TensorAdapter, endpoint: Endpoint, *, by_nccl: bool = False) -> None:
        super().__init__(tensors, endpoint, by_nccl=by_nccl)
        assert endpoint.processes is not None, "there are several"
        self.inside: TorchInside = TorchInside(endpoint.processes)

    def start(self, world: World) -> None:
        self._together(lambda: super(TorchOfSeveral, self).start(world))

    def begin_sum(self, tensor: Any, name: str) -> Transfer:
        try:
            return super().begin_sum(tensor, name)
        except WorldBroken as failure:  # perhaps within a backward pass
            return Transfer(tensor, _NotBegun(failure))

    def finish(self, transfers: Iterable[Transfer]) -> list[Any]:
        if self.world.size == 1:
            return super().finish(transfers)
        return self._together(lambda: self._finish(list(transfers)))

    def in_flight(self, transfer: Transfer) -> bool:
        return not isinstance(transfer.handle, _NotBegun) and super().in_flight(transfer)

    def _finish(self, transfers: Sequence[Transfer]) -> list[Any]:
        for transfer in transfers:
            if isinstance(transfer.handle, _NotBegun):
                raise transfer.handle.why
        return super().finish(transfers)

    def _move(self, array: Bytes, name: str, begin: Callable[[Any], Any]) -> Bytes:
        if self.world.size == 1:
            return array
        return self._together(lambda: super(TorchOfSeveral, self)._move(array, name, begin))

    def _sum_asked(self, tensor: torch.Tensor) -> None:
        self._together(lambda: super(TorchOfSeveral, self)._sum_asked(tensor))

    def _together(self, work: Callable[[], T]) -> T:
        """Raises:
        WorldBroken: it has failed, here or in another process of this worker.
        """
        done: list[T] = []
        failure: WorldBroken | None = None
        try:
            done.append(work())
        except WorldBroken as error:
            failure = error
        if not self.inside.all(failure is None):
            raise failure or WorldBroken(f"world {self.world.version} failed in another process of this worker")
        return done[0]
