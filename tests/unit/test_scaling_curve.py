"""What is believed of the speed with N workers: as it was measured, and by estimate where it was not."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scaling_kit import Truth

from elasticdl.job.spec import MOST_WORKERS
from elasticdl.master.core.sizing import Observation, SpeedupCurve


def of(seconds, samples=64, *, follows=False):
    """Seconds of a step, by number of workers."""
    return SpeedupCurve(tuple(Observation(n, samples * n if follows else samples, each) for n, each in seconds.items()))


def speedups(curve, numbers):
    return [curve.at(n).speedup for n in numbers]


def test_what_was_measured_is_believed_even_if_the_form_does_not_fit():
    """Two cores: a third worker makes every step slower."""
    times = {1: 1.0, 2: 0.51, 3: 0.62, 4: 0.66}
    curve = of(times)
    assert speedups(curve, times) == pytest.approx([1 / seconds for seconds in times.values()])
    assert all(curve.at(n).measured for n in times)
    assert not curve.at(5).measured
    assert curve.at(5).efficiency < curve.at(4).efficiency


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("numbers", [(1, 2, 3), (1, 4, 8), (2, 3, 5, 8)])
def test_a_job_of_the_form_is_known_from_three_numbers(numbers, follows):
    def seconds(n):
        return 0.2 + (0.8 if follows else 0.8 / n) + 0.03 * (n - 1)

    curve = of({n: seconds(n) for n in numbers}, 6_720, follows=follows)
    factor = (lambda n: n) if follows else (lambda n: 1)
    truth = [factor(n) * seconds(1) / seconds(n) for n in range(1, 13)]
    assert speedups(curve, range(1, 13)) == pytest.approx(truth, rel=0.01)


def test_by_two_numbers_the_next_is_estimated_as_amdahl_would():
    assert speedups(of({1: 1.0, 2: 0.6}, 6_720), (3, 4)) == pytest.approx([1 / (0.2 + 0.8 / 3), 2.5], rel=0.01)
    assert of({1: 1.0, 2: 1.2}).at(3).speedup < 1 / 1.2, "each worker more costs time"


def test_estimates_of_jobs_of_another_form_are_near():
    """Where computing and reduction overlap, with 5 % of noise: eight workers, by one to four."""
    errors = []
    for seed in range(60):
        draw = np.random.default_rng(seed)
        truth = Truth.draw(draw)
        seen = [
            Observation(n, truth.batch(n), truth.step(n) * math.exp(0.01 * draw.standard_normal())) for n in range(1, 5)
        ]
        curve = SpeedupCurve(tuple(seen))
        errors.append(abs(math.log(curve.at(5).speedup / truth.speedup(5))))
    assert np.median(errors) < 0.02
    assert np.quantile(errors, 0.9) < 0.1


def test_one_number_says_nothing_of_others():
    assert of({1: 1.0}).at(1).speedup == 1.0
    assert of({1: 1.0}).at(2) is None
    assert of({4: 1.0}).at(4) is None
    assert SpeedupCurve().at(1) is None


def test_nobody_is_made_faster_by_others():
    """As where each one's part fits into the caches. It is no estimate's business to promise that."""
    curve = of({1: 1.0, 2: 0.45})
    assert all(curve.at(n).speedup <= n for n in range(1, 40))
    assert curve.at(2).speedup == 2.0
    unmeasured = of({3: 1.0, 4: 0.5})
    assert all(unmeasured.at(n).speedup <= n for n in range(1, 40))


def test_large_numbers_are_estimated_as_well():
    curve = of({33: 1.0, 101: 0.5}, 10_000)
    assert not curve.at(33).measured, "what one does is an estimate"
    assert [p["workers"] for p in curve.published(101)] == [1, 33, 101, 102, 202]
    assert [p.workers for p in curve.above(101)] == list(range(102, 203))
    assert curve.at(MOST_WORKERS).speedup > 0


@pytest.mark.parametrize(
    ("seconds", "workers", "said"),
    [
        ({1: 1.0, 2: 0.7}, 1, "one more adds 0.4, measured"),
        (
            {1: 1.0, 2: 0.7}, 2,
            "2 workers do 1.4 times the work of one (each does 0.71 of one worker, measured); one more would add about 0.2",
        ),
        (
            {2: 0.6, 3: 0.45}, 3,
            "3 workers do 2.4 times the work of one (each does 0.80 of one worker, by estimate); one more would add about 0.6",
        ),
        (
            {1: 1.0, 2: 0.5, 3: 0.6}, 2,
            "2 workers do 2.0 times the work of one (each does 1.00 of one worker, measured); one more adds nothing, measured",
        ),
        (
            {1: 1.0, 2: 1.3}, 2,
            "2 workers do 0.8 times the work of one (each does 0.38 of one worker, measured); one more would make the job slower",
        ),
        ({1: 1.0}, 1, ""),
        ({3: 1.0}, 3, "only 3 workers were measured, so what fewer or more would do is not known"),
        ({3: 1.0}, 4, ""),
        ({}, 1, ""),
    ],
)  # fmt: skip
def test_the_advice_is_a_sentence(seconds, workers, said):
    assert of(seconds).advice(workers) == said


@pytest.mark.parametrize(
    "absurd",
    [
        [Observation(1, 1, 1e-6), Observation(7, 3, 1.0), Observation(8, 2, 1e-9)],
        [Observation(1, 1, 1e4), Observation(7, 3, 1.0)],
        [Observation(1, 64, 1e9), Observation(3, 64, 1e-9)],
        [Observation(1, 64, 1e-9), Observation(3, 64, 1e9)],
        [Observation(9_999, 2**53, 1e9), Observation(10_000, 1, 1e-9)],
        [Observation(1, 1, 1e-9), Observation(10_000, 2**53, 1e9)],
    ],
)
def test_whatever_was_measured_the_curve_has_numbers(absurd):
    curve = SpeedupCurve(tuple(absurd))
    for n in (1, 2, 3, 7, 8, 100, 10_000):
        assert all(math.isfinite(number) for number in dataclasses.astuple(curve.at(n)))
        assert curve.at(n).speedup <= n
    assert isinstance(curve.advice(absurd[-1].workers), str)
