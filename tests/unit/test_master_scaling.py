"""How fast a job is with how many workers: what is measured, what is believed of other numbers, and how many pay."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticdl.job.messages import StepReport
from elasticdl.job.spec import MOST_WORKERS, WorkerRange
from elasticdl.master.core.sizing import (
    BELIEVED,
    ENOUGH,
    FIRST_BACKOFF,
    NEXT_BACKOFF,
    SHORT,
    SKIPPED,
    MeasuredSteps,
    Observation,
    Situation,
    SpeedupCurve,
    SpeedupPoint,
    WorkerTarget,
)

HOURS = 2


class Truth:
    """Seconds of a step with n workers, in the form of the model. ``serial``, ``network``: parts of one worker's computing."""

    def __init__(self, *, samples=256, seconds=0.5, serial=0.02, network=0.05, growth=0.1, overlap=2.0, follows=False):
        self.samples, self.seconds, self.follows = samples, seconds, follows
        self.serial, self.network, self.growth, self.overlap = serial, network, growth, overlap

    def computing(self, n):
        share = 1.0 if self.follows else math.ceil(self.samples / n) / self.samples
        return self.seconds * (self.serial + (1 - self.serial) * share)

    def step(self, n):
        network = 0.0 if n == 1 else self.seconds * self.network * (1 + self.growth * (n - 2))
        return (self.computing(n) ** self.overlap + network**self.overlap) ** (1 / self.overlap)

    def batch(self, n):
        return self.samples * n if self.follows else self.samples

    def speedup(self, n):
        return self.batch(n) / self.step(n) / (self.batch(1) / self.step(1))

    @classmethod
    def draw(cls, draw):
        return cls(
            samples=int(draw.choice([32, 64, 100, 256, 1024])),
            seconds=10 ** draw.uniform(-2, 1),
            serial=draw.beta(1, 8),
            network=10 ** draw.uniform(-2.5, 0),
            growth=10 ** draw.uniform(-2.5, 0),
            overlap=draw.uniform(1, 5),
            follows=draw.random() < 0.3,
        )


# ---- what is measured ----


def report(seconds, *, world=1, samples=64, ends_epoch=False):
    return StepReport(1, 0, 0.5, samples, 0.1, seconds, world, samples, ends_epoch)


class Measured:
    """Worlds after each other: so many workers, seconds and samples of a step, how many steps, and at what time."""

    def __init__(self, *worlds):
        self.steps, self.version = MeasuredSteps(), 0
        self.enter(*worlds)

    def enter(self, *worlds):
        for workers, seconds, samples, count, now in ((*each, *(64, 40, 0.0)[len(each) - 2 :]) for each in worlds):
            self.version += 1
            self.steps.enter(self.version, workers)
            self.make([(seconds, samples)] * count)
            self.steps.observations(now)
        return self

    def make(self, steps, **more):
        for seconds, samples in steps:
            self.steps.take(report(seconds, samples=samples, **{"world": self.version, **more}))

    def known(self, now=0.0):
        return {each.workers: round(each.seconds, 6) for each in self.steps.observations(now)}


@pytest.mark.parametrize(
    ("steps", "known"),
    [
        ([(5.0, 64)] * SKIPPED + [(0.1, 64)] * 38 + [(9.0, 64), (4.0, 64)], {2: 0.1}),  # next to a pause
        ([(0.1, 64)] * 40 + [(0.01, 7)] * 9, {2: 0.1}),  # the last batch of an epoch
        ([(0.1, 0)] * 40, {}),  # scripts that do not tell
        ([(0.1, 64)] * ENOUGH, {}),
        ([(0.1, 64)] * (ENOUGH + SKIPPED), {2: 0.1}),
        ([(20.0, 64)] * (5 + SKIPPED), {2: 20.0}),  # few and long ones
        # Two thirds of one size are too few until there are enough of them.
        ([(0.1, 64)] * SKIPPED + [(0.1, 7), *[(0.1, 64)] * 3] * 6, {}),
        ([(0.1, 64)] * SKIPPED + [(0.1, 7), *[(0.1, 64)] * 3] * 6 + [(0.1, 64)] * (ENOUGH - 18), {2: 0.1}),
    ],
)  # fmt: skip
def test_ordinary_steps_of_one_size_make_a_measurement(steps, known):
    measured = Measured((2, 1.0, 64, 0))
    measured.make(steps)
    assert measured.steps.enough == bool(known)
    assert measured.known() == known


