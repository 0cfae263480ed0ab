"""How many requests come, and how many replicas that takes."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.experiments.serving.demand import (
    HEADROOM,
    PUBLISHED,
    Autoscaler,
    LoadPlan,
    Rule,
    arrivals,
    parse_curve,
    rate_before,
    scalings,
)

RULE = Rule(per_replica=4.0, least=1, most=7, patience=3)


def looks(autoscaler: Autoscaler, *rates: float) -> list[int]:
    """The replicas after each look."""
    found = []
    for rate in rates:
        autoscaler, _ = autoscaler.look(rate)
        found.append(autoscaler.replicas)
    return found


def test_the_rate_follows_the_curve_with_a_ramp_between_its_levels():
    curve = parse_curve("0:2,60:4,100", scale=2.0, ramp=10.0)
    assert curve.end == 50
    assert curve.rate(0, 10) == curve.rate(29.9, 10) == (2 - HEADROOM) * 10
    assert curve.rate(32.5, 10) == pytest.approx((3 - HEADROOM) * 10)
    assert curve.rate(35, 10) == curve.rate(49, 10) == (4 - HEADROOM) * 10


@pytest.mark.parametrize(
    "text", ["", "0:2", "10:2,20", "0:2,5:3,5:2,9", "0:2,9:3,4", "0:0,9", "0:2,x:3,9", "0:2,5:3:4,9"]
)
def test_what_is_no_curve_is_refused(text):
    with pytest.raises(ValueError, match=r"expected|must begin|at least one"):
        parse_curve(text, 1.0, 1.0)


def test_as_many_requests_come_as_the_curve_says():
    curve = parse_curve(PUBLISHED, 1.0, 0.0)
    times = list(arrivals(curve, 4.0, random.Random(1)))
    assert times == sorted(times)
    assert times[-1] < curve.end
    for start, end in pairwise([*curve.starts, curve.end]):
        expected = curve.rate(start, 4.0) * (end - start)
        assert sum(start <= time < end for time in times) == pytest.approx(expected, abs=5 * expected**0.5)


def test_the_published_curve_has_the_published_replicas():
    plan = LoadPlan(parse_curve(PUBLISHED, 1.0, 5.0), every=5.0, window=10.0, seed=1)
    reached = [(each.time, each.replicas) for each in scalings(plan, Autoscaler(RULE, 2))]
    assert [replicas for _, replicas in reached] == [3, 6, 7, 6, 5, 3, 2]
    assert reached[-1][0] < 460


def test_more_requests_scale_up_at_once():
    assert looks(Autoscaler(RULE, 2), 25.0) == [7]
    assert looks(Autoscaler(RULE, 2), 100.0) == [7], "no more than the most"


def test_fewer_requests_scale_down_when_they_were_few_for_a_while_and_only_as_far():
    assert looks(Autoscaler(RULE, 5), 4.0, 11.0, 8.0, 8.0) == [5, 5, 3, 3]
    assert looks(Autoscaler(RULE, 5), 4.0, 4.0, 19.0, 4.0, 4.0, 4.0) == [5, 5, 5, 5, 5, 1]


def test_a_rate_near_what_the_replicas_are_for_changes_nothing():
    assert looks(Autoscaler(RULE, 5), 21.9, 18.1) == [5, 5]
    assert looks(Autoscaler(RULE, 5), 22.1) == [6]


@given(st.integers(1, 7), st.lists(st.floats(0, 60), max_size=30), st.floats(0, 60))
def test_whatever_was_before_a_steady_rate_gets_what_it_needs(replicas, before, rate):
    autoscaler = Autoscaler(RULE, replicas)
    for each in before:
        autoscaler, _ = autoscaler.look(each)
        assert 1 <= autoscaler.replicas <= 7
    settled = looks(autoscaler, *[rate] * 4)[-1]
    assert settled == looks(autoscaler, *[rate] * 8)[-1]
    assert settled * 4.0 * 1.1 >= min(rate, 28.0) - 1e-9, "enough"
    assert (settled - 1) * 4.0 < max(rate / 0.9, 4.0) + 1e-9, "and no more"


def test_the_rate_is_of_the_window_or_of_what_there_was_of_it():
    came = [0.5, 1.0, 4.0, 9.5, 10.0]
    assert rate_before(came, 10.0, 5.0) == pytest.approx(2 / 5)
    assert rate_before(came, 1.0, 5.0) == pytest.approx(2 / 1)
    assert rate_before([], 0.0, 5.0) == 0
