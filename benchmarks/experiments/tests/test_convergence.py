"""Experiment 3: which jobs it runs, what it does within a worker, and what it makes of the jobs' records."""

from __future__ import annotations

import json
import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import experiment3
from benchmarks.experiments.artefacts import Artefacts
from benchmarks.experiments.convergence.course import Result, require_plan
from benchmarks.experiments.convergence.curves import Curve, band, difference, verdict
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
    go_file,
    held_file,
    make_jobs,
    read_steps,
)
from benchmarks.experiments.convergence.resnet20 import GRID, LIMIT, TERMS, AddedExactly, Hold
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


# ---- within a worker ----


def gradients(exact):
    """Of ``TERMS`` micro-batches."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(30, 20)
    model = AddedExactly(linear) if exact else linear
    found = []
    for _ in range(TERMS):
        model.zero_grad()
        model(torch.randn(8, 30)).square().mean().backward()
        found.append(linear.weight.grad.clone())
    return found


@pytest.mark.parametrize("exact", [True, False])
def test_sums_do_not_depend_on_the_order_if_they_are_exact(exact):
    parts = gradients(exact)
    forward, backward = sum(parts), sum(reversed(parts))
    halves = sum(parts[: TERMS // 2]) + sum(parts[TERMS // 2 :])
    same = torch.equal(forward, backward) and torch.equal(forward, halves)
    assert same is exact
    plain = sum(gradients(False))
    torch.testing.assert_close(forward, plain, rtol=0, atol=TERMS * GRID)


def test_the_largest_gradients_still_add_exactly():
    parts = [torch.tensor(LIMIT - GRID), *[torch.tensor(LIMIT)] * (TERMS - 1)]
    assert sum(parts).item() == sum(reversed(parts)).item() == TERMS * LIMIT - GRID


def test_a_worker_waits_until_it_is_told_to_go(tmp_path):
    hold = Hold(tmp_path, [3], seconds=60)
    hold.on_world_change(2, 0)
    hold.on_train_batch_end(2, {})
    assert not held_file(tmp_path, 2).exists()
    worker = threading.Thread(target=hold.on_train_batch_end, args=(3, {}))
    worker.start()
    worker.join(0.1)
    assert worker.is_alive()
    assert held_file(tmp_path, 3).exists()
    go_file(tmp_path, 3).touch()
    worker.join(60)
    assert not worker.is_alive()
    with pytest.raises(TimeoutError, match=r"held after step 4: no go from the driver within 0\.05 s"):
        Hold(tmp_path, [4], seconds=0.05).on_train_batch_end(4, {})


# ---- records ----


def curve(kind, seed, accuracies, losses=(1.0, 0.5), policy=Policy.BATCH):
    return Curve(policy, kind, seed, tuple(accuracies), tuple(losses), (2,) * len(losses))


def evaluation(epoch, accuracy):
    return {"event": "evaluation", "epoch": epoch, "metrics": {"accuracy": accuracy, "loss": 1.0}}


def test_a_curve_is_of_all_steps_and_epochs_of_a_job():
    job = Job(Policy.RATE, Kind.TWO, 3, epochs=2)
    steps = tuple(Step(number, 2, 1 / number, 0.002) for number in (1, 2, 3))
    journal = (evaluation(0, 0.5), {"event": "pause"}, evaluation(1, 0.75))
    assert Curve.of(Result(job, steps, journal)).accuracies == (0.5, 0.75)
    with pytest.raises(ValueError, match=r"rate-2-3: recorded the steps \[1, 3\]"):
        Curve.of(Result(job, (steps[0], steps[2]), journal))
    with pytest.raises(ValueError, match="evaluated after the epochs"):
        Curve.of(Result(job, steps, journal[:1]))


def test_the_largest_difference_is_between_jobs_of_one_seed():
    curves = [curve(Kind.TWO, 0, [0.5, 1.0]), curve(Kind.FOUR, 0, [0.25, 1.0], [1.0, 0.25])]
    others = [curve(Kind.TWO, 1, [0, 0], [9.0, 9.0])]
    assert difference([*curves, *others]) == {"loss": 0.25, "accuracy": 0.25, "first_step": 2}
    assert difference([curves[0], curves[0]]) == {"loss": 0, "accuracy": 0, "first_step": None}
    assert difference([curves[0], *others]) is None


def test_the_verdict_compares_the_last_accuracies():
    fixed = [curve(Kind.TWO, 0, [0.90]), curve(Kind.TWO, 1, [0.94]), curve(Kind.FOUR, 0, [0.96])]
    found = verdict([*fixed, curve(Kind.ELASTIC, 0, [0.98])])
    assert found == pytest.approx({"gap": 0.02, "spread_of_fixed": 0.06})
    assert verdict(fixed) is None


def test_mean_and_spread_are_over_the_seeds():
    over = band([curve(Kind.TWO, 0, [0.2, 0.9]), curve(Kind.TWO, 1, [0.4, 0.7])])
    assert over.mean == pytest.approx((0.3, 0.8))
    assert (over.low, over.high) == ((0.2, 0.7), (0.4, 0.9))


# ---- an interruption ----


JOBS = make_jobs(DIGITS, [Policy.BATCH], [0, 1], 5, 2)


class FakeCourse:
    """Three jobs succeed at once, then the user interrupts; one beside that ends when it is given up."""

    def __init__(self, lab, recipe, shared, given_up):
        self._given_up = given_up
        self._run = 0

    def run(self, job):
        self._run += 1
        if self._run == 4:
            raise KeyboardInterrupt
        if self._run > 4:
            assert self._given_up.wait(60)
            raise Failed("given up")
        steps = tuple(Step(number, 2, 1.0, 0.001) for number in range(1, 4))
        accuracies = [{"event": "evaluation", "epoch": epoch, "metrics": {"accuracy": 0.5}} for epoch in range(5)]
        return Result(job, steps, tuple(accuracies))


def test_what_is_done_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment3, "Course", FakeCourse)
    experiment = experiment3.Experiment(JOBS, DIGITS, Artefacts(tmp_path, {"seed": 0}))
    with pytest.raises(KeyboardInterrupt):
        experiment.run(None, tmp_path, at_once=2)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["jobs_done"], summary["jobs_planned"]) == (3, 6)
    assert len((tmp_path / "accuracy.csv").read_text().splitlines()) == 1 + 3 * 5
    assert len((tmp_path / "losses.csv").read_text().splitlines()) == 1 + 3 * 3
    assert {path.stem for path in tmp_path.glob("*.jsonl")} == {job.name for job in JOBS[:3]}
    assert (tmp_path / "experiment3.png").stat().st_size > 10_000
    assert not list(tmp_path.glob(".*"))
