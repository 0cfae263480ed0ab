"""What all members together say with the gradients of a step."""

from __future__ import annotations

from dataclasses import dataclass

# Places in the small vector that is summed over the members along with the gradients.
LEAVING, SAMPLES, LOSS, VOTE_SIZE = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class Vote:
    """The sum of all members' votes."""

    leaving: bool  # somebody was told that the world should be left
    samples: int  # of the global batch
    loss: float  # mean over the global batch
