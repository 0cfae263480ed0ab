"""How many workers pay: the policy explores with care, stays where it pays, and never flaps."""

from __future__ import annotations

import math
from dataclasses import replace

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


def test_it_starts_with_the_fewest_and_tries_one_more():
    policy = WorkerTarget(0.6, 1)
    assert policy.decide(curve(1.0, 0.8, 0.7, width=0.3), at(1))
    assert policy.target == 2
    assert policy.reason == "tries 2: of 2 workers each should do 0.80 of what one does alone, at least 0.6 is wanted"


def test_it_doubles_where_that_is_certain_to_pay():
    policy = WorkerTarget(0.6, 2)
    policy.decide(curve(1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65), at(2, observed={2}))
    assert policy.target == 4


def test_it_does_not_explore_what_a_confident_fit_excludes():
    policy = WorkerTarget(0.6, 3)
    assert policy.decide(curve(1.0, 0.8, 0.65, 0.42), at(3))
    assert policy.target == 3
    says = "stays at 3: of 4 workers each would do 0.42 of what one does alone, less than --min_efficiency 0.6"
    assert policy.reason == says
    assert not policy.decide(curve(1.0, 0.8, 0.66, 0.43), at(3)), "nothing new"


def test_it_stays_until_it_has_measured_and_while_others_are_on_their_way():
    policy = WorkerTarget(0.6, 2)
    for waits in ({"measured": False}, {"incomplete": True}):
        assert not policy.decide(curve(1.0, 0.9, 0.9), at(2, **waits))
    assert policy.target == 2


def test_with_fewer_than_it_has_asked_for_it_waits():
    policy = WorkerTarget(0.6, 4)
    assert not policy.decide(curve(1.0, 0.9, 0.8, 0.8, 0.8), at(3, incomplete=True))
    assert policy.target == 4


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


def test_what_an_earlier_job_rejected_is_not_tried():
    policy = WorkerTarget(0.6, 1)
    policy.recall([Rejection(2, 300.0, 600.0)], 0.0)
    policy.decide(curve(1.0, 0.61), at(1, observed={1, 2}))
    assert policy.target == 1
    policy.decide(curve(1.0, 0.61), at(1, observed={1, 2}, now=300.0))
    assert policy.target == 2


def test_what_is_known_to_pay_is_taken_at_once():
    policy = WorkerTarget(0.6, 1)
    policy.decide(curve(1.0, 0.9, 0.8, 0.7, 0.65, 0.61, 0.5), at(1, observed={1, 2, 6, 7}))
    assert policy.target == 6


def test_a_change_that_costs_more_than_it_brings_is_not_made():
    gain = 2 * 0.9 - 1
    for pause, target in ((0.9 * gain * HORIZON, 2), (1.1 * gain * HORIZON, 1)):
        policy = WorkerTarget(0.6, 1)
        policy.decide(curve(1.0, 0.9), at(1, pause=pause))
        assert policy.target == target
    late = WorkerTarget(0.6, 3)
    late.decide(curve(1.0, 0.8, 0.3), at(3, pause=2.0, time_left=3.0))
    assert late.target == 3


def test_the_range_is_the_users():
    policy, situation = WorkerTarget(0.6, 4), at(4, limits=(1, 8))
    policy.decide(curve(*[0.9] * 8), replace(situation, limits=WorkerRange(minimum=1, maximum=2)))
    assert policy.target == 2
    policy.decide(curve(*[0.9] * 8), replace(situation, limits=WorkerRange(minimum=5, maximum=6)))
    assert policy.target == 5
    policy.decide(curve(*[0.9] * 8), at(5, limits=(5, 5)))
    assert policy.reason == "stays at 5: --num_workers allows no more"
    many = WorkerTarget(0.6, 2)
    many.decide(curve(1.0, 0.2), at(2, limits=(2, 8)))
    assert many.target == 2, "the minimum is kept, whatever it costs"
