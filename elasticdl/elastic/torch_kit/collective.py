"""Reductions and broadcasts of torch tensors within the present world."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from elasticdl.elastic.collectives import transfer
from elasticdl.elastic.collectives.asked import PATIENCE
from elasticdl.elastic.collectives.horovod import HorovodCollective
from elasticdl.elastic.collectives.port import TORCH_NCCL, Bytes, Collective
from elasticdl.elastic.collectives.torch_distributed import TorchDistributed
from elasticdl.elastic.collectives.transfer import take_tensors
from elasticdl.elastic.core.world import World
from elasticdl.elastic.link.store import Endpoint
from elasticdl.elastic.torch_kit.flat import in_memory_order, strides_of
from elasticdl.elastic.torch_kit.gpu import HostCopy, can_use_nccl, new_stream, pinned_bytes, reached
from elasticdl.elastic.torch_kit.nccl import open_group
from elasticdl.elastic.torch_kit.polling import naps

Begin = Callable[[torch.Tensor, str], Any]


@dataclass(slots=True)
class Transfer:
    """A collective under way."""

    tensor: torch.Tensor
    name: str = ""
    begin: Begin | None = None
    staged: torch.Tensor | None = None  # what the engine works on: the tensor itself, or a copy
    copy: HostCopy | None = None  # that is yet to be made; the engine can't begin before
    handle: Any = None  # the engine's, once it has begun


class TorchCollective(Collective):
    """Collectives on torch tensors, on any device."""

    _reduce_on_gpu = False  # the engine is handed tensors on a GPU

    def __init__(self) -> None:
        super().__init__()
        self._copying: deque[Transfer] = deque()  # they begin in this order
        self._stream: Any = None  # for what is copied to the host

    def sum_(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        """Replace each tensor by its sum over the world, in place. All ranks get the same bits.

        Raises:
            WorldBroken: the contents of the tensors are undefined.
        """
        self._in_place(tensors, name, self._begin_sum)

    def broadcast_(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        """Replace each tensor by that of rank 0, in place.

        Raises:
            WorldBroken: the contents of the tensors are undefined.
        """
        self._in_place(tensors, name, self._begin_broadcast)

    def barrier(self, name: str) -> None:
        self.sum_([torch.zeros(1)], name)

    def broadcast_array(self, array: Bytes, name: str) -> Bytes:
        self.broadcast_([torch.from_numpy(array)], name)
        return array

    def _sum_array(self, array: Any, name: str) -> Any:
        self.sum_([torch.from_numpy(array)], name)
        return array

    def sum_asked(self, tensor: torch.Tensor, what: str) -> None:
        """As `sum_`, where a script decides that it comes to this: a worker that does not is told of. ``what``: in words.

        Raises:
            WorldBroken: the contents of the tensor are undefined.
        """
        if self.world.size > 1:
            with self._asking(what):
                self._sum_asked(tensor)

    def _asking(self, what: str) -> AbstractContextManager[None]:
        if self._asked is None:
            return contextlib.nullcontext()
        return self._asked.asking(self.world, Collective.last_operations(self).begun, what)

    def _sum_asked(self, tensor: torch.Tensor) -> None:
        self.sum_([tensor], "elasticdl.asked")

    def begin_sum(self, tensor: torch.Tensor, name: str) -> Transfer:
        """As `sum_`, without waiting for it: `finish` does. All members begin in the same order.

        Raises:
            WorldBroken: the contents of the tensor are undefined.
        """
        return self._begin(tensor, name, self._begin_sum)

    def finish(self, transfers: Iterable[Transfer]) -> None:
        """Wait until all have come to their end.

        Raises:
            WorldBroken: the contents of their tensors are undefined.
        """
        if self.world.size == 1:
            return
        with self._guard():
            for transfer in transfers:
                while transfer.handle is None:
                    self._begin_next()
                self._wait(transfer.handle)
                assert transfer.staged is not None, "it has begun"
                if transfer.staged is not transfer.tensor:
                    transfer.tensor.copy_(transfer.staged, non_blocking=True)

    def in_flight(self, transfer: Transfer) -> bool:
        """Whether what has begun may still write to its tensor, though the world is gone."""
        return False

    def _begin(self, tensor: torch.Tensor, name: str, begin: Begin) -> Transfer:
        if self.world.size == 1:
            return Transfer(tensor)
        if tensor.is_complex():  # which neither Horovod nor NCCL knows
            tensor = torch.view_as_real(tensor)
        with self._guard():
            self._count(name)
            transfer = Transfer(tensor, name, begin)
            if tensor.device.type == "cpu" or self._reduce_on_gpu:
                transfer.staged = self._prepare(tensor)
                transfer.handle = begin(transfer.staged, name)
            else:
                self._stream = self._stream or new_stream(tensor.device)
                transfer.copy = HostCopy(self._prepare(tensor), self._stream)
                self._copying.append(transfer)
            while self._copying and (copy := self._copying[0].copy) and copy.is_done():
                self._begin_next()
            return transfer

    def _begin_next(self) -> None:
        """Of those whose tensors had to come to the host, once this one has."""
        transfer = self._copying.popleft()
        assert transfer.copy is not None, "it waits for its copy"
        assert transfer.begin is not None, "it has not begun"
        transfer.staged, transfer.copy = transfer.copy.wait(), None
        transfer.handle = transfer.begin(transfer.staged, transfer.name)

    def _in_place(self, tensors: Sequence[torch.Tensor], name: str, begin: Begin) -> None:
        """One collective on each tensor, all under way at once."""
        self.finish([self._begin(tensor, f"{name}.{index}", begin) for index, tensor in enumerate(tensors)])

    def _prepare(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself if the engine can take it, else a copy."""
        return tensor.contiguous()

    @abstractmethod
    def _guard(self) -> AbstractContextManager[Any]:
        """Within, an error whose cause is the world becomes `WorldBroken`."""

    @abstractmethod
    def _begin_sum(self, tensor: torch.Tensor, name: str) -> Any:
        """Returns what `_wait` takes."""

    @abstractmethod
    def _begin_broadcast(self, tensor: torch.Tensor, name: str) -> Any: ...

    @abstractmethod
    def _wait(self, handle: Any) -> Any: ...


