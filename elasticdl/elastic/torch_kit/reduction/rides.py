"""Small numbers that travel with the gradients of a step: logged values, losses, counts."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from elasticdl.common.errors import UserError

Numbers = npt.NDArray[np.float64]


class Rides:
    """Of one step: this worker's, and after the sum those of all."""

    def __init__(self) -> None:
        self._of: dict[str, Numbers] = {}
        self.are_alike = True  # all workers have the same names and shapes; else each has its own numbers here

    def __getitem__(self, name: str) -> Numbers:
        """Raises:
        UserError: the workers have different ones.
        """
        if not self.are_alike:
            raise UserError(
                f"the workers tell each other different numbers with a step's gradients, this one {', '.join(sorted(self._of)) or 'none'}: let what "
                "is logged or counted in a step not depend on what one worker has seen of a batch"
            )
        return self._of[name]

    def add(self, name: str, numbers: npt.ArrayLike) -> None:
        self._of[name] = np.asarray(numbers, np.float64)

    def form(self) -> int:
        """A checksum of names and shapes."""
        return zlib.crc32(repr([(name, self._of[name].shape) for name in sorted(self._of)]).encode())

    def numbers(self) -> list[float]:
        """Each as two of float32. A number of one worker, to which the others add zeros, keeps nearly all its digits of float64; a sum of
        several workers' numbers is rounded as one of float32."""
        if not self._of:
            return []
        every = np.concatenate([self._of[name].ravel() for name in sorted(self._of)])
        high = every.astype(np.float32)
        low = np.subtract(every, high, out=np.zeros_like(every), where=np.isfinite(high))
        return [*high.tolist(), *low.tolist()]

    def summed(self, numbers: Sequence[float]) -> None:
        """These are the sums of what `numbers` has given."""
        every, start = np.array(numbers).reshape(2, -1).sum(0), 0
        for name, own in sorted(self._of.items()):
            self._of[name] = every[start : start + own.size].reshape(own.shape)
            start += own.size
