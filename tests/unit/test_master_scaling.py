"""How fast a job is with how many workers: what is measured, what is believed of other numbers, and how many pay."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticdl.job.messages import StepReport
from elasticdl.job.spec import MOST_WORKERS, WorkerRange
from elasticdl.master.core import sizing

# ---- what is measured ----


def report(seconds, *, world=1, samples=64):
    return StepReport(1, 0, 0.5, samples, 0.1, seconds, world, samples, False)


class Measured:
    """Worlds after each other: so many workers, seconds and samples of a step, how many steps, and at what time."""

    def __init__(self, *worlds):
        self.steps = sizing.MeasuredSteps()
        for version, each in enumerate(worlds, 1):
            workers, seconds, samples, count, now = (*each, *(64, 40, 0.0)[len(each) - 2 :])
            self.steps.enter(version, workers)
            self.make(version, [(seconds, samples)] * count)
            self.steps.observations(now)

    def make(self, version, steps):
        for seconds, samples in steps:
            self.steps.take(report(seconds, samples=samples, world=version))

    def known(self, now=0.0):
        return {each.workers: round(each.seconds, 6) for each in self.steps.observations(now)}


@pytest.mark.parametrize(
    ("steps", "known"),
    [
        ([(5.0, 64)] * sizing.SKIPPED + [(0.1, 64)] * 38 + [(9.0, 64), (4.0, 64)], {2: 0.1}),  # next to a pause
        ([(0.1, 64)] * 40 + [(0.01, 7)] * 9, {2: 0.1}),  # the last batch of an epoch
        ([(0.1, 0)] * 40, {}),  # scripts that do not tell
        ([(0.1, 64)] * (sizing.ENOUGH + sizing.SKIPPED - 1), {}),
        ([(0.1, 64)] * (sizing.ENOUGH + sizing.SKIPPED), {2: 0.1}),
        ([(20.0, 64)] * (5 + sizing.SKIPPED), {2: 20.0}),  # few and long ones
        ([(0.1, 32), (0.2, 64)] * 100, {}),  # without a usual size
        ([(0.1, 64)] * sizing.SKIPPED + [(0.1, 7), *[(0.1, 64)] * 3] * 6, {}),  # two thirds of one size are too few
    ],
)
def test_ordinary_steps_of_one_size_make_a_measurement(steps, known):
    measured = Measured((1, 1.0, 64, 3), (2, 1.0, 64, 0))  # each world has its first steps left out
    measured.make(2, steps)
    measured.make(7, [(1.0, 64)] * 40)  # of another world
    assert measured.steps.enough == bool(known)
    assert measured.known() == known


@pytest.mark.parametrize(
    ("worlds", "known"),
    [
        ([(1, 1.0), (2, 0.6), (1, 1.1)], {1: 1.1, 2: 0.6}),
        # The job has come to another machine, or has another batch.
        ([(1, 1.0), (2, 0.6), (1, 2.0)], {1: 2.0}),
        ([(1, 1.0), (2, 0.6), (1, 1.0, 128)], {1: 1.0}),
        # Workers do not make each other faster, but where a part fits into the caches, or a batch follows the workers.
        ([(1, 1.0), (2, 0.45)], {1: 1.0, 2: 0.45}),
        ([(1, 1.0), (2, 0.3)], {2: 0.3}),
        ([(2, 0.3), (1, 1.0)], {1: 1.0}),
        ([(1, 1.0), (2, 0.95, 128)], {1: 1.0, 2: 0.95}),
        # That more are no better is believed for a while.
        ([(2, 1.0), (1, 0.8, 64, 40, sizing.BELIEVED)], {1: 0.8, 2: 1.0}),
        ([(2, 1.0), (1, 0.8, 64, 40, sizing.BELIEVED + 1)], {1: 0.8}),
    ],
)
def test_each_number_of_workers_has_its_newest_measurement(worlds, known):
    assert Measured(*worlds).known(worlds[-1][4] if len(worlds[-1]) > 4 else 0.0) == known


# ---- what is believed ----


def of(seconds, samples=64):
    """Seconds of a step, by number of workers."""
    return sizing.SpeedupCurve(tuple(sizing.Observation(n, samples, each) for n, each in seconds.items()))


numbers = st.integers(1, 12) | st.just(MOST_WORKERS)
seen = st.dictionaries(numbers, st.tuples(st.integers(1, 2**53), st.floats(1e-9, 1e9)), min_size=2)


@given(seen)
def test_whatever_was_measured_is_believed_but_nobody_is_made_faster_by_others(measured):
    """As it seems where each one's part fits into the caches."""
    curve = sizing.SpeedupCurve(tuple(sizing.Observation(n, *measured[n]) for n in sorted(measured)))
    for n in (*range(1, 14), 100, MOST_WORKERS):
        at = curve.at(n)
        assert all(math.isfinite(number) for number in dataclasses.astuple(at))
        assert at.speedup <= n
        assert at.measured == ({1, n} <= measured.keys())
        if at.measured:
            (ones, alone), (samples, seconds) = measured[1], measured[n]
            assert at.speedup == pytest.approx(min(n, samples / seconds / (ones / alone)))
    assert all(isinstance(curve.advice(n), str) for n in measured)