@pytest.mark.parametrize("size", [lambda draw, _: draw.randint(50, 5000), lambda _, number: (32, 64)[number % 2]])
def test_steps_without_a_usual_size_tell_nothing_and_drop_nothing(size):
    """Two of several hundred sizes may be the same; and of two sizes now the one and now the other is the commonest."""
    draw = random.Random(1)
    measured = Measured((1, 1.0), (2, 0.6))
    for workers in (1, 2):
        measured.enter((workers, 1.0, 64, 0))
        for number in range(200):
            samples = size(draw, number)
            measured.make([(samples * 1e-3 * draw.uniform(0.9, 1.1), samples)])
            assert not measured.steps.enough
            assert measured.known() == {1: 1.0, 2: 0.6}


@pytest.mark.parametrize(
    ("worlds", "known"),
    [
        ([(1, 1.0), (2, 0.6), (1, 1.1)], {1: 1.1, 2: 0.6}),
        # The job has come to another machine, or has another batch.
        ([(1, 1.0), (2, 0.6), (1, 2.0)], {1: 2.0}),
        ([(1, 1.0), (2, 0.6), (1, 1.0, 128)], {1: 1.0}),
        # Workers do not make each other faster, but where a part fits into the caches, or a batch follows the workers.
        ([(1, 1.0), (2, 0.5)], {1: 1.0, 2: 0.5}),
        ([(1, 1.0), (2, 0.45)], {1: 1.0, 2: 0.45}),
        ([(1, 1.0), (2, 0.3)], {2: 0.3}),
        ([(2, 0.3), (1, 1.0)], {1: 1.0}),
        ([(1, 1.0, 8), (8, 0.125, 8)], {1: 1.0, 8: 0.125}),
        ([(1, 1.0), (2, 0.95, 128)], {1: 1.0, 2: 0.95}),
        ([(1, 1.0), (2, 0.6, 128)], {2: 0.6}),
        ([(2, 0.6, 128), (1, 1.0)], {1: 1.0}),
        # That more are no better is believed for a while.
        ([(2, 1.0), (1, 0.8, 64, 40, BELIEVED)], {1: 0.8, 2: 1.0}),
        ([(2, 1.0), (1, 0.8, 64, 40, BELIEVED + 1)], {1: 0.8}),
        ([(2, 1.0), (1, 0.8, 64, 40, BELIEVED + 1), (2, 1.0, 64, 40, BELIEVED + 1)], {1: 0.8, 2: 1.0}),
    ],
)  # fmt: skip
def test_each_number_of_workers_has_its_newest_measurement(worlds, known):
    assert Measured(*worlds).known(worlds[-1][4] if len(worlds[-1]) > 4 else 0.0) == known


def test_steps_of_a_world_that_is_over_do_not_count():
    measured = Measured((1, 1.0), (2, 1.0, 64, 0))
    measured.make([(1.0, 64)] * 40, world=1)
    assert measured.known() == {1: 1.0}
    assert not measured.steps.enough


# ---- what is believed ----


def of(seconds, samples=64, *, follows=False):
    """Seconds of a step, by number of workers."""
    return SpeedupCurve(tuple(Observation(n, samples * n if follows else samples, each) for n, each in seconds.items()))


def speedups(curve, numbers):
    return [curve.at(n).speedup for n in numbers]


seen = st.dictionaries(
    st.integers(1, 12) | st.just(MOST_WORKERS), st.tuples(st.integers(1, 2**53), st.floats(1e-9, 1e9)), min_size=2
)


