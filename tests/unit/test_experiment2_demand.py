"""How many requests come, and how many replicas that takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.experiments.serving.demand import (
    HEADROOM,
    PUBLISHED,
    Autoscaler,
    LoadPlan,
    Rule,
    parse_curve,
    scalings,
)

RULE = Rule(per_replica=4.0, least=1, most=7, patience=3)


def looks(replicas: int, *rates: float) -> list[int]:
    """The replicas after each look."""
    autoscaler, found = Autoscaler(RULE, replicas), []
    for rate in rates:
        autoscaler = autoscaler.look(rate)
        found.append(autoscaler.replicas)
    return found


def test_the_rate_follows_the_curve_with_a_ramp_between_its_levels():
    curve = parse_curve("0:2,60:4,100", scale=2.0, ramp=10.0)
    assert curve.end == 50
    rates = {0: 2, 29.9: 2, 32.5: 3, 35: 4, 49: 4}
    assert [curve.rate(time, 10) for time in rates] == pytest.approx(
        [(each - HEADROOM) * 10 for each in rates.values()]
    )


@pytest.mark.parametrize("text", ["", "0:2", "10:2,20", "0:2,5:3,5:2,9", "0:0,9", "0:2,x:3,9", "0:2,5:3:4,9"])
def test_what_is_no_curve_is_refused(text):
    with pytest.raises(ValueError, match=r"expected|must begin|at least one"):
        parse_curve(text, 1.0, 1.0)


def test_the_published_curve_has_the_published_replicas():
    plan = LoadPlan(parse_curve(PUBLISHED, 1.0, 5.0), every=5.0, window=10.0, seed=1)
    reached = [(each.time, each.replicas) for each in scalings(plan, Autoscaler(RULE, 2))]
    assert [replicas for _, replicas in reached] == [3, 6, 7, 6, 5, 3, 2]
    assert reached[-1][0] < 460


@pytest.mark.parametrize(
    ("replicas", "rates", "found"),
    [
        pytest.param(2, [25.0], [7], id="up at once"),
        pytest.param(2, [100.0], [7], id="no more than the most"),
        pytest.param(5, [4.0, 11.0, 8.0, 8.0], [5, 5, 3, 3], id="down after a while, and only as far"),
        pytest.param(5, [4.0, 4.0, 19.0, 4.0, 4.0, 4.0], [5, 5, 5, 5, 5, 1], id="a lull in between"),
        pytest.param(5, [21.9, 18.1, 22.1], [5, 5, 6], id="near what the replicas are for"),
    ],
)
def test_the_autoscaler_looks_at_rates(replicas, rates, found):
    assert looks(replicas, *rates) == found


@given(st.integers(1, 7), st.lists(st.floats(0, 60), max_size=30), st.floats(0, 60))
def test_whatever_was_before_a_steady_rate_gets_what_it_needs(replicas, before, rate):
    found = looks(replicas, *before, *[rate] * 8)
    assert all(1 <= each <= 7 for each in found)
    assert found[-5] == found[-1]
    assert found[-1] * 4.0 * 1.1 >= min(rate, 28.0) - 1e-9, "enough"
    assert (found[-1] - 1) * 4.0 < max(rate / 0.9, 4.0) + 1e-9, "and no more"
