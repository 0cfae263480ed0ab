"""One observation for each number of workers, from the steps that are ordinary."""

from __future__ import annotations

import random

import pytest
from scaling_kit import report

from elasticdl.master.core.sizing import BELIEVED, ENOUGH, SKIPPED, MeasuredSteps


def world(steps, version, workers, seconds=0.1, count=40, samples=64, now=0.0):
    steps.enter(version, workers)
    for _ in range(count):
        steps.take(report(seconds, world=version, samples=samples))
    steps.observations(now)
    return steps


def known(steps, now=0.0):
    return [each.workers for each in steps.observations(now)]


def test_the_first_steps_and_those_next_to_a_pause_do_not_count():
    steps = MeasuredSteps()
    steps.enter(1, 2)
    for seconds in [5.0] * SKIPPED + [0.1] * 38 + [9.0, 4.0]:
        steps.take(report(seconds))
    (seen,) = steps.observations(0.0)
    assert (seen.workers, seen.samples) == (2, 64)
    assert seen.seconds == pytest.approx(0.1)


def test_the_last_batch_of_an_epoch_and_scripts_that_do_not_tell_do_not_count():
    steps = world(MeasuredSteps(), 1, 2)
    for _ in range(9):
        steps.take(report(0.01, samples=7, ends_epoch=True))
    assert steps.observations(0.0)[0].seconds == pytest.approx(0.1)
    assert world(MeasuredSteps(), 1, 2, samples=0).observations(0.0) == ()


@pytest.mark.parametrize("size", [lambda draw, _: draw.randint(50, 5000), lambda _, number: (32, 64)[number % 2]])
def test_steps_without_a_usual_size_tell_nothing_and_drop_nothing(size):
    """Two of several hundred sizes may be the same; and of two sizes now the one and now the other is the commonest."""
    draw = random.Random(1)
    steps = world(world(MeasuredSteps(), 1, 1, seconds=1.0), 2, 2, seconds=0.6)
    for version in (3, 4):
        steps.enter(version, version - 2)
        for number in range(200):
            samples = size(draw, number)
            steps.take(report(samples * 1e-3 * draw.uniform(0.9, 1.1), world=version, samples=samples))
            assert not steps.enough
            assert [each.seconds for each in steps.observations(0.0)] == [pytest.approx(1.0), pytest.approx(0.6)]


def test_only_steps_of_one_size_make_a_measurement():
    steps = world(MeasuredSteps(), 1, 1, count=SKIPPED)
    for number in range(24):
        steps.take(report(0.1, samples=7 if number % 4 == 0 else 64))
    assert not steps.enough, "eighteen are too few"
    assert steps.observations(0.0) == ()
    for _ in range(ENOUGH - 18):
        steps.take(report(0.1))
    assert [each.samples for each in steps.observations(0.0)] == [64]


def test_steps_of_a_world_that_is_over_do_not_count():
    steps = world(MeasuredSteps(), 1, 1, seconds=1.0)
    steps.enter(2, 2)
    for _ in range(40):
        steps.take(report(1.0, world=1))
    assert known(steps) == [1]
    assert not steps.enough


@pytest.mark.parametrize(
    ("seconds", "count", "enough"), [(0.1, ENOUGH, False), (0.1, ENOUGH + SKIPPED, True), (20.0, 5 + SKIPPED, True)]
)
def test_enough_is_many_steps_or_long_ones(seconds, count, enough):
    assert world(MeasuredSteps(), 1, 1, seconds=seconds, count=count).enough is enough


def test_each_number_has_its_own_and_the_newest():
    steps = MeasuredSteps()
    for version, (workers, seconds) in enumerate([(1, 1.0), (2, 0.6), (1, 1.1)], 1):
        world(steps, version, workers, seconds=seconds)
    assert [(each.workers, each.seconds) for each in steps.observations(0.0)] == [
        (1, pytest.approx(1.1)),
        (2, pytest.approx(0.6)),
    ]


def test_what_was_measured_of_more_is_believed_for_a_while():
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
    steps = world(world(MeasuredSteps(), 1, 1, seconds=1.0), 2, 2, seconds=0.6)
    assert known(world(steps, 3, 1, **{"seconds": 1.0, **other})) == [1]


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
