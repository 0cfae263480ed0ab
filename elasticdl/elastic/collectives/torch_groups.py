"""What torch.distributed's groups of one world are made of, and their operations."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elasticdl.elastic.link.store import KvStore

CONNECT_SECONDS = 10.0
# Ranks may be apart for as long as an evaluation takes. After this time the world is left, and the next one goes on.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


class WorldStore(dist.Store):  # type: ignore[misc, name-defined]
    """The entries of one world, as torch's C++ asks for them."""

    def __init__(self, store: KvStore, version: int, scope: str) -> None:
        super().__init__()
        self.version = version
        self._store = store
        self._scope = scope

    def beside(self, scope: str) -> WorldStore:
        """The same world's entries for another group."""
        return WorldStore(self._store, self.version, scope)

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


# Each operation returns torch's work, and the tensor that holds the result once it is done.
Begun = tuple[Any, torch.Tensor]


def all_reduce(group: Any, tensor: torch.Tensor) -> Begun:
    options = dist.AllreduceOptions()
    options.timeout = COLLECTIVE_TIMEOUT
    return group.allreduce([tensor], options), tensor


def broadcast(group: Any, tensor: torch.Tensor) -> Begun:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, COLLECTIVE_TIMEOUT
    return group.broadcast([tensor], options), tensor


def all_to_all(group: Any, tensor: torch.Tensor, sent: list[int], received: list[int]) -> Begun:
    options = dist.AllToAllOptions()
    options.timeout = COLLECTIVE_TIMEOUT
    arrived = tensor.new_empty((sum(received), *tensor.shape[1:]))
    return group.alltoall_base(arrived, tensor, received, sent, options), arrived
