"""What all members together say with the gradients of a step.

Beside the votes: how all learn from sums alone that they hold the same number, and the words for what differs.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Self

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import Samples, checksum_of
from elasticdl.elastic.core.protocol import WorldBroken

# Whether all members hold the same number, told by sums alone.
#
# For whole numbers c of N members, N·Σc² = (Σc)² holds only if all are equal (Cauchy and Schwarz). So a checksum travels along
# in the vector that is summed over the members with each step, in pieces that are small enough for float32 to hold each sum
# exactly in worlds of up to `MOST_MEMBERS`.

PIECES, BITS = 5, 6
SIZE = 2 * PIECES  # numbers that a checksum takes in the vector
MOST_MEMBERS = 1 << 24 - 2 * BITS
_SHOWN = 4096  # samples of a batch that are compared one by one


def pieces(checksum: int) -> list[float]:
    """What a member adds to the vector. ``checksum``: of 30 bits or more, of which the last 30 count."""
    values = [checksum >> BITS * number & (1 << BITS) - 1 for number in range(PIECES)]
    return [float(each) for value in values for each in (value, value * value)]


def all_equal(sums: Sequence[float], members: int) -> bool:
    """Whether this many members have added the same pieces."""
    whole = [round(each) for each in sums]
    return all(members * whole[i + 1] == whole[i] ** 2 for i in range(0, SIZE, 2))


def newcomers_alone(members: Sequence[tuple[int, bool]], differing: Container[int]) -> tuple[int, ...]:
    """Who of those that differ from rank 0's worker is refused: all, if rank 0 has trained and none of them has; else nobody.

    ``members``: by rank, the worker, and whether it has made a step of the job.
    """
    found = [(worker, trained) for worker, trained in members if worker in differing]
    is_theirs = members[0][1] and not any(trained for _, trained in found)
    return tuple(worker for worker, _ in found) if is_theirs else ()


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """What a member believes to be the global batch of a step; told only if the members differ."""

    worker: int
    epoch: int
    step: int
    samples: int
    begins: tuple[str, ...]  # the samples themselves, as text, if they are not too many
    checksum: int  # of them all
    trained: bool = False  # this worker has made a step of the job before

    @classmethod
    def of(cls, worker: int, epoch: int, step: int, samples: Samples, *, trained: bool = False) -> Self:
        begins = tuple(map(str, samples[:_SHOWN]))
        return cls(worker, epoch, step, len(samples), begins, checksum_of(samples), trained)

    def differs(self, other: BatchFacts) -> str:
        """In words; empty if it does not as far as these facts go."""
        who = f"worker {self.worker} and worker {other.worker}"
        if self.epoch != other.epoch:
            return f"{who} have batches of different epochs, {self.epoch + 1} and {other.epoch + 1}"
        if self.step != other.step:
            return f"{who} are not at the same step"
        if self.samples != other.samples:
            return f"{who} have batches of different sizes, {self.samples} and {other.samples} samples"
        pairs = zip(self.begins, other.begins, strict=True)
        at = next((number for number, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
        if at is None:
            return "" if self.checksum == other.checksum else f"{who} have different batches, from sample {_SHOWN} on"
        return (
            f"{who} have different batches: from sample {at + 1} of {self.samples} on they differ, sample "
            f"{self.begins[at]} of the data and sample {other.begins[at]}"
        )


@dataclass(frozen=True, slots=True)
class Disagreement:
    """What differs between the members of a step, in one line. ``refused``: workers that came later and alone differ. No line: nothing
    differs. Nobody refused: the job can't go on."""

    line: str = ""
    refused: tuple[int, ...] = ()

    def refuse(self, worker: int) -> None:
        """All members come here, each with its number. It returns where nobody is refused.

        Raises:
            UserError: this worker is refused.
            WorldBroken: another worker is.
        """
        if worker in self.refused:
            raise UserError(f"refused: {self.line}")
        if self.refused:
            raise WorldBroken(f"workers {list(self.refused)} are refused: {self.line}")

    @classmethod
    def of(cls, facts: Sequence[BatchFacts], data: Sequence[str] = ()) -> Self:
        """``facts``: of all members, by rank. ``data``: how their data differ from rank 0's, in words."""
        root = facts[0]
        found = [(other, root.differs(other)) for other in facts]
        for number, text in enumerate(data):
            other, what = found[number]
            which = f"worker {root.worker} and worker {other.worker} have different data: {text}" if text else ""
            found[number] = other, what or which
        found = [(other, what) for other, what in found if what]
        if not found:
            return cls()
        return cls(
            f"step {root.step}: {found[0][1]}: all workers must draw the same samples in the same order; give what draws them a "
            "seed, and the same data on every worker",
            newcomers_alone([(each.worker, each.trained) for each in facts], {other.worker for other, _ in found}),
        )


# Places in the small vector that is summed over the members along with the gradients.
LEAVING, SAMPLES, LOSS, STOPPING, ENDED, MEMBERS, BATCH = 0, 1, 2, 3, 4, 5, 6
STATE = BATCH + SIZE
VOTE_SIZE = STATE + SIZE


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
        one_batch, one_state = (all_equal(sums[at:], round(sums[MEMBERS])) for at in (BATCH, STATE))
        leaving = sums[LEAVING] > 0
        return cls(leaving, round(samples), loss, stopping, ended, one_batch, one_state)


def mark(ballot: list[float], batch: int, state: int) -> None:
    """Say that this is a member's ballot, and the checksums of its batch and its state; once a step."""
    ballot[MEMBERS] = 1.0
    ballot[BATCH:STATE] = pieces(batch)
    ballot[STATE : STATE + SIZE] = pieces(state)