def made_up(draw):
    """Samples and seconds of a step of a job in which computing and reduction overlap, by number of workers."""
    samples, seconds, serial = int(draw.choice([32, 64, 100, 256, 1024])), 10 ** draw.uniform(-2, 1), draw.beta(1, 8)
    network, growth, overlap = 10 ** draw.uniform(-2.5, 0), 10 ** draw.uniform(-2.5, 0), draw.uniform(1, 5)
    follows = draw.random() < 0.3

    def step(n):
        share = 1.0 if follows else math.ceil(samples / n) / samples
        reduction = 0.0 if n == 1 else network * (1 + growth * (n - 2))
        computing = serial + (1 - serial) * share
        return samples * (n if follows else 1), seconds * (computing**overlap + reduction**overlap) ** (1 / overlap)

    return step


def test_estimates_of_jobs_of_another_form_are_near():
    """Five workers, by one to four, with a noise of 1 %."""
    errors = []
    for seed in range(60):
        draw = np.random.default_rng(seed)
        job = made_up(draw)
        seen = ((n, *job(n)) for n in range(1, 5))
        noisy = [sizing.Observation(n, batch, each * math.exp(draw.normal(0, 0.01))) for n, batch, each in seen]
        (ones, alone), (fives, seconds) = job(1), job(5)
        estimate = sizing.SpeedupCurve(tuple(noisy)).at(5).speedup
        errors.append(abs(math.log(estimate / (fives / seconds / (ones / alone)))))
    assert np.median(errors) < 0.02
    assert np.quantile(errors, 0.9) < 0.1


def test_of_others_the_nearest_tell_and_one_alone_nothing():
    """Two cores: a third worker makes every step slower."""
    assert of({1: 1.0, 2: 0.51, 3: 0.62, 4: 0.66}).at(5).speedup == pytest.approx(1.315, rel=0.01), "as at four"
    assert of({1: 1.0, 2: 1.2}).at(3).speedup < 1 / 1.2, "each worker more costs time"
    assert of({1: 1.0}).at(1).speedup == 1.0
    assert [of({1: 1.0}).at(2), of({4: 1.0}).at(4), sizing.SpeedupCurve().at(1)] == [None] * 3
    curve = of({33: 1.0, 101: 0.5}, 10_000)
    assert [p["workers"] for p in curve.published(101)] == [1, 33, 101, 102, 202]
    assert [p.workers for p in curve.above(101)] == list(range(102, 203))


@pytest.mark.parametrize(
    ("seconds", "workers", "said"),
    [
        ({1: 1.0, 2: 0.7}, 1, "one more adds 0.4, measured"),
        ({2: 0.6, 3: 0.45}, 3, "3 workers do 2.4 times the work of one (each does 0.80 of one worker, by estimate)"
         "; one more would add about 0.6"),
        ({1: 1.0, 2: 0.5, 3: 0.6}, 2, "2 workers do 2.0 times the work of one (each does 1.00 of one worker, measured)"
         "; one more adds nothing, measured"),
        ({3: 1.0}, 4, ""),
    ],
)  # fmt: skip
def test_the_advice_is_a_sentence(seconds, workers, said):
    assert of(seconds).advice(workers) == said


# ---- how many pay ----


def situation(present, *, limits=(1, 8), **more):
    given = {"measured": True, "incomplete": False, "time_left": -1.0, "now": 0.0, **more}
    return sizing.Situation(WorkerRange(minimum=limits[0], maximum=limits[1]), present, **given)


