"""What happens in a storm, and when: made from a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

K = TypeVar("K")

SHORTEST_CALM, LONGEST_CALM = 0.2, 2.0
TWO_AT_ONCE = 0.15  # of all moments


class Kind(StrEnum):
    KILL = "a worker gets SIGKILL"
    TERM = "a worker gets SIGTERM"
    STOP = "a worker gets SIGSTOP, and SIGCONT before it is missed"
    FREEZE = "a worker gets SIGSTOP, until it is given up"
    SCALE = "elasticdl scale"
    KILL_MASTER = "the master gets SIGKILL, and another is started"
    FILL_DISK = "the disk of the checkpoints is full for a while"
    CUT_FROM_MASTER = "no way between a worker and the master for a while"
    CUT_FROM_PEER = "no way between two workers for a while"


# Those that take longer than the rest are rarer.
WEIGHTS = {
    Kind.KILL: 4,
    Kind.TERM: 4,
    Kind.STOP: 5,
    Kind.FREEZE: 1,
    Kind.SCALE: 3,
    Kind.KILL_MASTER: 3,
    Kind.FILL_DISK: 3,
    Kind.CUT_FROM_MASTER: 3,
    Kind.CUT_FROM_PEER: 3,
}


@dataclass(frozen=True, slots=True)
class Disturbance:
    """``pick`` chooses whom it befalls, ``length`` how long it lasts; both from 0 to 1."""

    kind: Kind
    pick: float
    length: float

    def choose(self, options: Sequence[K]) -> K:
        return options[int(self.pick * len(options))]


@dataclass(frozen=True, slots=True)
class Moment:
    """``calm``: seconds since the job has recovered from the moment before."""

    calm: float
    disturbances: tuple[Disturbance, ...]


def each_kind_first(rng: random.Random, weights: Mapping[K, float], count: int) -> list[K]:
    """Each kind before any a second time, then in any order."""
    once = rng.sample(list(weights), min(count, len(weights)))
    kinds = [*once, *rng.choices(list(weights), list(weights.values()), k=count - len(once))]
    rng.shuffle(kinds)
    return kinds


def schedule(seed: int, count: int) -> list[Moment]:
    """So many disturbances; sometimes two come at once."""
    rng = random.Random(seed)
    moments: list[Moment] = []
    for kind in each_kind_first(rng, WEIGHTS, count):
        disturbance = Disturbance(kind, rng.random(), rng.random())
        calm, together = rng.uniform(SHORTEST_CALM, LONGEST_CALM), rng.random() < TWO_AT_ONCE
        if together and moments and _can_take(moments[-1], kind):
            moments[-1] = replace(moments[-1], disturbances=(*moments[-1].disturbances, disturbance))
        else:
            moments.append(Moment(calm, (disturbance,)))
    return moments


def _can_take(moment: Moment, kind: Kind) -> bool:
    return len(moment.disturbances) == 1 and moment.disturbances[0].kind is not kind
