"""The history of a job, and what it consists of. Times are seconds since the epoch, durations seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from elasticdl.job.job_facts import JobFacts
from elasticdl.job.journal import Steps


class TimeUse(StrEnum):
    """What the job did at a moment, in the order in which shares of the time are shown."""

    PRODUCTIVE = "productive"  # steps that nobody had made before
    SLOW = "slow"  # all waited for the slowest of them
    AGAIN = "again"  # steps whose result had been lost
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"  # as far as training stood still for it
    GROW = "grow"  # pauses, by what changed the world
    SHRINK = "shrink"
    FAILURE = "failure"
    WAITING = "waiting"  # fewer workers than the minimum
    STARTING = "starting"  # up to the first step
    ENDING = "ending"  # from the last step, or the decision that it ends, to the end


class WorkerPhase(StrEnum):
    """What a worker was at a moment."""

    PENDING = "pending"  # asked for, without a place
    STARTING = "starting"
    WARM = "warm"  # ready, and in no world
    TRAINING = "training"  # member of a world
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class Span:
    """``until`` is None while it lasts."""

    phase: WorkerPhase
    since: float
    until: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Lane:
    """One worker. ``cause`` is empty while it is there."""

    worker: int
    host: str
    spans: tuple[Span, ...]
    cause: str = ""
    reason: str = ""
    code: int | None = None
    trouble: str = ""  # what was last found of it: that it is slow or stuck


@dataclass(frozen=True, slots=True)
class WorldSpan:
    """``members`` are in rank order, and missing of old worlds where there are too many. ``until``: None while it lasts."""

    version: int
    size: int
    members: tuple[int, ...]
    reason: str
    step: int
    since: float
    until: float | None = None


@dataclass(slots=True)
class WorldChange:
    """The way from one world to the next, until its first step is told."""

    since: float
    use: TimeUse
    told: bool = False  # a survivor has told the pause


@dataclass(frozen=True, slots=True)
class PauseRecord:
    """One change of the world, as told by the survivor with the longest pause. ``parts`` add up to ``total``."""

    world: int
    kind: str
    time: float  # at which it was over
    total: float
    workers: int  # survivors that have told of it
    steps_torn: int
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at one moment; ``value`` are the numbers that belong to it."""

    time: float
    event: str
    text: str
    step: int = 0
    value: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Point(Steps):
    """A point of the curves over steps."""

    time: float
    workers: int

    @property
    def rate(self) -> float | None:
        """Samples per second; None where the seconds are not known, or make no sense."""
        rate = self.samples / self.seconds if self.seconds > 0 and self.samples else math.inf
        return rate if math.isfinite(rate) else None


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Where the time went, counted in two ways. The parts of each add up to its whole.

    ``wall``: seconds of the job. Each moment counts once, however many workers there were: this says how much sooner the job
    could have ended. ``workers``: worker-seconds of the workers that had a place. A pause of 100 workers counts a
    hundredfold: this says what was paid for. Here the time of workers in no world is starting, waiting or ending.
    """

    wall: Mapping[TimeUse, float]
    workers: Mapping[TimeUse, float]

    @property
    def productive(self) -> float:
        """The share of wall time, 0 to 1."""
        return self.wall[TimeUse.PRODUCTIVE] / max(sum(self.wall.values()), 1e-9)

    @property
    def utilized(self) -> float:
        """The share of worker-seconds, 0 to 1."""
        return self.workers[TimeUse.PRODUCTIVE] / max(sum(self.workers.values()), 1e-9)


@dataclass(slots=True, kw_only=True)
class History(JobFacts):
    """All that is known up to ``until``. Lists that are too long lack their least important items; ``counts`` count all."""

    began: float
    until: float
    lanes: tuple[Lane, ...]
    worlds: tuple[WorldSpan, ...]
    pauses: tuple[PauseRecord, ...]
    marks: tuple[Mark, ...]  # evaluations, checkpoints, requests, decisions, phases, slow and stuck workers
    warnings: tuple[Mark, ...]
    points: tuple[Point, ...]
    spent: TimeSpent
    counts: Mapping[str, int]
    changes: Mapping[str, int]  # of the world after training had begun, by kind: grow, shrink, failure
    causes: Mapping[str, int]  # of workers that left
    remarks: tuple[str, ...]  # on what was left out or can't be known
