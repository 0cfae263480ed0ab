"""One observation for each number of workers, from the steps that are ordinary."""

from __future__ import annotations

import random

import pytest
from scaling_kit import report

from elasticdl.master.core.sizing import (
    BELIEVED,
    ENOUGH,
    MOST_OBSERVATIONS,
    SKIPPED,
    MeasuredSteps,
)
from elasticdl.master.core.speedup import Observation


def world(steps, version, workers, seconds=0.1, count=40, samples=64, now=0.0):
    steps.enter(version, workers)
    for _ in range(count):
        steps.take(report(seconds, world=version, samples=samples), now)
    return steps


KNOWN = [Observation(1, 64, 1.0), Observation(2, 64, 0.6)]


def recalling(observations=KNOWN):
    steps = MeasuredSteps()
    steps.recall(observations, 0.0)
    return steps


def known(steps, now=0.0):
    return [each.workers for each in steps.observations(now)]


def test_the_first_steps_and_those_next_to_a_pause_do_not_count():
    steps = MeasuredSteps()
    steps.enter(1, 2)
    for seconds in [5.0] * SKIPPED + [0.1] * 38 + [9.0, 4.0]:
        steps.take(report(seconds), 0.0)
    (seen,) = steps.observations(0.0)
    assert (seen.workers, seen.samples) == (2, 64)
    assert seen.seconds == pytest.approx(0.1)


def test_the_last_batch_of_an_epoch_and_scripts_that_do_not_tell_do_not_count():
    steps = world(MeasuredSteps(), 1, 2)
    for _ in range(9):
        steps.take(report(0.01, samples=7, ends_epoch=True), 0.0)
    assert steps.observations(0.0)[0].seconds == pytest.approx(0.1)
    assert world(MeasuredSteps(), 1, 2, samples=0).observations(0.0) == ()


@pytest.mark.parametrize("size", [lambda draw, _: draw.randint(50, 5000), lambda _, number: (32, 64)[number % 2]])
def test_steps_without_a_usual_size_tell_nothing_and_drop_nothing(size):
    """Two of several hundred sizes may be the same; and of two sizes now the one and now the other is the commonest."""
    draw = random.Random(1)
    steps = recalling()
    for version in (1, 2):
        steps.enter(version, version)
        for number in range(200):
            samples = size(draw, number)
            steps.take(report(samples * 1e-3 * draw.uniform(0.9, 1.1), world=version, samples=samples), 0.0)
            assert not steps.enough
            assert [each.seconds for each in steps.observations(0.0)] == [1.0, 0.6]


def test_only_steps_of_one_size_make_a_measurement():
    steps = world(MeasuredSteps(), 1, 1, count=SKIPPED)
    for number in range(12):
        steps.take(report(0.1, samples=7 if number % 4 == 0 else 64), 0.0)
    assert steps.observations(0.0) == (), "nine are too few"
    steps.take(report(0.1), 0.0)
    assert [each.samples for each in steps.observations(0.0)] == [64]
    assert not world(steps, 1, 1, count=ENOUGH - 11).enough
    assert world(steps, 1, 1, count=1).enough


def test_steps_of_a_world_that_is_over_do_not_count():
    steps = world(MeasuredSteps(), 1, 1, seconds=1.0)
    steps.enter(2, 2)
    for _ in range(40):
        steps.take(report(1.0, world=1), 0.0)
    assert known(steps) == [1]
    assert not steps.enough


@pytest.mark.parametrize(
    ("seconds", "count", "enough"), [(0.1, ENOUGH, False), (0.1, ENOUGH + SKIPPED, True), (20.0, 5 + SKIPPED, True)]
)
def test_enough_is_many_steps_or_long_ones(seconds, count, enough):
    assert world(MeasuredSteps(), 1, 1, seconds=seconds, count=count).enough is enough


def test_each_number_has_its_own_and_ages_and_what_is_recalled_stands_until_it_is_measured_anew():
    steps = world(recalling(), 1, 1, seconds=1.1, now=10.0)
    assert [(each.workers, each.seconds) for each in steps.observations(10.0)] == [(1, pytest.approx(1.1)), (2, 0.6)]
    world(steps, 2, 2, seconds=0.7, now=100.0)
    one, two = steps.observations(110.0)
    assert (one.workers, one.seconds, one.age) == (1, pytest.approx(1.1), 100.0)
    assert (two.workers, two.seconds, two.age) == (2, pytest.approx(0.7), 10.0)


def test_that_more_were_slower_is_believed_for_a_while():
    steps, now = MeasuredSteps(), 0.0
    for version in (1, 3):
        world(steps, version, 2, seconds=1.0, now=now)
        world(steps, version + 1, 1, seconds=0.8, now=now)
        assert known(steps, now + BELIEVED) == [1, 2]
        now += BELIEVED + 1
        assert known(steps, now) == [1]


@pytest.mark.parametrize("other", [{"seconds": 2.0}, {"samples": 128}])
def test_what_is_contradicted_is_forgotten(other):
    """The job has come to another machine, or has another batch."""
    assert known(world(recalling(), 1, 1, **{"seconds": 1.0, **other})) == [1]


@pytest.mark.parametrize(
    ("workers", "samples", "kept"), [(3, 64, True), (3, 63, True), (3, 192, True), (3, 384, False), (1, 63, False)]
)
def test_what_is_of_another_batch_is_dropped(workers, samples, kept):
    """Neither is the batch the same, nor each worker's; nearly, as a script may leave out what can't be divided."""
    seconds = samples / 64 / workers
    steps = world(recalling(KNOWN[:1]), 1, workers, seconds=seconds, samples=samples)
    assert (1 in known(steps)) == (kept or workers == 1)


@pytest.mark.parametrize(
    ("workers", "seconds", "samples", "believed"),
    [
        (2, 0.5, 64, [1, 2]),
        (2, 0.45, 64, [1, 2]),  # as where a part fits into the caches
        (2, 0.3, 64, [2]),  # the first epoch was slow, and each later number would look too good for ever
        (8, 0.125, 8, [1, 8]),
        (2, 0.95, 128, [1, 2]),  # a batch that follows the workers
        (2, 0.6, 128, [2]),
    ],
)
def test_workers_do_not_make_each_other_faster(workers, seconds, samples, believed):
    alone = {"seconds": 1.0, "samples": min(samples, 64)}
    steps = world(world(MeasuredSteps(), 1, 1, **alone), 2, workers, seconds=seconds, samples=samples)
    assert known(steps) == believed
    steps = world(world(MeasuredSteps(), 1, workers, seconds=seconds, samples=samples), 2, 1, **alone)
    assert known(steps) == ([1] if believed == [2] else believed)


def test_no_more_numbers_are_kept_than_have_room_and_one_that_is_measured_anew_is_the_newest():
    steps, last = MeasuredSteps(), MOST_OBSERVATIONS + 2
    for version, workers in enumerate([*range(1, last - 1), 1, last - 1, last], start=1):
        world(steps, version, workers, count=15, now=float(version))
    world(steps, last + 2, last, count=0, now=float(last + 2))
    assert known(steps, 100.0) == [1, *range(4, last + 1)]