@given(seen)
def test_whatever_was_measured_is_believed_but_nobody_is_made_faster_by_others(measured):
    """As it seems where each one's part fits into the caches."""
    curve = SpeedupCurve(tuple(Observation(n, *measured[n]) for n in sorted(measured)))
    for n in (*range(1, 14), 100, MOST_WORKERS):
        at = curve.at(n)
        assert all(math.isfinite(number) for number in dataclasses.astuple(at))
        assert at.speedup <= n
        assert at.measured == ({1, n} <= measured.keys())
        if at.measured:
            (ones, alone), (samples, seconds) = measured[1], measured[n]
            assert at.speedup == pytest.approx(min(n, samples / seconds / (ones / alone)))
    assert all(isinstance(curve.advice(n), str) for n in measured)


numbers = st.sampled_from([(1, 2, 3), (1, 4, 8), (2, 3, 5, 8)])


@given(numbers, st.booleans(), st.floats(0.01, 1), st.floats(0.1, 1), st.floats(0.001, 0.1))
def test_a_job_of_the_form_is_known_from_three_numbers(numbers, follows, fixed, shared, growth):
    def seconds(n):
        return fixed + (shared if follows else shared / n) + growth * (n - 1)

    curve = of({n: seconds(n) for n in numbers}, 27_720, follows=follows)
    truth = [min(n, (n if follows else 1) * seconds(1) / seconds(n)) for n in range(1, 13)]
    assert speedups(curve, range(1, 13)) == pytest.approx(truth, rel=0.01)


def test_where_the_form_does_not_fit_the_next_is_estimated_from_the_nearest():
    """Two cores: a third worker makes every step slower."""
    curve = of({1: 1.0, 2: 0.51, 3: 0.62, 4: 0.66})
    assert curve.at(5).speedup == pytest.approx(1.315, rel=0.01), "as much is missed as at four"
    assert speedups(of({1: 1.0, 2: 0.6}, 6_720), (3, 4)) == pytest.approx([1 / (0.2 + 0.8 / 3), 2.5], rel=0.01), (
        "Amdahl"
    )
    assert of({1: 1.0, 2: 1.2}).at(3).speedup < 1 / 1.2, "each worker more costs time"


def test_estimates_of_jobs_of_another_form_are_near():
    """Where computing and reduction overlap, with 5 % of noise: eight workers, by one to four."""
    errors = []
    for seed in range(60):
        draw = np.random.default_rng(seed)
        truth = Truth.draw(draw)
        noisy = [(n, truth.batch(n), truth.step(n) * math.exp(0.01 * draw.standard_normal())) for n in range(1, 5)]
        curve = SpeedupCurve(tuple(Observation(*each) for each in noisy))
        errors.append(abs(math.log(curve.at(5).speedup / truth.speedup(5))))
    assert np.median(errors) < 0.02
    assert np.quantile(errors, 0.9) < 0.1


def test_one_number_says_nothing_of_others():
    assert of({1: 1.0}).at(1).speedup == 1.0
    assert [of({1: 1.0}).at(2), of({4: 1.0}).at(4), SpeedupCurve().at(1)] == [None] * 3


def test_as_many_as_twice_the_present_number_are_told_of():
    curve = of({33: 1.0, 101: 0.5}, 10_000)
    assert [p["workers"] for p in curve.published(101)] == [1, 33, 101, 102, 202]
    assert [p.workers for p in curve.above(101)] == list(range(102, 203))


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


# ---- how many pay ----


