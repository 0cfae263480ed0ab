"""Which jobs experiment 3 runs, and what of that is the same for any number of workers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.experiments.convergence.course import require_plan
from benchmarks.experiments.convergence.plan import (
    CIFAR10,
    DIGITS,
    VARIABLE,
    Change,
    Job,
    Kind,
    Policy,
    Step,
    Task,
    draw_changes,
    read_steps,
)
from benchmarks.processes import Failed
from elasticdl.elastic.core.plan import BatchPlan


@pytest.mark.parametrize("recipe", [DIGITS, CIFAR10])
def test_micro_batches_are_the_same_for_any_number_of_workers(recipe):
    assert recipe.samples % recipe.global_batch == 0
    for workers in (2, 3, 4):
        plan = BatchPlan.equal(range(recipe.global_batch), workers)
        every = [each for rank in range(workers) for each in plan.mine(rank, recipe.micro_batch)]
        assert {each.samples for each in every} == {recipe.micro_batch}


@given(st.sampled_from(Policy), st.integers(0, 1000))
def test_changes_follow_from_the_seed_and_fit_the_shortest_training(policy, seed):
    changes = draw_changes(DIGITS, policy, 5, 4, seed)
    assert changes == draw_changes(DIGITS, policy, 5, 4, seed)
    workers = [2, *(change.workers for change in changes)]
    assert set(workers) <= {2, 3, 4}
    assert all(before != after for before, after in pairwise(workers))
    # A job is held one step before a change, in the world that the last change has begun.
    assert all(after - before >= 2 for before, after in pairwise([0, *(change.step for change in changes)]))
    assert changes[-1].step < 5 * DIGITS.steps_per_epoch(policy, 4)


def test_what_is_to_be_done_and_steps_travel_through_the_folder(tmp_path):
    task = Task(Job(Policy.RATE, Kind.ELASTIC, 0, 6, (Change(5, 3), Change(9, 2))), DIGITS)
    task.write(tmp_path)
    assert Task.read({VARIABLE: str(tmp_path)}) == task
    assert task.job.holds == [4, 8]
    assert task.job.epoch_factor == 15
    steps = [Step(1, 2, 0.5, 0.002), Step(2, 3, 0.25, 0.003)]
    for step in steps:
        step.append(tmp_path)
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": 3, "work')  # is being written
    assert list(read_steps(tmp_path)) == steps
    with pytest.raises(ValueError, match=r"python -m benchmarks\.experiment3"):
        Task.read({})


def formed(step, workers):
    return {"event": "world_formed", "step": step, "members": list(range(workers))}


@pytest.mark.parametrize("second", [[formed(6, 3)], [formed(5, 4)], []])
def test_a_world_that_began_elsewhere_is_a_failure(second):
    job = Job(Policy.RATE, Kind.ELASTIC, 0, 6, (Change(5, 3),))
    require_plan(job, [formed(0, 2), formed(5, 3)])
    with pytest.raises(Failed, match="planned were"):
        require_plan(job, [formed(0, 2), *second])
