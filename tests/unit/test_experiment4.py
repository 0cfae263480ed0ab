"""Experiment 4's pure parts: the workload, AdaptDL's rule, what is made of the outcome."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.experiment4 import Completed, Outcome, compared, measured
from benchmarks.experiments.measures import Change
from benchmarks.experiments.sharing import KINDS, RESTART_FACTOR, Candidate, PlannedJob, allocate, candidate, draw_jobs


def test_a_seed_gives_the_same_unequal_jobs_and_a_scale_makes_work_and_waiting_shorter_alike():
    jobs = draw_jobs(3, 1.0)
    assert jobs == draw_jobs(3, 1.0) != draw_jobs(1, 1.0)
    assert sorted(job.kind.name for job in jobs) == ["good"] * 3 + ["middling"] * 3 + ["poor"] * 2
    assert [job.arrival for job in jobs] == sorted(job.arrival for job in jobs)
    assert jobs[0].arrival == 0
    for job, short in zip(jobs, draw_jobs(3, 4.0), strict=True):
        assert (short.arrival, short.work) == (pytest.approx(job.arrival / 4), pytest.approx(job.work / 4, rel=0.02))


def test_the_kinds_scale_as_their_names_say():
    good, middling, poor = (kind.seconds(1) / kind.seconds(8) for kind in KINDS)
    assert good > 6 > middling > 2.5 > poor
    assert min(range(1, 9), key=KINDS[2].seconds) < 8


def brute_force(candidates, places):
    """The best sum that there is."""
    ranges = (range(min(places, max(1, 2 * each.most_had)) + 1) for each in candidates)
    return max(value(candidates, shares) for shares in itertools.product(*ranges) if sum(shares) <= places)


def value(candidates, shares):
    return sum(
        each.speedup(workers) * (RESTART_FACTOR if each.workers and workers != each.workers else 1.0)
        for each, workers in zip(candidates, shares, strict=True)
    )


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.lists(st.floats(0, 2), max_size=6)), max_size=3),
    st.integers(0, 6),
)
def test_adaptdl_s_rule_finds_the_largest_sum_of_speedups(drawn, places):
    candidates = [
        Candidate(str(number), workers, most, {n: sum(gains[:n]) for n in range(1, len(gains) + 1)})
        for number, (workers, most, gains) in enumerate(drawn)
    ]
    shares = allocate(candidates, places)
    assert sum(shares.values()) <= places
    assert value(candidates, list(shares.values())) == pytest.approx(brute_force(candidates, places))


def test_what_a_job_is_known_to_gain_comes_from_its_journal():
    journal = [
        {"event": "world_formed", "members": [0, 1, 2]},
        {"event": "advice", "curve": [{"workers": 1, "speedup": 1.0}, {"workers": 2, "speedup": 1.5}]},
        {"event": "world_formed", "members": [0]},
    ]
    assert candidate("a", journal, 1) == Candidate("a", 1, 3, {1: 1.0, 2: 1.5})
    assert candidate("a", [], 1).speedup(2) == 2.0


def test_outcome_counts_from_each_submission():
    kind = KINDS[0]
    jobs = [
        Completed(PlannedJob("a", 0, 100, kind), 0.0, 60.0, 2),
        Completed(PlannedJob("b", 10, 50, kind), 10.0, 40.0, 1),
    ]
    found = measured(Outcome(jobs, [Change(5.0, "a", 4), Change(60.0, "a", 0)]))
    assert (found["mean_completion"], found["makespan"], found["worlds"]) == (45.0, 60.0, 3)
    assert found["goodput"] == pytest.approx(150 * 0.48 / 60)
    assert found["gpu_seconds"] == pytest.approx(220.0)


def test_ours_is_compared_with_the_better_of_the_simple_ones():
    numbers = {
        name: {"mean_completion": seconds}
        for name, seconds in (("fixed4", 100.0), ("greedy", 200.0), ("adaptdl", 70.0), ("share", 75.0))
    }
    assert compared(numbers)["to_best_simple"] == 0.75
    assert compared({"greedy": {"mean_completion": 1.0}}) == {}
