"""What all members together say with the gradients of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elasticdl.elastic.core import agreement

# Places in the small vector that is summed over the members along with the gradients.
LEAVING, SAMPLES, LOSS, STOPPING, ENDED, MEMBERS, BATCH = 0, 1, 2, 3, 4, 5, 6
STATE = BATCH + agreement.SIZE
VOTE_SIZE = STATE + agreement.SIZE


@dataclass(frozen=True, slots=True)
class Vote:
    """The sum of all members' votes."""

    leaving: bool  # somebody was told that the world should be left
    samples: int  # of the global batch
    loss: float  # mean over the global batch
    stopping: bool = False  # rank 0's callbacks want training to end
    ended: int = 0  # members whose training function has returned: they make no step
    one_batch: bool = True  # all members make the step on the same samples
    one_state: bool = True  # and from the same state, if that was looked at

    @classmethod
    def of(cls, sums: Sequence[float]) -> Vote:
        """From the summed vector."""
        samples = sums[SAMPLES]
        loss = sums[LOSS] / samples if samples else float("nan")
        stopping, ended = sums[STOPPING] > 0, round(sums[ENDED])
        one_batch, one_state = (agreement.all_equal(sums[at:], round(sums[MEMBERS])) for at in (BATCH, STATE))
        leaving = sums[LEAVING] > 0
        return cls(leaving, round(samples), loss, stopping, ended, one_batch, one_state)


def mark(ballot: list[float], batch: int, state: int) -> None:
    """Say that this is a member's ballot, and the checksums of its batch and its state; once a step."""
    ballot[MEMBERS] = 1.0
    ballot[BATCH:STATE] = agreement.pieces(batch)
    ballot[STATE : STATE + agreement.SIZE] = agreement.pieces(state)
