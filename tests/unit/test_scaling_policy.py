"""How many workers pay: the policy explores with care, stays where it pays, and never flaps."""

from __future__ import annotations

import math

import pytest
from scaling_kit import Truth, VirtualJob

from elasticdl.job.spec import WorkerRange
from elasticdl.master.core.sizing import FIRST_BACKOFF, NEXT_BACKOFF, SHORT, Situation, SpeedupPoint, WorkerTarget

HOURS = 2


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


class BusyAtFirst(VirtualJob):
    """The machine is slower while the job has two workers for the first time."""

    def train(self, seconds):
        self.drift = math.log(1.25) if self.world == 2 else 0.0
        super().train(seconds)


def test_what_was_measured_in_a_busy_moment_is_measured_again():
    """Faster than one, and less than is wanted."""
    truth = Truth(serial=0.0, network=0.214, growth=0.02, overlap=1.0)
    job = BusyAtFirst(truth, (1, 8), 0.6, seed=1, noise=0.05).run(0.25)
    assert [workers for _, workers, _ in job.moves[:3]] == [2, 1, 2]
    assert job.moves[2][2] == "tries 2: how the job scales is not known yet"
    assert job.moves[2][0] > FIRST_BACKOFF
    assert abs(job.workers - job.best()) <= 1


def test_what_did_not_pay_waits_for_its_time_though_its_measurement_is_forgotten():
    policy = WorkerTarget(0.6, 2)
    policy.decide(Believed(1.0, 0.5, measured={1, 2}), at(2))
    assert policy.target == 1
    assert policy.decide(Believed(1.0), at(1, now=FIRST_BACKOFF - 1))
    assert policy.reason == "stays at 1: a further worker does not pay, and is not yet tried again"
    policy.decide(Believed(1.0), at(1, now=FIRST_BACKOFF))
    assert policy.target == 2
