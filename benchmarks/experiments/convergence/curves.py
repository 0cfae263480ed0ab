"""Numbers and tables from what the jobs recorded. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

from benchmarks.experiments.convergence.course import Result
from benchmarks.experiments.convergence.plan import Kind, Policy
from benchmarks.experiments.figures import Band


@dataclass(frozen=True, slots=True)
class Curve:
    """Of one job: the accuracy after each epoch, the loss of each step, and how many workers made it."""

    policy: Policy
    kind: Kind
    seed: int
    accuracies: tuple[float, ...]
    losses: tuple[float, ...]
    workers: tuple[int, ...]

    @classmethod
    def of(cls, result: Result) -> Curve:
        """Raises:
        ValueError: a step or an evaluation is missing, or was recorded twice.
        """
        steps = result.steps
        if [each.step for each in steps] != list(range(1, len(steps) + 1)):
            raise ValueError(f"job {result.job.name}: recorded the steps {[each.step for each in steps]}")
        found = {e["epoch"]: e["metrics"]["accuracy"] for e in result.journal if e["event"] == "evaluation"}
        if list(found) != list(range(result.job.epochs)):
            raise ValueError(f"job {result.job.name}: evaluated after the epochs {list(found)} of {result.job.epochs}")
        job, losses, workers = result.job, (each.loss for each in steps), (each.workers for each in steps)
        return cls(job.policy, job.kind, job.seed, tuple(found.values()), tuple(losses), tuple(workers))


def band(curves: Iterable[Curve]) -> Band:
    columns = list(zip(*(curve.accuracies for curve in curves), strict=True))
    return Band(tuple(map(fmean, columns)), tuple(map(min, columns)), tuple(map(max, columns)))


def chosen(curves: Iterable[Curve], policy: Policy, kind: Kind) -> list[Curve]:
    return [curve for curve in curves if (curve.policy, curve.kind) == (policy, kind)]


Numbers = dict[str, Any]


def difference(curves: Sequence[Curve]) -> Numbers | None:
    """The largest between any two jobs of the same seed, and the first step with another loss, of one policy.

    None if no two jobs of a seed are there, or they made different numbers of steps.
    """
    pairs = [(a, b) for a, b in combinations(curves, 2) if a.seed == b.seed]
    if not pairs or any(len(a.losses) != len(b.losses) for a, b in pairs):
        return None
    losses = [[abs(x - y) for x, y in zip(a.losses, b.losses, strict=True)] for a, b in pairs]
    accuracy = max(abs(x - y) for a, b in pairs for x, y in zip(a.accuracies, b.accuracies, strict=True))
    first = min((step for row in losses for step, each in enumerate(row, 1) if each), default=None)
    return {"loss": max(map(max, losses)), "accuracy": accuracy, "first_step": first}


def verdict(curves: Sequence[Curve]) -> Numbers | None:
    """Whether the elastic jobs of one policy end where the fixed ones do; None while one of the kinds has no job.

    ``gap``: between the mean last accuracy of the elastic jobs and that of the nearer fixed number of workers;
    ``spread_of_fixed``: between the best and the worst last accuracy of fixed jobs.
    """
    last = {kind: [c.accuracies[-1] for c in curves if c.kind is kind] for kind in Kind}
    if not all(last.values()):
        return None
    fixed = [*last[Kind.TWO], *last[Kind.FOUR]]
    means = [fmean(last[kind]) for kind in (Kind.TWO, Kind.FOUR)]
    elastic = fmean(last[Kind.ELASTIC])
    return {"gap": min(abs(elastic - mean) for mean in means), "spread_of_fixed": max(fixed) - min(fixed)}


def summarise(curves: Sequence[Curve]) -> Numbers:
    """By policy, and in it by kind."""
    found: Numbers = {}
    for policy in Policy:
        own = [curve for curve in curves if curve.policy is policy]
        found[policy] = {str(kind): _group(group) for kind in Kind if (group := chosen(own, policy, kind))}
        compared = {"largest_difference": difference(own), "last_accuracy": verdict(own)}
        found[policy] |= {name: numbers for name, numbers in compared.items() if numbers}
    return found


def _group(curves: Sequence[Curve]) -> Numbers:
    over = band(curves)
    return {
        "seeds": [curve.seed for curve in curves],
        "accuracy_mean": over.mean,
        "accuracy_spread": [high - low for low, high in zip(over.low, over.high, strict=True)],
        "steps": [len(curve.losses) for curve in curves],
        "changes": [sum(a != b for a, b in zip(c.workers, c.workers[1:], strict=False)) for c in curves],
    }


Rows = list[tuple[Any, ...]]


def tables(curves: Sequence[Curve]) -> dict[str, tuple[tuple[str, ...], Rows]]:
    """Columns and rows, one for each job and epoch or step; numbers as they are, so that they can be compared."""
    accuracies, losses = Rows(), Rows()
    for curve in curves:
        job = (curve.policy, curve.kind, curve.seed)
        accuracies += [(*job, *each) for each in enumerate(curve.accuracies, 1)]
        losses += [(*job, n, *each) for n, each in enumerate(zip(curve.workers, curve.losses, strict=True), 1)]
    job_columns = ("policy", "workers_of_job", "seed")
    return {
        "accuracy": ((*job_columns, "epoch", "accuracy"), accuracies),
        "losses": ((*job_columns, "step", "workers", "loss"), losses),
    }


# What the mean of a batch's losses, summed in another order, may differ by in single precision.
ROUNDING = 1e-6
TITLES = {Policy.BATCH: "fixed batch", Policy.RATE: "learning rate x workers"}
COLUMNS = ("policy", "workers", "seeds", "steps", "mean accuracy after each epoch", "last, mean", "lowest", "highest")


def rows(curves: Sequence[Curve]) -> list[tuple[str, ...]]:
    """One of each policy and kind of which there are jobs."""
    groups = ((policy, kind, chosen(curves, policy, kind)) for policy in Policy for kind in Kind)
    return [_row(TITLES[policy], kind, group) for policy, kind, group in groups if group]


def _row(policy: str, kind: Kind, group: Sequence[Curve]) -> tuple[str, ...]:
    over = band(group)
    steps = sorted({len(curve.losses) for curve in group})
    made = f"{steps[0]}-{steps[-1]}" if len(steps) > 1 else f"{steps[0]}"
    epochs = " ".join(f"{each:.3f}" for each in over.mean)
    last = [f"{values[-1]:.4f}" for values in (over.mean, over.low, over.high)]
    return (policy, str(kind), str(len(group)), made, epochs, *last)


def targets(summary: Mapping[str, Any]) -> dict[str, str]:
    """Limits of what the summary says, as far as there are jobs to compare."""
    found = {}
    if "largest_difference" in summary[Policy.BATCH]:
        apart = f"{Policy.BATCH} largest_difference"
        found = {f"{apart} loss": f"<= {ROUNDING:g}", f"{apart} accuracy": "<= 0"}
    if judged := summary[Policy.RATE].get("last_accuracy"):
        found[f"{Policy.RATE} last_accuracy gap"] = f"<= {judged['spread_of_fixed']:.6g}"
    return found


def panels(curves: Sequence[Curve]) -> Mapping[str, Mapping[str, Band]]:
    """What the figure shows: a panel for each policy, and in it a band for each kind of job."""
    names = {Kind.TWO: "2 workers", Kind.FOUR: "4 workers", Kind.ELASTIC: "elastic, 2-4 workers"}
    found = {
        TITLES[policy]: {name: band(group) for kind, name in names.items() if (group := chosen(curves, policy, kind))}
        for policy in (Policy.RATE, Policy.BATCH)
    }
    return {title: bands for title, bands in found.items() if bands}