class VirtualJob:
    """With the policy on. ``noise``: standard deviation of the logarithm of a step's seconds; ``wander``: of the whole
    job's speed, for an hour."""

    def __init__(self, truth, limits, least, *, seed=0, noise=0.1, wander=0.0, pause=1.0):
        self.truth, self.least, self.noise, self.wander, self.pause = truth, least, noise, wander, pause
        self.limits = WorkerRange(minimum=limits[0], maximum=limits[1])
        self.draw = np.random.default_rng(seed)
        self.now, self.drift, self.world = 0.0, 0.0, 1
        self.workers = limits[0]
        self.steps = MeasuredSteps()
        self.steps.enter(1, self.workers)
        self.policy = WorkerTarget(least, self.workers)
        self.moves = []  # when, to how many, and why

    def run(self, hours):
        interval = 4.0
        while self.now < hours * 3600:
            self.train(max(interval, 24 * self.truth.step(self.workers)))
            interval = min(2 * interval, 60.0)
            if self.decide():
                interval = 4.0
        return self

    def train(self, seconds):
        each = self.truth.step(self.workers)
        self.drift += self.wander * math.sqrt(seconds / 3600) * self.draw.standard_normal()
        lasted = np.exp(self.noise * self.draw.standard_normal(min(200, int(seconds / each))) + self.drift) * each
        self.now += seconds
        for one in lasted:
            self.steps.take(report(float(one), world=self.world, samples=self.truth.batch(self.workers)))

    def decide(self):
        """Whether the number of workers is another now."""
        curve = SpeedupCurve(self.steps.observations(self.now))
        situation = Situation(
            limits=self.limits,
            present=self.workers,
            measured=self.steps.enough,
            incomplete=False,
            time_left=-1.0,
            now=self.now,
        )
        self.policy.decide(curve, situation)
        if self.policy.target == self.workers:
            return False
        self.workers, self.world = self.policy.target, self.world + 1
        self.now += self.pause
        self.steps.enter(self.world, self.workers)
        self.moves.append((round(self.now), self.workers, self.policy.reason))
        return True

    def best(self):
        """The largest number of workers that truly pays."""
        numbers = range(self.limits.minimum, self.limits.maximum + 1)
        return max((n for n in numbers if self.truth.speedup(n) / n >= self.least), default=self.limits.minimum)


class Believed:
    """A curve with these efficiencies, by number of workers from 1."""

    def __init__(self, *efficiencies, measured=()):
        self._points = {n: SpeedupPoint(n, n * each, n in measured) for n, each in enumerate(efficiencies, 1)}

    def at(self, workers):
        return self._points.get(workers)

    def above(self, present):
        return (p for n, p in self._points.items() if n > present and (p.measured or n <= 2 * present))


def at(present, *, limits=(1, 8), **more):
    given = {"measured": True, "incomplete": False, "time_left": -1.0, "now": 0.0, **more}
    return Situation(WorkerRange(minimum=limits[0], maximum=limits[1]), present, **given)


@pytest.mark.parametrize(
    "truth",
    [
        Truth(serial=0.0, network=0.01),
        Truth(serial=0.1, network=0.1),
        Truth(network=1.0, growth=0.5),
        Truth(network=0.4, growth=0.5, follows=True),
        Truth(serial=0.02, network=0.2, growth=0.3, samples=32),
    ],
    ids=["all pay", "some pay", "one pays", "follows", "few samples"],
)
@pytest.mark.parametrize("wander", [pytest.param(0.0, marks=pytest.mark.slow), 0.03])
def test_for_hours_it_moves_seldom_and_ends_near_the_best(truth, wander):
    job = VirtualJob(truth, (1, 8), 0.6, seed=3, noise=0.15, wander=wander).run(HOURS)
    assert abs(job.workers - job.best()) <= 1
    assert len(job.moves) <= 12
    assert len([when for when, *_ in job.moves if when > 3600]) <= 6
    for (_, before, _), (_, after, _) in zip([(0, 1, ""), *job.moves], job.moves, strict=False):
        assert after <= 2 * before


def test_a_speed_on_the_edge_is_no_reason_to_flap():
    """With 4 workers each does just what is wanted: whatever the noise says, the moves over it are few."""
    truth = Truth(network=0.3, growth=0.3, overlap=1.0)
    job = VirtualJob(truth, (1, 8), truth.speedup(4) / 4, seed=5, noise=0.2, wander=0.02).run(2 * HOURS)
    assert job.workers in (3, 4, 5)
    assert len(job.moves) <= 14


FALLING = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)


