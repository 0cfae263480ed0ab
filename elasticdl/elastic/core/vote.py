"""What all members together say with the gradients of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Places in the small vector that is summed over the members along with the gradients.
LEAVING, SAMPLES, LOSS, STOPPING, ENDED, VOTE_SIZE = 0, 1, 2, 3, 4, 5


@dataclass(frozen=True, slots=True)
class Vote:
    """The sum of all members' votes."""

    leaving: bool  # somebody was told that the world should be left
    samples: int  # of the global batch
    loss: float  # mean over the global batch
    stopping: bool = False  # rank 0's callbacks want training to end
    ended: int = 0  # members whose training function has returned: they make no step

    @classmethod
    def of(cls, sums: Sequence[float]) -> Vote:
        """From the summed vector."""
        samples = sums[SAMPLES]
        loss = sums[LOSS] / samples if samples else float("nan")
        return cls(sums[LEAVING] > 0, round(samples), loss, stopping=sums[STOPPING] > 0, ended=round(sums[ENDED]))
