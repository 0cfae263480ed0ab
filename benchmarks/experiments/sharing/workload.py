"""Eight jobs that scale unequally, and when they come. Pure: drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

# Seconds of work for one worker; which, and when the next job comes, is drawn.
WORKS = (60.0, 120.0, 240.0, 480.0)
WORK_VARIATION = 0.2
SECONDS_BETWEEN = 25.0  # the mean, between two arrivals
STEP_SECONDS = 0.48  # of one worker alone
BATCH = 24


@dataclass(frozen=True, slots=True)
class Kind:
    """How a job scales: parts of a step's time with one worker, in the form of Pollux (Qiao et al., OSDI 2021)."""

    name: str
    serial: float  # computing that does not become less with a smaller share of the batch
    network: float  # the reduction with two workers
    growth: float  # with each further worker

    def seconds(self, workers: int) -> float:
        """Of a step, with one worker 1."""
        reduction = self.network + self.growth * (workers - 2) if workers > 1 else 0.0
        share = -(-BATCH // workers) / BATCH
        return self.serial + (1 - self.serial) * share + reduction

    def speedup(self, workers: int) -> float:
        return self.seconds(1) / self.seconds(workers) if workers else 0.0


KINDS = (
    Kind("good", serial=0.02, network=0.005, growth=0.002),
    Kind("middling", serial=0.08, network=0.05, growth=0.015),
    Kind("poor", serial=0.25, network=0.15, growth=0.05),
)
# Of eight jobs three scale well, three middling, two poorly.
MIXTURE = (0, 1, 2, 0, 1, 2, 0, 1)


@dataclass(frozen=True, slots=True)
class PlannedJob:
    name: str
    arrival: float  # seconds after the first
    steps: int
    kind: Kind

    @property
    def work(self) -> float:
        """Seconds for one worker."""
        return self.steps * STEP_SECONDS


def draw_jobs(seed: int, scale: float) -> list[PlannedJob]:
    """``scale``: how many times shorter the work is, and the time between two arrivals."""
    draw = random.Random(seed)
    kinds = [KINDS[number] for number in MIXTURE]
    draw.shuffle(kinds)
    jobs, arrival = [], 0.0
    for number, kind in enumerate(kinds):
        work = draw.choice(WORKS) * draw.uniform(1 - WORK_VARIATION, 1 + WORK_VARIATION) / scale
        jobs.append(PlannedJob(f"{kind.name}-{number}", arrival, max(1, round(work / STEP_SECONDS)), kind))
        arrival += draw.expovariate(scale / SECONDS_BETWEEN)
    return jobs