@pytest.mark.parametrize(
    ("before", "believed", "situation", "target", "why"),
    [
        pytest.param(
            1, Believed(1.0), at(1), 2, "tries 2: how the job scales is not known yet",
            id="starts with the fewest and tries one more",
        ),
        pytest.param(4, Believed(), at(4, limits=(4, 8)), 5, "", id="of one alone nothing is known"),
        pytest.param(
            1, Believed(1.0, 0.56, 0.5), at(1), 2,
            "tries 2: of 2 workers each should do 0.56 of what one does alone, at least 0.6 is wanted",
            id="an estimate may be wrong",
        ),
        pytest.param(1, Believed(1.0, 0.56, measured={1, 2}), at(1), 1, "", id="a measurement is not"),
        pytest.param(2, Believed(*FALLING, measured={1, 2}), at(2), 4, "", id="doubles where that surely pays"),
        pytest.param(2, Believed(1.0, 0.9, 0.8, 0.65), at(2), 3, "", id="and not where it may not"),
        pytest.param(
            3, Believed(1.0, 0.8, 0.65, 0.42, measured={1, 2, 3}), at(3), 3,
            "stays at 3: of 4 workers each would do 0.42 of what one does alone, less than --min_efficiency 0.6",
            id="does not explore what the curve excludes",
        ),
        pytest.param(2, Believed(1.0, 0.9, 0.9), at(2, measured=False), 2, "", id="has not measured yet"),
        pytest.param(2, Believed(1.0, 0.9, 0.9), at(2, incomplete=True), 2, "", id="others are on their way"),
        pytest.param(4, Believed(1.0, 0.9, 0.8, 0.8, 0.8), at(3, incomplete=True), 4, "", id="fewer than asked for"),
        pytest.param(
            1, Believed(1.0, 0.9, 0.8, 0.7, 0.65, 0.61, 0.5, measured={1, 2, 6, 7}), at(1), 6, "",
            id="what is known to pay is taken at once",
        ),
        pytest.param(
            3, Believed(1.0, 0.8, 0.3), at(3, time_left=SHORT - 1), 3,
            "stays at 3: the job is over too soon for a change to pay", id="too late to change",
        ),
        pytest.param(3, Believed(1.0, 0.8, 0.3), at(3, time_left=SHORT), 2, "", id="not too late"),
        pytest.param(4, Believed(*[0.9] * 8), at(4, limits=(1, 2)), 2, "", id="the maximum is the user's"),
        pytest.param(2, Believed(*[0.9] * 8), at(2, limits=(5, 6)), 5, "", id="the minimum is the user's"),
        pytest.param(
            5, Believed(*[0.9] * 8), at(5, limits=(5, 5)), 5, "stays at 5: --num_workers allows no more", id="no range",
        ),
        pytest.param(2, Believed(1.0, 0.2, 0.1), at(2, limits=(2, 8)), 2, "", id="the minimum is kept, whatever it costs"),
    ],
)  # fmt: skip
def test_a_decision(before, believed, situation, target, why):
    policy = WorkerTarget(0.6, before)
    policy.decide(believed, situation)
    assert policy.target == target
    assert policy.reason == why or not why
    assert not policy.decide(believed, situation) or target != before, "nothing new"


def test_what_does_not_pay_is_given_up_and_tried_again_soon_and_then_seldom():
    bad, good = (Believed(1.0, 0.8, third, measured={1, 2, 3}) for third in (0.5, 0.61))
    policy = WorkerTarget(0.6, 3)
    now = 0.0
    for backoff in (FIRST_BACKOFF, NEXT_BACKOFF, NEXT_BACKOFF):
        assert policy.decide(bad, at(3, now=now))
        assert policy.target == 2
        policy.decide(good, at(2, now=now + 0.99 * backoff))
        assert policy.target == 2
        now += backoff
        assert policy.decide(good, at(2, now=now))
        assert policy.target == 3


def test_what_did_not_pay_waits_for_its_time_though_its_measurement_is_forgotten():
    policy = WorkerTarget(0.6, 2)
    policy.decide(Believed(1.0, 0.5, measured={1, 2}), at(2))
    assert policy.target == 1
    assert policy.decide(Believed(1.0), at(1, now=FIRST_BACKOFF - 1))
    assert policy.reason == "stays at 1: a further worker does not pay, and is not yet tried again"
    policy.decide(Believed(1.0), at(1, now=FIRST_BACKOFF))
    assert policy.target == 2
