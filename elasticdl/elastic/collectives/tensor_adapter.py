"""What training asks of a framework whose tensors travel between workers: one adapter for each framework."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class HostCopy(Protocol):
    """A tensor's contents on their way from a device to the host."""

    def is_done(self) -> bool: ...

    def wait(self) -> Any:
        """The copy on the host."""


class TensorAdapter(Protocol):
    """How an engine gets at a framework's tensors, and how those become bytes. NumPy arrays are taken for tensors, too."""

    title: str  # the framework, as users know it
    horovod: str  # Horovod's module for the framework
    lends_gpu_memory: bool  # torch.distributed can have the framework's tensors on a GPU as they are

    @property
    def kind(self) -> type:
        """The class of its tensors."""

    @property
    def has_gpu(self) -> bool:
        """This worker computes on one."""

    def operations(self, module: ModuleType, *, on_gpu: bool) -> Any:
        """What of Horovod's module is used, by the names that ``horovod.torch`` has: Sum, allreduce_async_, broadcast_async_,
        alltoall_async, poll, synchronize. ``on_gpu``: tensors on a GPU are reduced there."""

    # -- sums and exchanges --

    def lend(self, tensor: Any, *, natively: bool) -> Any:
        """What an engine works on, and may overwrite: the tensor's own memory if that can be.

        ``natively``: for Horovod, which has operations for the framework's own tensors. Else what torch makes a tensor of
        without a copy: one of its own, a NumPy array or a DLPack capsule.
        """

    def copy_to_host(self, lent: Any) -> HostCopy | None:
        """For an engine that can't be handed what is on a device; None if it is on the host."""

    def summed(self, tensor: Any, result: Any) -> Any:
        """What the caller gets for the tensor that it has given, from what the engine has made of that: in place if it can be."""

    def arrived(self, tensor: Any, result: Any) -> Any:
        """What the caller gets, from what an exchange has brought: on the device and of the type of the tensor that it has given."""

    # -- a state as bytes --

    def size(self, tensor: Any) -> int:
        """In bytes."""

    def describe(self, tensor: Any, *, on_host: bool) -> Any:
        """What `from_bytes` needs to know; it is pickled. ``on_host``: the tensor need not arrive on a device."""

    def to_bytes(self, tensor: Any) -> Any:
        """What `read` takes parts of, where the tensor is."""

    def read(self, content: Any, cut: slice) -> Bytes:
        """On the host."""

    def from_bytes(self, content: Bytes, description: Any) -> Any: ...
