"""What became of all jobs under one policy. Pure; seconds since the first was submitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.experiments.measures import Change, gpu_seconds
from benchmarks.experiments.sharing.workload import PlannedJob

# Of the mean completion, against the better of fixed sizes and of everybody taking what is free.
TARGET = 0.8


@dataclass(frozen=True, slots=True)
class Completed:
    job: PlannedJob
    submitted: float
    ended: float
    worlds: int

    @property
    def seconds(self) -> float:
        """From its submission to its end."""
        return self.ended - self.submitted


def measured(jobs: Sequence[Completed], changes: Sequence[Change]) -> dict[str, Any]:
    """``goodput``: seconds of work for one worker that are done in a second."""
    makespan = max(each.ended for each in jobs) - min(each.submitted for each in jobs)
    end = max(each.ended for each in jobs)
    return {
        "mean_completion": fmean(each.seconds for each in jobs),
        "makespan": makespan,
        "goodput": sum(each.job.work for each in jobs) / makespan,
        "gpu_seconds": gpu_seconds(changes, end),
        "worlds": sum(each.worlds for each in jobs),
        "jobs": {each.job.name: {"submitted": each.submitted, "seconds": each.seconds} for each in jobs},
    }


def compared(numbers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Ours against the others that were run."""
    if "share" not in numbers:
        return {}
    ours = numbers["share"]["mean_completion"]
    ratios = {name: ours / each["mean_completion"] for name, each in numbers.items() if name != "share"}
    simple = [ratio for name, ratio in ratios.items() if name != "adaptdl"]
    return {"ratios": ratios, **({"to_best_simple": max(simple)} if simple else {})}


def table(numbers: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str]) -> list[tuple[str, ...]]:
    return [
        (
            titles[name],
            f"{each['mean_completion']:.1f} s",
            f"{each['makespan']:.1f} s",
            f"{each['goodput']:.2f}",
            f"{each['gpu_seconds']:.0f}",
            str(each["worlds"]),
        )
        for name, each in numbers.items()
    ]
