"""Experiment 3 as tables for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.experiments.convergence.curves import Curve, band, chosen, difference, verdict
from benchmarks.experiments.convergence.plan import Kind
from benchmarks.experiments.convergence.settings import Policy

# What the mean of a batch's losses, summed in another order, may differ by in single precision.
ROUNDING = 1e-6
TARGETS = {"batch_loss_difference": ROUNDING, "rate_gap": "spread of the seeds"}
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


def verdicts(curves: Sequence[Curve]) -> list[tuple[str, ...]]:
    """Rows of: what, ours, target, whether the target is met."""
    found: list[tuple[str, ...]] = []
    fixed, rated = ([each for each in curves if each.policy is policy] for policy in (Policy.BATCH, Policy.RATE))
    if (apart := difference(fixed)) is not None:
        met = "yes" if apart.loss <= ROUNDING and apart.accuracy == 0 else "no"
        what = "fixed batch: largest difference of a step's loss"
        found.append((what, f"{apart.loss:.2g}", f"<= {ROUNDING:g}", met))
        found.append(("... of an epoch's accuracy", f"{apart.accuracy:.2g}", "0", met))
    if (judged := verdict(rated)) is not None:
        what = "learning rate x workers: elastic's last accuracy from the nearer fixed one"
        met = "yes" if judged.within else "no"
        found.append((what, f"{judged.gap:.4f}", f"<= {judged.spread:.4f}, the spread", met))
    return found
