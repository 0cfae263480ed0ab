"""Experiment 1 in numbers: what is made of two jobs that overlap, and what was published. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.experiments.jobs import JobRun
from benchmarks.experiments.measures import (
    Change,
    Work,
    first_use,
    gpu_seconds,
    idle_gaps,
    mean_gpus,
    work_conserving,
)

BatchShape = Mapping[str, Any]

# Of the report's text; mean and GPU-seconds from the series behind its figure.
PUBLISHED: BatchShape = {
    "gang": {"makespan": 968, "ends": [465, 968], "mean_gpus": 3.73, "second_waited_for_gpus": 398, "idle_gap": 53},
    "elastic": {"makespan": 809, "ends": [474, 809], "mean_gpus": 4.65, "second_waited_for_gpus": 0, "idle_gap": 0},
    "ratio": 0.836,
    "gpu_seconds_overhead": 0.044,
}
TARGETS: BatchShape = {
    "ratio": 0.82,
    "second_first_step": 10.0,
    "distance": 0.05,
    "full_length_distance": 0.05,
    "gpu_seconds_overhead": 0.02,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Two jobs, on so many GPUs; ``job_gpu_seconds`` is the work of each without any overhead, ``scale`` times less than
    was published."""

    gpus: int
    workers: int
    second_after: float
    job_gpu_seconds: float
    scale: float

    def bound(self) -> float:
        """When all would be done if no usable GPU were ever free, and nothing took time but the work."""
        jobs = [Work(submitted, self.job_gpu_seconds, self.workers) for submitted in (0.0, self.second_after)]
        return max(work_conserving(jobs, self.gpus))


def step_gpu_seconds(job: JobRun) -> float:
    """What an ordinary step takes, all its workers together."""
    gaps = [
        (after.time - before.time) * after.workers
        for before, after in pairwise(job.steps)
        if after.workers == before.workers
    ]
    return median(gaps) if gaps else 0.0


def full_length_distance(plan: Plan, makespan: float, job: JobRun) -> float:
    """An estimate of how far above the bound an unscaled run would be: what each step takes too long grows with the
    work, and the rest (starting, joining, ending) does not."""
    ideal = plan.job_gpu_seconds / len(job.steps)
    slow = step_gpu_seconds(job) / ideal - 1
    rest = makespan - plan.bound() * (1 + slow)
    return slow + rest / (plan.bound() * plan.scale)


def measured(plan: Plan, changes: Sequence[Change], jobs: Sequence[JobRun]) -> dict[str, Any]:
    """Of one mode; the times of ``jobs`` and ``changes`` count from the same moment. What others have does not count."""
    changes = [change for change in changes if change.owner in {job.name for job in jobs}]
    began = jobs[0].submitted
    last = max(job.ended for job in jobs)
    makespan = last - began
    paid_until = max(last, *(change.time for change in changes))
    second, bound = jobs[1], plan.bound()
    second_gpus = first_use(changes, second.name)
    gaps = [gap.seconds for gap in idle_gaps(changes, last)]
    return {
        "makespan": makespan,
        "jobs": [_job(job, changes, paid_until) for job in jobs],
        "mean_gpus": mean_gpus(changes, last),
        "gpu_seconds": gpu_seconds(changes, paid_until),
        "second_waited_for_gpus": second_gpus - second.submitted if second_gpus is not None else None,
        "second_began": second.began - second.submitted,
        "second_first_step": second.first_step - second.submitted,
        "idle_gap": max(gaps, default=0.0),
        "lower_bound": bound,
        "distance": makespan / bound - 1,
        "full_length_distance": full_length_distance(plan, makespan, jobs[0]),
    }


def _job(job: JobRun, changes: Sequence[Change], until: float) -> dict[str, Any]:
    return {
        "name": job.name,
        "submitted": job.submitted,
        "first_gpu": first_use(changes, job.name),
        "began": job.began,
        "first_step": job.first_step,
        "step_gpu_seconds": step_gpu_seconds(job),
        "ended": job.ended,
        "steps": len({step.step for step in job.steps}),
        "gpu_seconds": gpu_seconds(changes, until, job.name),
        "last_loss": job.steps[-1].loss,
    }


def compared(gang: BatchShape, elastic: BatchShape) -> dict[str, float]:
    return {
        "ratio": elastic["makespan"] / gang["makespan"],
        "second_first_step": elastic["second_first_step"],
        "distance": elastic["distance"],
        "full_length_distance": elastic["full_length_distance"],
        "gpu_seconds_overhead": elastic["gpu_seconds"] / gang["gpu_seconds"] - 1,
    }


def table(gang: BatchShape, elastic: BatchShape) -> list[tuple[str, ...]]:
    """Rows of: what, ours gang and elastic, published gang and elastic."""
    theirs = (PUBLISHED["gang"], PUBLISHED["elastic"])

    def row(title: str, name: str, digits: int = 1) -> tuple[str, ...]:
        values = [gang.get(name), elastic.get(name), theirs[0].get(name), theirs[1].get(name)]
        return (title, *("" if value is None else f"{value:.{digits}f}" for value in values))

    def end(index: int) -> tuple[str, ...]:
        ours = [f"{mode['jobs'][index]['ended']:.1f}" for mode in (gang, elastic)]
        return (f"job {index + 1} ended, s", *ours, *(f"{mode['ends'][index]}" for mode in theirs))

    return [
        row("all done after, s", "makespan"),
        end(0),
        end(1),
        row("second job waited for GPUs, s", "second_waited_for_gpus"),
        row("... for its first workers to begin, s", "second_began"),
        row("... for its first step to be done, s", "second_first_step"),
        row("no GPU in use, longest, s", "idle_gap"),
        row("GPUs in use, mean", "mean_gpus", 2),
        row("GPU-seconds", "gpu_seconds", 0),
        row("lower bound, s", "lower_bound"),
        (*row("above it", "distance", 3)[:3], "", ""),
    ]


def verdicts(ours: BatchShape) -> list[tuple[str, ...]]:
    """Rows of: what, ours, target, published, whether the target is met."""
    titles = {
        "ratio": "elastic ends at ... of gang",
        "second_first_step": "second job's first step after, s",
        "distance": "above the lower bound",
        "full_length_distance": "the same at full length, estimated",
        "gpu_seconds_overhead": "more GPU-seconds than gang",
    }
    rows: list[tuple[str, ...]] = []
    for name, title in titles.items():
        theirs = f"{PUBLISHED[name]:.3f}" if name in PUBLISHED else ""
        met = "yes" if ours[name] <= TARGETS[name] else "no"
        rows.append((title, f"{ours[name]:.3f}", f"<= {TARGETS[name]:g}", theirs, met))
    return rows
