"""Workers that differ from the others of their job: what they have read, and what the members of a world say of a step."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from elasticdl.elastic.core import training_step as agreement
from elasticdl.elastic.core.plan import SampleOrder, StepPlan
from tests.simulation.lineage import Model


class Reading(StrEnum):
    LONGER = "a sample more"
    SHUFFLED = "the samples in another order, which their number does not tell"
    GONE = "nothing"


def other_order(order: SampleOrder, reading: Reading) -> SampleOrder | None:
    """What a worker has instead of what its job has."""
    match reading:
        case Reading.LONGER:
            return replace(order, samples=order.samples + 1)
        case Reading.SHUFFLED:
            return replace(order, seed=order.seed + 1)
    return None


@dataclass(frozen=True, slots=True)
class Given:
    """What a member brings to the reduction of a step."""

    weights: Model
    plan: StepPlan | None  # none: its training function has returned
    samples: int  # a bit each
    leaving: bool
    trained: bool = True  # it has made a step before
    compares: bool = False  # its weights with those of the others

    @property
    def ballot(self) -> list[float]:
        ballot = [0.0] * agreement.VOTE_SIZE
        count = float(self.samples.bit_count())
        ballot[agreement.LEAVING], ballot[agreement.SAMPLES], ballot[agreement.LOSS] = float(self.leaving), count, count
        ballot[agreement.ENDED] = float(self.plan is None)
        weights = zlib.crc32(str(id(self.weights)).encode()) if self.compares else 0
        agreement.mark(ballot, self.plan.checksum if self.plan else 0, weights)
        return ballot


def vote_of(members: Sequence[Given]) -> agreement.Vote:
    return agreement.Vote.of([sum(each) for each in zip(*(member.ballot for member in members), strict=True)])


def disagreement(inputs: dict[int, Given]) -> agreement.Disagreement:
    """Of members, by rank, that make a step on different samples."""
    return agreement.Disagreement.of(
        [
            agreement.BatchFacts.of(
                worker_id, given.plan.epoch, given.plan.step, given.plan.whole, trained=given.trained
            )
            for worker_id, given in inputs.items()
            if given.plan is not None
        ]
    )