@pytest.mark.parametrize(
    ("serial", "network"), [(0.0, 0.002), (0.05, 0.05), (0.0, 1.0)], ids=["all pay", "some pay", "one pays"]
)
def test_for_hours_it_moves_seldom_and_ends_near_the_best(serial, network):
    """Steps scatter, and the whole job's speed wanders. Each worker but the first costs so much more time than the one before."""

    def speedup(n):
        return 1 / (serial + (1 - serial) / n + (0 if n == 1 else network * (1 + 0.3 * (n - 2))))

    draw, now, drift, interval, workers, moves = np.random.default_rng(3), 0.0, 0.0, 4.0, 1, []
    policy, steps = sizing.WorkerTarget(0.6, workers), sizing.MeasuredSteps()
    steps.enter(1, workers)
    while now < 2 * 3600:
        usual = 0.5 / speedup(workers)
        drift += 0.03 * math.sqrt(interval / 3600) * draw.standard_normal()
        for scatter in draw.standard_normal(min(200, int(interval / usual))):
            steps.take(report(float(usual * np.exp(0.15 * scatter + drift)), world=1 + len(moves)))
        now, interval = now + interval, min(2 * interval, 60.0)
        policy.decide(sizing.SpeedupCurve(steps.observations(now)), situation(workers, measured=steps.enough, now=now))
        if policy.target != workers:
            assert policy.target <= 2 * workers
            workers, interval = policy.target, 4.0
            moves.append(now)
            steps.enter(1 + len(moves), workers)
    best = max(n for n in range(1, 9) if speedup(n) / n >= 0.6)
    assert abs(workers - best) <= 1
    assert len(moves) <= 12
    assert len([when for when in moves if when > 3600]) <= 6


class Believed:
    """A curve with these efficiencies, by number of workers from 1."""

    def __init__(self, *efficiencies, measured=()):
        self._points = {n: sizing.SpeedupPoint(n, n * each, n in measured) for n, each in enumerate(efficiencies, 1)}

    def at(self, workers):
        return self._points.get(workers)

    def above(self, present):
        return (p for n, p in self._points.items() if n > present and (p.measured or n <= 2 * present))


@pytest.mark.parametrize(
    ("efficiencies", "measured", "present", "given", "target", "why"),
    [
        ((), (), 4, {"limits": (4, 8)}, 5, "tries 5: how the job scales is not known yet"),
        # An estimate may be wrong; a measurement is not.
        ((1.0, 0.56, 0.5), (), 1, {}, 2, "tries 2: of 2 workers each should do 0.56 of what one does alone, at least 0.6 is wanted"),
        ((1.0, 0.56), (1, 2), 1, {}, 1, ""),
        # It doubles where that surely pays.
        ((1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65), (1, 2), 2, {}, 4, ""),
        ((1.0, 0.9, 0.8, 0.65), (), 2, {}, 3, ""),
        ((1.0, 0.8, 0.65, 0.42), (1, 2, 3), 3, {}, 3, "stays at 3: of 4 workers each would do 0.42 of what one does alone, "
         "less than --min_efficiency 0.6"),
        ((1.0, 0.9, 0.9), (), 2, {"measured": False}, 2, ""),
        ((1.0, 0.9, 0.9), (), 2, {"incomplete": True}, 2, ""),  # others are on their way
        ((1.0, 0.9, 0.8, 0.7, 0.65, 0.61, 0.5), (1, 2, 6, 7), 1, {}, 6, ""),  # what is known to pay is taken at once
        ((1.0, 0.8, 0.3), (), 3, {"time_left": sizing.SHORT - 1}, 3, "stays at 3: the job is over too soon for a change to pay"),
        ((1.0, 0.8, 0.3), (), 3, {"time_left": sizing.SHORT}, 2, ""),
        # The range is the user's.
        ([0.9] * 8, (), 4, {"limits": (1, 2)}, 2, ""),
        ([0.9] * 8, (), 2, {"limits": (5, 6)}, 5, ""),
        ((1.0, 0.2, 0.1), (), 2, {"limits": (2, 8)}, 2, ""),
    ],
)  # fmt: skip
def test_a_decision(efficiencies, measured, present, given, target, why):
    policy, believed = sizing.WorkerTarget(0.6, present), Believed(*efficiencies, measured=measured)
    policy.decide(believed, situation(present, **given))
    assert policy.target == target
    assert policy.reason == why or not why
    assert not policy.decide(believed, situation(present, **given)) or target != present, "nothing new"


def test_what_does_not_pay_is_given_up_and_tried_again_soon_and_then_seldom():
    bad, good = (Believed(1.0, 0.8, third, measured={1, 2, 3}) for third in (0.5, 0.61))
    policy, now = sizing.WorkerTarget(0.6, 3), 0.0
    for backoff in (sizing.FIRST_BACKOFF, sizing.NEXT_BACKOFF, sizing.NEXT_BACKOFF):
        assert policy.decide(bad, situation(3, now=now))
        assert policy.target == 2
        policy.decide(good, situation(2, now=now + 0.99 * backoff))
        assert policy.target == 2
        now += backoff
        assert policy.decide(good, situation(2, now=now))
        assert policy.target == 3
