"""What experiment 3 makes of the jobs' records."""

from __future__ import annotations

import pytest

from benchmarks.experiments.convergence.course import Result
from benchmarks.experiments.convergence.curves import Curve, band, difference, verdict
from benchmarks.experiments.convergence.plan import Job, Kind, Policy, Step


def curve(kind, seed, accuracies, losses=(1.0, 0.5), policy=Policy.BATCH):
    return Curve(policy, kind, seed, tuple(accuracies), tuple(losses), (2,) * len(losses))


def evaluation(epoch, accuracy):
    return {"event": "evaluation", "epoch": epoch, "metrics": {"accuracy": accuracy, "loss": 1.0}}


def test_a_curve_is_of_all_steps_and_epochs_of_a_job():
    job = Job(Policy.RATE, Kind.TWO, 3, epochs=2)
    steps = tuple(Step(number, 2, 1 / number, 0.002) for number in (1, 2, 3))
    journal = (evaluation(0, 0.5), {"event": "pause"}, evaluation(1, 0.75))
    assert Curve.of(Result(job, steps, journal)).accuracies == (0.5, 0.75)
    with pytest.raises(ValueError, match=r"rate-2-3: recorded the steps \[1, 3\]"):
        Curve.of(Result(job, (steps[0], steps[2]), journal))
    with pytest.raises(ValueError, match="evaluated after the epochs"):
        Curve.of(Result(job, steps, journal[:1]))


def test_the_largest_difference_is_between_jobs_of_one_seed():
    curves = [curve(Kind.TWO, 0, [0.5, 1.0]), curve(Kind.FOUR, 0, [0.25, 1.0], [1.0, 0.25])]
    others = [curve(Kind.TWO, 1, [0, 0], [9.0, 9.0])]
    assert difference([*curves, *others]) == {"loss": 0.25, "accuracy": 0.25, "first_step": 2}
    assert difference([curves[0], curves[0]]) == {"loss": 0, "accuracy": 0, "first_step": None}
    assert difference([curves[0], *others]) is None


def test_the_verdict_compares_the_last_accuracies():
    fixed = [curve(Kind.TWO, 0, [0.90]), curve(Kind.TWO, 1, [0.94]), curve(Kind.FOUR, 0, [0.96])]
    found = verdict([*fixed, curve(Kind.ELASTIC, 0, [0.98])])
    assert found == pytest.approx({"gap": 0.02, "spread_of_fixed": 0.06})
    assert verdict(fixed) is None


def test_mean_and_spread_are_over_the_seeds():
    over = band([curve(Kind.TWO, 0, [0.2, 0.9]), curve(Kind.TWO, 1, [0.4, 0.7])])
    assert over.mean == pytest.approx((0.3, 0.8))
    assert (over.low, over.high) == ((0.2, 0.7), (0.4, 0.9))
