"""`elasticdl.common.backoff`: delays between attempts, and a bound on how often."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from elasticdl.common.backoff import Backoff, TokenBucket


def test_delays_double_up_to_their_bound_and_begin_anew_after_a_success():
    backoff = Backoff(first=1.0, longest=5.0)
    assert [backoff.delay() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert [backoff.delay() for _ in range(3000)][-1] == 5.0, "no overflow"
    backoff.reset()
    assert backoff.delay() == 1.0


@given(st.integers(0, 100), st.floats(0, 60))
def test_a_drawn_delay_is_of_the_upper_half_and_never_sooner_than_asked_for(seed, at_least):
    backoff = Backoff(random.Random(seed), first=1.0, longest=8.0)
    for bound in (1.0, 2.0, 4.0, 8.0, 8.0):
        assert max(at_least, bound / 2) <= backoff.delay(at_least) <= max(at_least, bound)


@given(st.lists(st.floats(0, 3), max_size=80))
def test_a_bucket_lets_through_its_burst_and_then_its_rate(pauses):
    bucket, now, passed = TokenBucket(rate=2.0, burst=5.0), 100.0, 0
    for pause in pauses:
        now += pause
        passed += bucket.take(now) == 0.0
        assert passed <= 5 + 2.0 * (now - 100.0) + 1e-6


def test_a_bucket_that_is_empty_says_when_to_ask_again():
    bucket = TokenBucket(rate=0.5, burst=1.0)
    assert bucket.take(0.0) == 0.0
    assert bucket.take(1.0) == 1.0
    assert bucket.take(2.0) == 0.0
