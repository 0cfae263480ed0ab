"""How many workers pay: the policy explores with care, stays where it pays, and never flaps."""

from __future__ import annotations

import math

import pytest
from scaling_kit import Truth, VirtualJob

from elasticdl.job.spec import WorkerRange
from elasticdl.master.rules.worker_target import FIRST_BACKOFF, HORIZON, Situation, WorkerTarget
from elasticdl.master.state.learnt import Rejection
from elasticdl.master.state.speedup import Curve, Point

HOURS = 2


def curve(*efficiencies, width=0.02):
    """By number of workers from 1."""
    points = []
    for n, efficiency in enumerate(efficiencies, 1):
        low, high = (n * (efficiency + sign * width) for sign in (-1, 1))
        points.append(Point(n, n * efficiency, low, high, 0.0, 0.0, 0.0))
    return Curve(tuple(points))


def at(present, *, limits=(1, 8), observed=(), **more):
    given = {"measured": True, "incomplete": False, "pause": 1.0, "time_left": -1.0, "now": 0.0, **more}
    return Situation(WorkerRange(minimum=limits[0], maximum=limits[1]), present, observed=observed, **given)


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
    tries_of_each = 1 + math.log2(1 + HOURS * 3600 / FIRST_BACKOFF)
    assert len(job.moves) <= 4 + 2 * tries_of_each
    assert len([when for when, *_ in job.moves if when > 3600]) <= 6
    for (_, before, _), (_, after, _) in zip([(0, 1, ""), *job.moves], job.moves, strict=False):
        assert after <= 2 * before


def test_a_speed_on_the_edge_is_no_reason_to_flap():
    """With 4 workers each does just what is wanted: whatever the noise says, the moves over it are few."""
    truth = Truth(network=0.3, growth=0.3, overlap=1.0)
    job = VirtualJob(truth, (1, 8), truth.speedup(4) / 4, seed=5, noise=0.2, wander=0.02).run(2 * HOURS)
    assert job.workers in (3, 4, 5)
    assert len(job.moves) <= 14


GAIN = 2 * 0.9 - 1  # of a second worker
FALLING = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)


@pytest.mark.parametrize(
    ("before", "believed", "situation", "target", "why"),
    [
        pytest.param(
            1, curve(1.0, 0.8, 0.7, width=0.3), at(1), 2,
            "tries 2: of 2 workers each should do 0.80 of what one does alone, at least 0.6 is wanted",
            id="starts with the fewest and tries one more",
        ),
        pytest.param(2, curve(*FALLING), at(2, observed={2}), 4, "", id="doubles where that is certain to pay"),
        pytest.param(
            3, curve(1.0, 0.8, 0.65, 0.42), at(3), 3,
            "stays at 3: of 4 workers each would do 0.42 of what one does alone, less than --min_efficiency 0.6",
            id="does not explore what a confident fit excludes",
        ),
        pytest.param(2, curve(1.0, 0.9, 0.9), at(2, measured=False), 2, "", id="has not measured yet"),
        pytest.param(2, curve(1.0, 0.9, 0.9), at(2, incomplete=True), 2, "", id="others are on their way"),
        pytest.param(4, curve(1.0, 0.9, 0.8, 0.8, 0.8), at(3, incomplete=True), 4, "", id="fewer than asked for"),
        pytest.param(
            1, curve(1.0, 0.9, 0.8, 0.7, 0.65, 0.61, 0.5), at(1, observed={1, 2, 6, 7}), 6, "",
            id="what is known to pay is taken at once",
        ),
        pytest.param(1, curve(1.0, 0.9), at(1, pause=0.9 * GAIN * HORIZON), 2, "", id="brings more than it costs"),
        pytest.param(1, curve(1.0, 0.9), at(1, pause=1.1 * GAIN * HORIZON), 1, "", id="costs more than it brings"),
        pytest.param(3, curve(1.0, 0.8, 0.3), at(3, pause=2.0, time_left=3.0), 3, "", id="too late to change"),
        pytest.param(4, curve(*[0.9] * 8), at(4, limits=(1, 2)), 2, "", id="the maximum is the user's"),
        pytest.param(2, curve(*[0.9] * 8), at(2, limits=(5, 6)), 5, "", id="the minimum is the user's"),
        pytest.param(
            5, curve(*[0.9] * 8), at(5, limits=(5, 5)), 5, "stays at 5: --num_workers allows no more", id="no range",
        ),
        pytest.param(2, curve(1.0, 0.2), at(2, limits=(2, 8)), 2, "", id="the minimum is kept, whatever it costs"),
    ],
)  # fmt: skip
def test_a_decision(before, believed, situation, target, why):
    policy = WorkerTarget(0.6, before)
    policy.decide(believed, situation)
    assert policy.target == target
    assert policy.reason == why or not why
    assert not policy.decide(believed, situation) or target != before, "nothing new"


def test_what_does_not_pay_is_given_up_and_tried_again_after_a_back_off_that_doubles():
    policy, bad, good = WorkerTarget(0.6, 3), curve(1.0, 0.8, 0.5), curve(1.0, 0.8, 0.61)
    now = 0.0
    for tries in range(3):
        backoff = FIRST_BACKOFF * 2**tries
        assert policy.decide(bad, at(3, observed={1, 2, 3}, now=now))
        assert (policy.target, policy.rejections(now)) == (2, (Rejection(3, backoff, backoff),))
        policy.decide(good, at(2, observed={1, 2, 3}, now=now + 0.99 * backoff))
        assert policy.target == 2
        now += backoff
        assert policy.decide(good, at(2, observed={1, 2, 3}, now=now))
        assert policy.target == 3


class BusyAtFirst(VirtualJob):
    """The machine is slower while the job has two workers for the first time."""

    def train(self, seconds):
        self.drift = math.log(1.25) if self.world == 2 else 0.0
        super().train(seconds)


def test_what_was_measured_in_a_busy_moment_is_measured_again():
    """Faster than one, so it is not forgotten, and less than is wanted."""
    truth = Truth(serial=0.0, network=0.214, growth=0.02, overlap=1.0)
    job = BusyAtFirst(truth, (1, 8), 0.6, seed=1, noise=0.05).run(0.25)
    assert [workers for _, workers, _ in job.moves[:3]] == [2, 1, 2]
    says = "tries 2 again: of 2 workers each did 0.57 of what one does alone, less than --min_efficiency 0.6"
    assert job.moves[2][2] == says
    assert job.moves[2][0] > FIRST_BACKOFF
    assert abs(job.workers - job.best()) <= 1


def test_it_is_tried_again_sooner_if_it_has_become_certain_to_pay():
    policy = WorkerTarget(0.6, 3)
    policy.decide(curve(1.0, 0.8, 0.5), at(3))
    early = FIRST_BACKOFF / 8
    policy.decide(curve(1.0, 0.9, 0.8), at(2, now=early - 1))
    assert policy.target == 2
    policy.decide(curve(1.0, 0.9, 0.8), at(2, now=early))
    assert policy.target == 3
