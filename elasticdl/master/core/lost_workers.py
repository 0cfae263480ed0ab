"""How long replacements wait: one back-off for each cause of losses, and one for each node.

Ordinary losses cost no time: a worker that has been in a world is replaced at once, and so is the first of any kind that
has not. Only losses in a row of workers that were in no world yet make replacements wait, each time twice as long:

| losses in a row            | wait from | the longest wait | other consequence                                     |
| -------------------------- | --------- | ---------------- | ----------------------------------------------------- |
| of one cause               | the second | 30 s            |                                                       |
| of one node                | the third | 5 min            | from the second on replacements are kept off the node |

Workers that were launched before a wait began, or are lost during it, do not lengthen it: they share it. After the wait their
replacements come one after another, spread over as much time again. So one of them tries it first; if it is lost, the others
go on waiting. A replacement that reaches a world ends the streaks of its cause and of its node, and whoever waited for these
waits no longer. A person is told once when a wait gets long, and sees it for as long as it lasts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from elasticdl.common.backoff import delay_after
from elasticdl.master.state.events import ExitCause
from elasticdl.master.state.worker_record import WorkerRecord

FIRST_DELAY = 0.5
LONGEST_DELAY = 30.0
LONGEST_OF_NODE = 300.0
# A person sees a wait that is longer than the first of these, and is told of one that is longer than the second.
SHOWN_DELAY, TOLD_DELAY = 1.5, 6.0
AVOIDED_FROM = 2
MOST_AVOIDED = 50  # they are named in each pod
NODE_FORGOTTEN_AFTER = 3600.0
_OF_THE_NODE = (ExitCause.EVICTED, ExitCause.NODE_LOST, ExitCause.KILLED, ExitCause.FROZEN)


@dataclass(slots=True)
class Streak:
    """Losses in a row of one cause, or on one node. Those that share a wait are one wave."""

    node: str = ""  # empty: of a cause
    losses: int = 0
    waves: int = 0
    delay: float = 0.0
    until: float = -math.inf
    last: float = 0.0  # when there was one
    why: str = ""  # the last worker was lost
    told: bool = False
    sharing: int = 0  # losses of the latest wave
    _next_id: int = 0  # of the workers that are launched after the latest wave

    def add(self, worker_id: int, next_id: int, why: str, now: float) -> None:
        self.losses, self.why, self.last = self.losses + 1, why, now
        if worker_id < self._next_id or now < self.until:
            self.sharing += 1
            return
        self.waves, self._next_id, self.sharing = self.waves + 1, next_id, 0
        unfelt, longest = (AVOIDED_FROM, LONGEST_OF_NODE) if self.node else (1, LONGEST_DELAY)
        self.delay = delay_after(self.waves - unfelt, FIRST_DELAY, longest)
        self.until = now + self.delay

    @property
    def avoided(self) -> bool:
        """Whether replacements are kept off its node."""
        return bool(self.node) and self.waves >= AVOIDED_FROM

    def describe(self, seconds: float) -> str:
        """For people, if replacements wait so long."""
        workers = f"{self.losses} workers in a row were" if self.losses > 1 else "1 worker was"
        where = f" on node {self.node}" if self.node else ""
        lost = f"{workers} lost{where} before training, the last {self.why}"
        wait = f"{max(1, round(seconds))} s"
        if self.avoided:
            return f"{lost}; the node is avoided, and tried again in {wait}"
        return f"replacements wait {wait}: {lost}"


@dataclass(frozen=True, slots=True)
class Wait:
    """A replacement waits for these streaks. ``turn``: its turn among those that wait for them, from 0 for the first to 1."""

    streaks: tuple[Streak, ...]
    turn: float = 0.0

    @property
    def until(self) -> float:
        return max(streak.until + self.turn * streak.delay for streak in self.streaks)

    @property
    def delay(self) -> float:
        return max(streak.delay for streak in self.streaks)

    @property
    def streak(self) -> Streak:
        """Which a person is told of."""
        return next((streak for streak in self.streaks if streak.avoided), self.streaks[0])


def wait_after(failures: int, why: str, now: float, factor: float = 2.0) -> Wait:
    """The wait after so many failures in a row, which are counted elsewhere."""
    delay = delay_after(failures, FIRST_DELAY, LONGEST_DELAY, factor)
    return Wait((Streak(losses=failures, delay=delay, until=now + delay, why=why),))


class Losses:
    """The losses in a row of workers that had been in no world."""

    def __init__(self) -> None:
        self._causes: dict[ExitCause, Streak] = {}
        self._nodes: dict[str, Streak] = {}
        self.workers = 1  # the maximum

    def count(self, record: WorkerRecord, cause: ExitCause, why: str, next_id: int, now: float) -> Wait:
        """One more; how long its replacement waits. ``next_id``: of the next worker that is launched."""
        streaks = [self._causes.setdefault(cause, Streak())]
        if record.node and cause in _OF_THE_NODE:
            streaks.append(self._nodes.setdefault(record.node, Streak(record.node)))
        for streak in streaks:
            streak.add(record.worker_id, next_id, why, now)
        return Wait(tuple(streaks), min(1.0, streaks[0].sharing / self.workers))

    def reached_world(self, record: WorkerRecord) -> tuple[Streak | None, ...]:
        """A worker has, for the first time: the streaks that this ends."""
        of_cause = self._causes.pop(record.replaces, None) if record.replaces else None
        return of_cause, self._nodes.pop(record.node, None)

    def avoided(self, now: float) -> tuple[str, ...]:
        """Nodes to keep replacements off, the worst first."""
        self._nodes = {node: streak for node, streak in self._nodes.items() if now - streak.last < NODE_FORGOTTEN_AFTER}
        avoided = sorted(
            (streak for streak in self._nodes.values() if streak.avoided), key=lambda streak: -streak.losses
        )
        return tuple(streak.node for streak in avoided[:MOST_AVOIDED])

    def clear(self) -> None:
        self._causes.clear()
        self._nodes.clear()
