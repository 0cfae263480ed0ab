"""What is believed of the speed with N workers: right where it was measured, honest where it was not."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scaling_kit import Truth

from elasticdl.master.rules.step_time import fit
from elasticdl.master.state.speedup import Curve, Observation


def width(point):
    return point.high - point.low


def seen(workers, seconds, spread, **more):
    return Observation(workers, 64, seconds, 100, spread, **more)


def measured(truth, workers, draw, *, spread=0.08, steps=60, busy=False):
    """As the trimmed means of some noisy steps tell."""
    lasted = np.sort(truth.step(workers) * np.exp(spread * draw.standard_normal(steps)))[6:-6].mean()
    computing = truth.computing(workers) * np.exp(0.03 * draw.standard_normal()) if busy else 0.0
    return Observation(int(workers), truth.batch(int(workers)), float(lasted), steps, spread, computing)


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("numbers", [None, (1,), (4,), (1, 2), (1, 2, 3, 4)])
def test_the_interval_holds_the_truth_as_often_as_it_says(busy, numbers):
    held = total = 0
    for seed in range(60):
        draw = np.random.default_rng(seed)
        truth = Truth.draw(draw)
        drawn = numbers or sorted(draw.choice(np.arange(1, 9), size=draw.integers(1, 5), replace=False))
        curve = fit([measured(truth, n, draw, busy=busy) for n in drawn], follows=truth.follows)
        for n in range(2, 9):
            point = curve.at(n)
            held += point.low <= truth.speedup(n) <= point.high
            total += 1
    assert held / total >= 0.8


def test_it_is_believed_as_measured_even_if_the_form_does_not_fit():
    """Two cores: a third worker makes every step slower."""
    times = {1: 1.0, 2: 0.51, 3: 0.62, 4: 0.66}
    curve = fit([seen(n, seconds, 0.05) for n, seconds in times.items()], follows=False)
    assert [curve.at(n).speedup for n in times] == pytest.approx([1 / seconds for seconds in times.values()], rel=0.08)
    assert curve.at(3).gain < 0


def test_old_measurements_count_less_and_few_steps_that_are_alike_by_chance_are_no_sure_ones():
    aged = [[seen(1, 1.0, 0.02, age=age), seen(2, 0.6, 0.02)] for age in (0.0, 24 * 3600.0)]
    new, old = (fit(each, follows=False).at(2) for each in aged)
    assert width(old) > 2 * width(new)
    few = [[Observation(n, 64, 1 / n, 10, spread) for n in (1, 2)] for spread in (0.0, 0.01)]
    alike, varied = (fit(each, follows=False).at(2) for each in few)
    assert alike == varied
    assert width(alike) > 0.02


def test_several_numbers_tell_themselves_whether_the_batch_follows():
    told = [Observation(n, 64 * n, 1.0, 100, 0.02) for n in (1, 2)]
    assert fit(told, follows=False) == fit(told, follows=True)


@pytest.mark.parametrize(("noise", "speedup"), [(0.0, 2.0), (64.0, 2 * (64 + 64) / (64 + 128))])
def test_noise_makes_larger_batches_worth_less(noise, speedup):
    """Statistical efficiency (Pollux, equation 6): of twice the batch, with a noise scale of one worker's batch."""
    curve = fit([Observation(n, 64 * n, 1.0, 100, 0.02, noise=noise) for n in (1, 2)], follows=True)
    assert (curve.at(2).speedup, curve.noise) == (pytest.approx(speedup, rel=0.05), noise)


def test_a_point_for_each_number_and_few_for_thousands():
    assert [point.workers for point in fit([seen(3, 1.0, 0.1)], follows=False)] == list(range(1, 9))
    many = fit([seen(3, 1.0, 0.1)], follows=False, most=10_000)
    assert len(many.points) < 120
    assert many.points[-1].workers == 10_000


def test_of_large_numbers_that_which_is_there_has_a_point_and_so_has_the_next():
    """Else such a job would hear nothing, and keep its number for ever."""
    for present in (33, 40, 101):
        curve = fit([Observation(present, 6400, 1.0, 60, 0.1, busy=0.9)], follows=False, most=present)
        assert curve.at(present)
        assert curve.at(present + 1)
        assert curve.advice(present)
        numbers = [point.workers for point in curve]
        assert numbers == sorted(set(numbers))


def test_nothing_seen_nothing_said():
    assert fit([], follows=False) == Curve()


@pytest.mark.parametrize(
    "absurd",
    [
        [Observation(1, 1, 1e-6, 5, 0.0), Observation(7, 3, 1.0, 10, 3.0, busy=1.0), Observation(8, 2, 1e-9, 1, 0.0)],
        [Observation(1, 1, 1e4, 5, 0.0), Observation(7, 3, 1.0, 10, 3.0, busy=1.0)],
        [Observation(1, 64, 1.0, 20, 0.1, busy=1e-300)],
        [Observation(1, 64, 1e9, 20, 0.1), Observation(3, 64, 1e-9, 20, 0.1)],
        [Observation(1, 64, 1e-9, 20, 0.1, busy=1e-300), Observation(3, 64, 1e9, 20, 0.1)],
    ],
)
def test_whatever_a_checkpoint_tells_the_curve_has_numbers_and_is_the_same_each_time(absurd):
    curve = fit(absurd, follows=False)
    for point in curve:
        assert all(math.isfinite(number) for number in dataclasses.astuple(point))
        assert point.low <= point.speedup <= point.high
    assert curve == fit(absurd, follows=False)
