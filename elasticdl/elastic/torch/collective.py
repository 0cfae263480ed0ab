"""Reductions and broadcasts of torch tensors within the present world. The only torch module that imports horovod."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from types import ModuleType

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.collective import Collective, Endpoint, HorovodWorld
from elasticdl.elastic.errors import WorldBroken
from elasticdl.elastic.world import ALONE, World


def import_horovod() -> ModuleType:
    """``horovod.torch``, or one line that says what is missing.

    Raises:
        UserError: Horovod is not installed, was built without torch, or without Gloo.
    """
    try:
        hvd = importlib.import_module("horovod.torch")
    except ImportError as error:
        raise UserError(
            f"Horovod with PyTorch is needed and can't be imported ({error}); `make setup` builds it, "
            "or install it with HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1"
        ) from error
    if not hvd.gloo_built():
        raise UserError(
            "this Horovod was built without Gloo, which elastic jobs need: rebuild with HOROVOD_WITH_GLOO=1"
        )
    return hvd


class TorchCollective(Collective):
    """Collectives on torch tensors; in a world of one they cost nothing, and Horovod is still there for the user.

    Tensors may be on any device. Unless Horovod can reduce on the GPU (NCCL, one worker per GPU), they are staged
    through host memory.
    """

    def __init__(self, hvd: ModuleType | None, endpoint: Endpoint | None, *, reduce_on_gpu: bool) -> None:
        """Without ``hvd`` only worlds of one are possible (a script that runs alone)."""
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

    def sum_(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        """Replace each tensor by its sum over the world, in place. All ranks get the same bits.

        Raises:
            WorldBroken: the contents of the tensors are undefined.
        """
        if self.world.size == 1:
            return
        with self._guard() as hvd:
            staged = [self._stage(tensor) for tensor in tensors]
            handles = [hvd.allreduce_async_(t, op=hvd.Sum, name=f"{name}.{i}") for i, t in enumerate(staged)]
            for handle in handles:
                hvd.synchronize(handle)
            _unstage(tensors, staged)

    def broadcast_(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        """Replace each tensor by that of rank 0, in place.

        Raises:
            WorldBroken: the contents of the tensors are undefined.
        """
        if self.world.size == 1:
            return
        with self._guard() as hvd:
            staged = [self._stage(tensor) for tensor in tensors]
            handles = [hvd.broadcast_async_(t, root_rank=0, name=f"{name}.{i}") for i, t in enumerate(staged)]
            for handle in handles:
                hvd.synchronize(handle)
            _unstage(tensors, staged)

    def gather_rows(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """All ranks' tensors one below the other, in rank order; only the first dimension may differ.

        Raises:
            WorldBroken: nothing was gathered.
        """
        if self.world.size == 1:
            return tensor
        with self._guard() as hvd:
            gathered: torch.Tensor = hvd.allgather(self._stage(tensor), name=name)
            return gathered

    def broadcast_bytes(self, data: bytes, name: str) -> bytes:
        """The bytes of rank 0; what the others pass is not looked at.

        Raises:
            WorldBroken: nothing was received.
        """
        if self.world.size == 1:
            return data
        length = torch.tensor([len(data)], dtype=torch.int64)
        self.broadcast_([length], f"{name}.length")
        root = self.world.rank == 0
        body = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if root
            else torch.empty(int(length), dtype=torch.uint8)
        )
        self.broadcast_([body], f"{name}.body")
        return data if root else body.numpy().tobytes()

    def barrier(self, name: str) -> None:
        """Return when every member has come here.

        Raises:
            WorldBroken: one of them never will.
        """
        self.sum_([torch.zeros(1)], name)

    @contextlib.contextmanager
    def pretend_size(self, workers: int) -> Iterator[None]:
        """Within, ``hvd.size()`` tells this number: to see whether a user's function depends on it."""
        if self._hvd is None:
            yield
            return
        real = self._hvd.__dict__["size"]
        self._hvd.__dict__["size"] = lambda *_: workers
        try:
            yield
        finally:
            self._hvd.__dict__["size"] = real

    def _stage(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device.type == "cpu" or self._reduce_on_gpu else tensor.cpu()

    @contextlib.contextmanager
    def _guard(self) -> Iterator[ModuleType]:
        assert self._hvd is not None, "a world of several workers needs Horovod"
        try:
            yield self._hvd
        except RuntimeError as error:  # HorovodInternalError is one
            raise WorldBroken(f"a collective of world {self.world.version} failed: {error}") from error
        except ValueError as error:
            if "not been initialized" not in str(error):
                raise
            raise WorldBroken(f"Horovod went down in world {self.world.version}: {error}") from error


def _unstage(tensors: Sequence[torch.Tensor], staged: Sequence[torch.Tensor]) -> None:
    for tensor, copy in zip(tensors, staged, strict=True):
        if copy is not tensor:
            tensor.copy_(copy)
