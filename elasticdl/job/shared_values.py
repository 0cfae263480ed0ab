"""What the messages between master and worker are made of, and what both cores keep in this form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

MOST_MARKS = 100
# Scope and key of the entry that rank 0 makes in the store of each world: what its data and its model are. It may have so many bytes.
FACTS = ("job", "facts")
MOST_FACTS = 1 << 18


@dataclass(frozen=True, slots=True)
class Member:
    """One worker of a world, where it stood when it asked for it; its place in the world's list is its rank."""

    worker_id: int
    host: str
    step: int
    has_state: bool
    epoch: int = 0
    synced_in: int = 0  # version of the world in which it last stood where rank 0 stood

    def stands_with(self, root: Member) -> bool:
        """Whether both hold the same state. Two worlds may each have made a step of the same number."""
        place = (self.step, self.epoch, self.synced_in)
        return self.has_state and root.has_state and place == (root.step, root.epoch, root.synced_in)


def standing(members: Sequence[Member]) -> int:
    """Of ``members`` in rank order, how many stand with rank 0; they come first. 0: nobody holds any state."""
    return sum(1 for _ in takewhile(lambda member: member.stands_with(members[0]), members))


def newest_marks(marks: Mapping[int, float]) -> dict[int, float]:
    """Of the model's marks at the beginning of epochs, those that are kept: a script goes on from a checkpoint that is not old."""
    return {epoch: marks[epoch] for epoch in sorted(marks)[-MOST_MARKS:]}


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step on one global batch. ``loss`` is the mean over it; ``seconds`` since the step before."""

    step: int
    epoch: int
    loss: float
    samples: int
    learning_rate: float
    seconds: float
    world_version: int
    total_samples: int  # since the first step of the model
    ends_epoch: bool
    compared: int = 0  # workers whose states were compared before this step, and were one; 0 if that was not done


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What one worker's steps went into, seconds a step: medians over its last steps in the present world."""

    steps: int  # of which these are the medians
    data: float
    compute: float
    wait: float  # for the others and for the sum itself
    update: float  # the optimizer, and the script between two steps
    samples: float  # of this worker, a step

    @property
    def busy(self) -> float:
        return self.data + self.compute + self.update


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds a step over the members of a world; all zero while nothing is known."""

    busy: float = 0.0  # mean over the members
    waited: float = 0.0  # likewise
    least_waited: float = 0.0  # by the member for which the others wait: what the sum itself takes at most
