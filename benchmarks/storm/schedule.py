"""What happens in a storm, and when: made from a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

K = TypeVar("K")

SHORTEST_CALM, LONGEST_CALM = 0.2, 2.0
SECOND_COMES = 0.25  # of all, while the job is recovering from the one before
LONGEST_DELAY = 0.5


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
    """``pick`` chooses whom it befalls, ``length`` how long it lasts; both from 0 to 1. ``after``: seconds since another
    of the same moment."""

    kind: Kind
    pick: float
    length: float
    after: float = 0.0

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
    """So many disturbances; sometimes a second one comes while the job recovers from the first."""
    rng = random.Random(seed)
    moments: list[Moment] = []
    for kind in each_kind_first(rng, WEIGHTS, count):
        calm, second = rng.uniform(SHORTEST_CALM, LONGEST_CALM), rng.random() < SECOND_COMES
        disturbance = Disturbance(kind, rng.random(), rng.random(), rng.uniform(0, LONGEST_DELAY))
        if second and moments and _has_room(moments[-1], kind):
            moments[-1] = replace(moments[-1], disturbances=(*moments[-1].disturbances, disturbance))
        else:
            moments.append(Moment(calm, (replace(disturbance, after=0.0),)))
    return moments


def _has_room(moment: Moment, kind: Kind) -> bool:
    return len(moment.disturbances) == 1 and moment.disturbances[0].kind is not kind
