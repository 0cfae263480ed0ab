"""A job of some system, which one worker leaves or joins at a time by a seeded schedule, and what is made of it.

Pauses are those of the survivors, from their step logs. *Useful* samples are those of each step once, as it was made last:
what is made twice counts once. The *share* is the rate under the disturbance, of what the workers that were there would have made undisturbed, at the system's own rate
before the first event. A worker is there from when it is brought until it is taken, so that the time in which a newcomer
starts counts against every system.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

from benchmarks.harness import summarise
from benchmarks.peers.systems import Peer
from benchmarks.processes import Processes, wait_until
from benchmarks.steps import Gap, Step, StepLogs, gap_between, split_at

START_SECONDS = 180.0
EVENT_SECONDS = 120.0
JITTER = 0.1  # of the period: longer than a step, so that an event comes at any moment of one
LEAVE, JOIN, KILL = "leave", "join", "kill"
SIGNALS = {LEAVE: signal.SIGTERM, KILL: signal.SIGKILL}
CYCLE = (LEAVE, JOIN, KILL, JOIN)


@dataclass(frozen=True, slots=True)
class PeerChange:
    """One change; ``restarted``: survivors that went on in a new process."""

    event: str
    before: int
    after: int
    gap: Gap
    restarted: int


class PeerRun:
    """One job, which one worker leaves or joins at a time. ``size``: how many there are to be now; ``members``: the processes of
    those that had settled."""

    def __init__(self, peer: Peer, processes: Processes) -> None:
        self._peer = peer
        self._processes = processes
        self.members: set[int] = set()
        self.logs = StepLogs(processes.folder)
        self.size = 0

    def start(self, model: str, workers: int) -> None:
        self.size = workers
        self._peer.start(model, workers, self._processes)

    def settle(self, steps: int, seconds: float = 0.0) -> list[Step]:
        """Wait until all train together, for at least so long and so many steps; returns the steps of one of them.

        Raises:
            Failed: they don't in time.
        """
        since = time.monotonic()

        def steady() -> bool:
            self.members = self.logs.active(self.size, since, steps)
            return time.monotonic() - since > seconds and len(self.members) == self.size

        wait_until(steady, START_SECONDS, f"steady training with {self.size} workers")
        return self.logs.steps[min(self.members)]

    def lose(self, event: str, number: signal.Signals) -> PeerChange:
        """Take one of those that had settled, by a signal.

        Raises:
            Failed: the others did not go on in time.
        """
        since = time.monotonic()
        victim = self._peer.remove(number, self.members)
        self.size -= 1
        return self._collect(event, self.members - {victim}, since, self.size + 1)

    def gain(self, event: str) -> PeerChange:
        """Bring one more.

        Raises:
            Failed: they did not train together in time.
        """
        since = time.monotonic()
        self._peer.add()
        self.size += 1
        return self._collect(event, self.members, since, self.size - 1)

    def _collect(self, event: str, survivors: set[int], since: float, before: int) -> PeerChange:
        size, logs = self.size, self.logs
        wait_until(lambda: len(logs.active(size, since, 1)) >= size, EVENT_SECONDS, f"{event}: {size} workers")
        kept = survivors & logs.active(size, since, 1)
        if kept == survivors:
            halves = [_split(logs.steps[pid], since, before) for pid in survivors]
        else:
            last = max((logs.steps[pid] for pid in survivors), key=lambda steps: steps[-1].time)
            everybody = sorted((step for steps in logs.steps.values() for step in steps), key=lambda step: step.time)
            old = [step for step in last if step.size == before]
            halves = [(old, _split(everybody, old[-1].time, before)[1])]
        return PeerChange(event, before, size, gap_between(halves, since), restarted=len(survivors - kept))


def _split(steps: list[Step], since: float, before: int) -> tuple[list[Step], list[Step]]:
    """By the first step of any other size: some survivors may go on before the others are with them."""
    return split_at(steps, since, [step.size != before for step in steps])


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


@dataclass(slots=True)
class Course:
    """One system's run. ``undisturbed``: samples a second of all workers; the disturbed time is from ``begin`` to ``end``."""

    workers: int
    batch: int
    undisturbed: float = 0.0
    begin: float = 0.0
    end: float = 0.0
    happened: list[Happened] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    failures: int = 0


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
