"""What is so of a job at the moment, as its journal tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticdl.job.records import Doing


@dataclass(slots=True)
class Facts:
    """What is so of the job as a whole."""

    job: str = ""
    phase: str = "pending"
    reason: str = ""
    wanted: str = ""
    step: int = 0
    resumed: int = 0  # the step that it went on from
    loss: float | None = None  # of the last steps
    rate: float | None = None  # samples per second, of these
    collective: str = ""
    over: bool = False
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    advice: str = ""
    speedup: tuple[tuple[float, float, float, float], ...] = ()
    target: int = 0
    decision: str = ""
    compared: tuple[int, int] = (
        0,
        0,
    )  # the step after which states were compared last, and of how many workers they were one


@dataclass(slots=True)
class Changing:
    """The way from one world to the next, until its first step is told."""

    since: float
    doing: Doing
    told: bool = False  # a survivor has told the pause
