"""What all members together say with the gradients of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elasticdl.elastic.core import agreement

# Places in the small vector that is summed over the members along with the gradients.
LEAVING, SAMPLES, LOSS, STOPPING, ENDED, SQUARES, MEMBERS, BATCH = 0, 1, 2, 3, 4, 5, 6, 7
STATE = BATCH + agreement.SIZE
VOTE_SIZE = STATE + agreement.SIZE
# How much gradients differ is measured each so many steps.
NOISE_STEPS = 10


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """How much the gradients of single samples differ, by the estimators of McCandlish et al. (2018, An Empirical Model of
    Large-Batch Training, appendix A.1), here for members of any batch sizes b_i that sum up to B:

        E|g_i|^2 = |G|^2 + tr(S) / b_i    and so    tr(S) = (sum b_i |g_i|^2 - B |g|^2) / (members - 1)

    Each step's estimate is unbiased, and may well be negative; their means over many steps tell something.
    """

    variance: float = 0.0  # tr(S), of single samples; both are 0 if they were not measured
    square: float = 0.0  # |G|^2, of the gradient itself

    @classmethod
    def of(cls, squares: float, reduced: float, samples: int, members: int) -> GradientNoise:
        """``squares``: sum over the members of b_i times the square of the mean gradient over its b_i samples. ``reduced``:
        the square of the mean gradient over all samples."""
        variance = (squares - samples * reduced) / (members - 1)
        found = cls(variance, reduced - variance / samples)
        return found if math.isfinite(found.variance) and math.isfinite(found.square) else cls()


@dataclass(frozen=True, slots=True)
class Vote:
    """The sum of all members' votes."""

    leaving: bool  # somebody was told that the world should be left
    samples: int  # of the global batch
    loss: float  # mean over the global batch
    stopping: bool = False  # rank 0's callbacks want training to end
    ended: int = 0  # members whose training function has returned: they make no step
    noise: GradientNoise = GradientNoise()  # of the gradients of this step
    one_batch: bool = True  # all members make the step on the same samples
    one_state: bool = True  # and from the same state, if that was looked at

    @classmethod
    def of(cls, sums: Sequence[float], noise: GradientNoise | None = None) -> Vote:
        """From the summed vector."""
        samples = sums[SAMPLES]
        loss = sums[LOSS] / samples if samples else float("nan")
        stopping, ended = sums[STOPPING] > 0, round(sums[ENDED])
        one_batch, one_state = (agreement.all_equal(sums[at:], round(sums[MEMBERS])) for at in (BATCH, STATE))
        leaving = sums[LEAVING] > 0
        return cls(leaving, round(samples), loss, stopping, ended, noise or GradientNoise(), one_batch, one_state)


def mark(ballot: list[float], batch: int, state: int) -> None:
    """Say that this is a member's ballot, and the checksums of its batch and its state; once a step."""
    ballot[MEMBERS] = 1.0
    ballot[BATCH:STATE] = agreement.pieces(batch)
    ballot[STATE : STATE + agreement.SIZE] = agreement.pieces(state)
