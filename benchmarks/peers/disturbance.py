"""A seeded schedule of workers that leave, join and are killed, and what a system made of it; pure.

*Useful* samples are those of each step once, as it was made last: what is made twice counts once. The *share* is the
rate under the disturbance, of what the workers that were there would have made undisturbed, at the system's own rate
before the first event. A worker is there from when it is brought until it is taken, so that the time in which a newcomer
starts counts against every system.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from benchmarks.harness import summarise
from benchmarks.peers.port import PeerChange
from benchmarks.steps import Step

JITTER = 0.1  # of the period: longer than a step, so that an event comes at any moment of one
LEAVE, JOIN, KILL = "leave", "join", "kill"
SIGNALS = {LEAVE: signal.SIGTERM, KILL: signal.SIGKILL}
CYCLE = (LEAVE, JOIN, KILL, JOIN)


@dataclass(frozen=True, slots=True)
class Planned:
    """``after``: seconds since the event before, or since the undisturbed time; later if the system is not yet over that."""

    event: str
    after: float


@dataclass(frozen=True, slots=True)
class Happened:
    """One event; ``waited``: for how long it had to wait for the system, beyond its time."""

    at: float
    waited: float
    change: PeerChange


@dataclass(frozen=True, slots=True)
class Course:
    """One system's run. ``undisturbed``: samples a second of all workers; the disturbed time is from ``begin`` to ``end``."""

    workers: int
    batch: int
    undisturbed: float
    begin: float
    end: float
    happened: Sequence[Happened]
    steps: Sequence[Step]
    failures: int


def schedule(cycles: int, period: float, seed: int) -> list[Planned]:
    """The same for each system."""
    rng = random.Random(seed)
    moments = [number * period + rng.random() * JITTER * period for number in range(1, cycles * len(CYCLE) + 1)]
    return [
        Planned(event, after - before)
        for event, (before, after) in zip(CYCLE * cycles, pairwise([0.0, *moments]), strict=True)
    ]


def rate(steps: Sequence[Step], batch: int) -> float:
    """Samples per second of all workers, from the steps of one of them.

    Raises:
        ValueError: two steps are needed.
    """
    if len(steps) < 2:
        raise ValueError("a rate needs two steps")
    return batch * sum(step.size for step in steps[1:]) / (steps[-1].time - steps[0].time)


def useful_steps(steps: Sequence[Step], until: float) -> int:
    """Worker-steps that count at this moment: each number once, as it was made last."""
    made = sorted((step for step in steps if step.time <= until), key=lambda step: step.time)
    return sum({step.number: step.size for step in made}.values())


def mean_workers(course: Course) -> float:
    """That were there, over the disturbed time."""
    return sum(size * (end - begin) for begin, end, size in _sizes(course)) / (course.end - course.begin)


def _sizes(course: Course) -> Iterator[tuple[float, float, int]]:
    since, size = course.begin, course.workers
    for each in course.happened:
        yield since, each.at, size
        since, size = each.at, each.change.after
    yield since, course.end, size


def summary(course: Course) -> dict[str, Any]:
    """The numbers of one system. Pauses are in seconds, over all survivors."""
    changes = [each.change for each in course.happened]
    pauses = {event: [change for change in changes if change.event == event] for event in (LEAVE, JOIN, KILL)}
    useful = useful_steps(course.steps, course.end) - useful_steps(course.steps, course.begin)
    disturbed = course.batch * useful / (course.end - course.begin)
    there = mean_workers(course)
    return {
        "events": len(changes),
        "pauses": {
            event: summarise(chain.from_iterable(change.gap.pauses for change in some))
            for event, some in pauses.items()
            if some
        },
        "redone": sum(change.gap.redone for change in changes),
        "lost": sum(change.gap.lost for change in changes),
        "restarted": sum(change.restarted for change in changes),
        "late": sum(each.waited > 0 for each in course.happened),
        "undisturbed": course.undisturbed,
        "disturbed": disturbed,
        "seconds": course.end - course.begin,
        "mean_workers": there,
        "share": disturbed / (course.undisturbed * there / course.workers),
        "failures": course.failures,
    }
