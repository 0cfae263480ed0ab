"""Reductions and broadcasts of torch tensors within the present world. The only torch module that imports horovod."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.collective import Collective, Endpoint, HorovodWorld
from elasticdl.elastic.errors import WorldBroken
from elasticdl.elastic.world import ALONE, World

# Between two looks at whether a collective is done: a small part of the time waited so far, within bounds in seconds.
SLEEP_PART = 1 / 16
SHORTEST_SLEEP = 50e-6
LONGEST_SLEEP = 1e-3

HEAD_BYTES = 1 << 14


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
        self._in_place(tensors, name, lambda hvd, tensor, key: hvd.allreduce_async_(tensor, op=hvd.Sum, name=key))

    def broadcast_(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        """Replace each tensor by that of rank 0, in place.

        Raises:
            WorldBroken: the contents of the tensors are undefined.
        """
        self._in_place(tensors, name, lambda hvd, tensor, key: hvd.broadcast_async_(tensor, root_rank=0, name=key))

    def gather_rows(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """All ranks' tensors one below the other, in rank order; only the first dimension may differ.

        Raises:
            WorldBroken: nothing was gathered.
        """
        if self.world.size == 1:
            return tensor
        with self._guard() as hvd:
            gathered: torch.Tensor = _wait(hvd, hvd.allgather_async(self._stage(tensor), name=name))
            return gathered

    def broadcast_bytes(self, data: bytes, name: str) -> bytes:
        """The bytes of rank 0; what the others pass is not looked at.

        Raises:
            WorldBroken: nothing was received.
        """
        if self.world.size == 1:
            return data
        # Length and beginning travel together: one round trip less for what is small, as an outline mostly is.
        head = torch.zeros(HEAD_BYTES, dtype=torch.uint8)
        if self.world.rank == 0:
            start = len(data).to_bytes(8, "little") + data[: HEAD_BYTES - 8]
            head[: len(start)] = torch.frombuffer(bytearray(start), dtype=torch.uint8)
        self.broadcast_([head], f"{name}.head")
        received = head.numpy().tobytes()
        length = int.from_bytes(received[:8], "little")
        if length <= HEAD_BYTES - 8:
            return received[8 : 8 + length]
        rest = torch.empty(length - (HEAD_BYTES - 8), dtype=torch.uint8)
        if self.world.rank == 0:
            rest = torch.frombuffer(bytearray(data[HEAD_BYTES - 8 :]), dtype=torch.uint8)
        self.broadcast_([rest], f"{name}.rest")
        return received[8:] + rest.numpy().tobytes()

    def barrier(self, name: str) -> None:
        """Return when every member has come here.

        Raises:
            WorldBroken: one of them never will.
        """
        self.sum_([torch.zeros(1)], name)

    @contextlib.contextmanager
    def pretend_size(self, workers: int) -> Iterator[None]:
        """Within, ``hvd.size()`` and the world tell this number: to see whether a user's function depends on it."""
        world = self.world
        functions: dict[str, Any] = self._hvd.__dict__ if self._hvd else {}
        real = functions.get("size")
        self.world = replace(world, members=(world.members * workers)[:workers])
        functions["size"] = lambda *_: workers
        try:
            yield
        finally:
            self.world, functions["size"] = world, real

    def _in_place(
        self, tensors: Sequence[torch.Tensor], name: str, begin: Callable[[ModuleType, torch.Tensor, str], Any]
    ) -> None:
        """One collective on each tensor, all under way at once."""
        if self.world.size == 1:
            return
        with self._guard() as hvd:
            staged = [self._stage(tensor) for tensor in tensors]
            for handle in [begin(hvd, tensor, f"{name}.{index}") for index, tensor in enumerate(staged)]:
                _wait(hvd, handle)
            _unstage(tensors, staged)

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


def _wait(hvd: ModuleType, handle: Any) -> Any:
    """The result of a collective. ``hvd.synchronize`` alone spins, on a core that the transfer itself may need."""
    began = time.monotonic()
    while not hvd.poll(handle):
        waited = time.monotonic() - began
        time.sleep(min(max(waited * SLEEP_PART, SHORTEST_SLEEP), LONGEST_SLEEP))
    return hvd.synchronize(handle)


def _unstage(tensors: Sequence[torch.Tensor], staged: Sequence[torch.Tensor]) -> None:
    for tensor, copy in zip(tensors, staged, strict=True):
        if copy is not tensor:
            tensor.copy_(copy)