class HorovodTorch(HorovodCollective, TorchCollective):
    module = "horovod.torch"
    title = "PyTorch"

    def start(self, world: World) -> None:
        self._copying.clear()  # of a torn step
        super().start(world)

    def _prepare(self, tensor: torch.Tensor) -> torch.Tensor:
        prepared = super()._prepare(tensor)
        return (
            prepared.float() if prepared.dtype == torch.bfloat16 else prepared
        )  # which Horovod does not know in PyTorch

    def _begin_sum(self, tensor: torch.Tensor, name: str) -> Any:
        hvd = self._horovod
        return hvd.allreduce_async_(tensor, op=hvd.Sum, name=name)

    def _begin_broadcast(self, tensor: torch.Tensor, name: str) -> Any:
        return self._horovod.broadcast_async_(tensor, root_rank=0, name=name)

    def _wait(self, handle: Any) -> Any:
        """The result of a collective. ``hvd.synchronize`` alone spins, on a core that the transfer itself may need."""
        hvd, looked = self._horovod, 0.0
        for waited in naps():
            if hvd.poll(handle):
                break
            if self._asked is not None and waited - looked > PATIENCE:
                looked = waited
                self._look_for_asked(self._asked)
        return hvd.synchronize(handle)

    def _exchange(self, array: Bytes, sent: list[int], received: list[int], name: str) -> Bytes:
        splits = torch.tensor(sent, dtype=torch.int32)
        self._count(name)
        with self._guard() as hvd:
            arrived, _ = self._wait(hvd.alltoall_async(torch.from_numpy(array), splits, name))
            return np.asarray(arrived)


class DistributedTorch(TorchDistributed, TorchCollective):
    """By torch.distributed, which takes tensors on a GPU as they are: so does its Gloo."""

    _reduce_on_gpu = True

    def _sum_asked(self, tensor: torch.Tensor) -> None:
        with self._guard():
            self._wait(self._begin_asked_sum(tensor))

    def in_flight(self, transfer: Transfer) -> bool:
        if transfer.handle is None:
            return False
        # Gloo has done its work when it has begun to copy the sum back; memory that is freed is kept until it is there.
        copies_back = transfer.tensor.device.type != "cpu" and self._open_device_group is None
        return copies_back or not transfer.handle.is_completed()


def open_collective(endpoint: Endpoint | None, engine: str, *, has_gpu: bool) -> TorchCollective:
    """For worlds of one if there is no endpoint. ``engine``: as ``--collective``.

    Raises:
        UserError: Horovod is asked for and can't be used.
    """
    if endpoint is None or HorovodTorch.is_wanted(engine):
        return HorovodTorch.open(endpoint, has_gpu=has_gpu)
    if not (has_gpu and can_use_nccl()):
        return DistributedTorch(endpoint)
    collective = DistributedTorch(endpoint, open_group)
    collective.engine = TORCH_NCCL
    return collective


def require_collective(engine: str) -> None:
    """Raises:
    UserError: what ``--collective`` names is not installed.
    """
    if HorovodTorch.is_wanted(engine):
        HorovodTorch.require_horovod()


COPIED_WHEN_LOADED = ("model", "optimizer", "outside")  # parts of the state that need not arrive on the device


def broadcast_state(
    state: dict[str, Any], collective: Collective, device: torch.device, *, to_all: bool = False
) -> dict[str, Any]:
    """As `transfer.broadcast_state`; values that rank 0 has on a GPU arrive on ``device``, model and optimizer on the host."""
    tensors: list[torch.Tensor] = []
    take_tensors([part for name, part in state.items() if name not in COPIED_WHEN_LOADED], torch.Tensor, tensors)
    on_device = frozenset(id(tensor) for tensor in tensors if tensor.device.type != "cpu")
    form = _TorchFormat(device, on_device)
    received: dict[str, Any] = transfer.broadcast_state(state, collective, form, to_all=to_all)
    return received


_Description = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]  # shape, strides, type, whether on the device


@dataclass(frozen=True, slots=True)
class _TorchFormat:
    device: torch.device
    on_device: frozenset[int]  # ids of the tensors that arrive there
    kind: type = torch.Tensor

    def size(self, tensor: torch.Tensor) -> int:
        return tensor.numel() * tensor.element_size()

    def describe(self, tensor: torch.Tensor) -> _Description:
        return tuple(tensor.shape), strides_of(tensor), tensor.dtype, id(tensor) in self.on_device

    def new_buffer(self, size: int) -> Bytes:
        return pinned_bytes(size, self.device)

    def to_bytes(self, tensor: torch.Tensor) -> torch.Tensor:
        return in_memory_order(tensor.detach()).view(torch.uint8)

    def read(self, content: torch.Tensor, cut: slice, place: Bytes) -> None:
        torch.from_numpy(place).copy_(content[cut], non_blocking=True)

    def finish_reading(self) -> None:
        reached(self.device)

    def from_bytes(self, content: Bytes, description: _Description) -> torch.Tensor:
        shape, strides, dtype, on_device = description
        # PyTorch does not take an empty array for one of another type.
        flat = torch.from_numpy(content).view(dtype) if len(content) else torch.empty(0, dtype=dtype)
        tensor = flat.as_strided(shape, strides)
        return tensor.to(self.device) if on_device else tensor
