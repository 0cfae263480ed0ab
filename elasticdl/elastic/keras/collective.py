"""Reductions and broadcasts of TensorFlow tensors within the present world, beside any graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class KerasCollective:
    """INTERFACE (being filled in). Also: world, start, stop, break_world, pretend_size, broadcast_bytes, barrier."""

    def sum(self, tensor: Any, name: str) -> Any:
        """The sum over the world of a tensor (or numpy array), as a tensor; the same bits on all ranks.

        Raises:
            WorldBroken: a member was lost.
        """
        raise NotImplementedError

    def broadcast(self, tensors: Sequence[Any], name: str) -> list[Any]:
        """Rank 0's tensors; what others pass gives shapes and dtypes.

        Raises:
            WorldBroken: nothing was received.
        """
        raise NotImplementedError

    def gather_rows(self, tensor: Any, name: str) -> Any:
        """All ranks' tensors one below the other, in rank order; only the first dimension may differ.

        Raises:
            WorldBroken: nothing was gathered.
        """
        raise NotImplementedError
