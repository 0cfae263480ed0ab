"""Numbers of the experiments, from series that can be checked by hand and from ones that hypothesis makes up."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.experiment1 import TARGETS, Plan, compared, measured
from benchmarks.experiments.measures import (
    Change,
    Work,
    first_use,
    gpu_seconds,
    mean_gpus,
    spans,
    work_conserving,
)
from benchmarks.experiments.training import JobRun
from benchmarks.experiments.zoo.step_log import LoggedStep
from benchmarks.harness import judge

TWO_JOBS = [Change(1, "a", 4), Change(10, "a", 0), Change(12, "b", 2), Change(14, "b", 4), Change(20, "b", 0)]
PUBLISHED_PLAN = Plan(gpus=6, workers=4, second_after=120, job_gpu_seconds=1800, scale=1)

times = st.floats(0, 100)
changes = st.lists(st.builds(Change, times, st.sampled_from("abc"), st.integers(0, 8)), max_size=12)
works = st.lists(st.builds(Work, times, st.floats(0.1, 500), st.integers(1, 8)), min_size=1, max_size=5)


def test_a_series_by_hand():
    assert gpu_seconds(TWO_JOBS, 20) == 9 * 4 + 2 * 2 + 6 * 4
    assert gpu_seconds(TWO_JOBS, 13, "b") == 2
    assert mean_gpus(TWO_JOBS, 20) == pytest.approx(64 / 20)
    assert first_use(TWO_JOBS, "b") == 12
    assert first_use(TWO_JOBS, "c") is None


@given(changes, times)
def test_spans_cover_all_of_the_time_once_and_the_owners_have_what_all_have(series, end):
    found = [span for span, _ in spans(series, end)]
    assert sum(span.seconds for span in found) == pytest.approx(end)
    assert all(one.end == next_.start for one, next_ in pairwise(found))
    assert gpu_seconds(series, end) == pytest.approx(sum(gpu_seconds(series, end, owner) for owner in "abc"))


def test_the_bound_of_the_published_setting():
    # 120 s with 4, then 330 s in which the second has 2, then the second alone with 4.
    assert work_conserving([Work(0, 1800, 4), Work(120, 1800, 4)], 6) == pytest.approx([450, 735])
    assert PUBLISHED_PLAN.bound() == pytest.approx(735)


@given(works, st.integers(1, 10))
def test_a_schedule_without_overhead_is_as_fast_as_can_be_and_no_faster(jobs, gpus):
    ends, now = work_conserving(jobs, gpus), 0.0
    for job, end in zip(jobs, ends, strict=True):
        assert end - job.submitted >= job.gpu_seconds / min(job.most_gpus, gpus) - 1e-6, "no job is faster than alone"
    first = min(job.submitted for job in jobs)
    assert (max(ends) - first) * gpus >= sum(job.gpu_seconds for job in jobs) - 1e-6, "no GPU works twice"
    for job in sorted(jobs, key=lambda each: each.submitted):
        now = max(now, job.submitted) + job.gpu_seconds / min(job.most_gpus, gpus)
    assert max(ends) <= now + 1e-6, "as fast as one after the other"


def ideal(name: str, submitted: float, start: float, workers: dict[float, int], ended: float) -> JobRun:
    """A job whose steps take 36 GPU-seconds each; ``workers`` from a time on."""
    steps: list[LoggedStep] = []
    now = start
    while now < ended - 1e-6:
        having = [count for since, count in workers.items() if since <= now][-1]
        now += 36 / having
        steps.append(LoggedStep(len(steps) + 1, now, having, 1.0))
    return JobRun(name, submitted, start, ended, tuple(steps))


def test_a_perfect_elastic_run_is_at_its_bound():
    first, second = ideal("first", 0, 0, {0: 4}, 450), ideal("second", 120, 120, {120: 2, 450: 4}, 735)
    series = [Change(0, "first", 4), Change(120, "second", 2), Change(450, "first", 0), Change(450, "second", 4),
        Change(735, "second", 0)]  # fmt: skip
    elastic = measured(PUBLISHED_PLAN, series, [first, second])
    found = {"makespan": 735, "distance": 0, "full_length_distance": 0, "gpu_seconds": 3600}
    found |= {"second_waited_for_gpus": 0, "second_first_step": 18}
    assert {name: elastic[name] for name in found} == pytest.approx(found)
    gang_series = [Change(0, "first", 4), Change(450, "first", 0), Change(460, "second", 4), Change(910, "second", 0)]
    gang = measured(PUBLISHED_PLAN, gang_series, [first, ideal("second", 120, 460, {460: 4}, 910)])
    assert gang["second_waited_for_gpus"] == 340
    both = compared(gang, elastic)
    assert both["ratio"] == pytest.approx(735 / 910)
    assert both["gpu_seconds_overhead"] == pytest.approx(0)
    assert [row[-1] for row in judge(both, TARGETS)] == ["yes", "no", "yes", "yes", "yes"]


def test_what_does_not_grow_with_the_work_weighs_less_at_full_length():
    plan = Plan(gpus=6, workers=4, second_after=12, job_gpu_seconds=180, scale=10)
    steps = tuple(LoggedStep(number, 5 + 0.9 * number, 4, 1.0) for number in range(1, 51))
    job = JobRun("first", 0, 5, 50, steps)
    late = JobRun("second", 12, 15, 78.5, steps)
    found = measured(plan, [Change(0, "first", 4), Change(78.5, "first", 0)], [job, late])
    assert found["distance"] == pytest.approx(5 / 73.5)
    assert found["full_length_distance"] == pytest.approx(0.5 / 73.5)
