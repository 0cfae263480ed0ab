"""The arithmetic that made the published figures: series made by hand, with the answers."""

from __future__ import annotations

import pytest
import torch

from benchmarks import experiment1, experiment1_peers
from benchmarks.experiment1_peers import JOIN, KILL, LEAVE, SIGNALS, Course, Happened, rate, summary, useful_steps
from benchmarks.experiments.convergence.curves import Curve, band, difference, verdict
from benchmarks.experiments.convergence.plan import Kind, Policy
from benchmarks.experiments.convergence.resnet20 import GRID, LIMIT, TERMS, AddedExactly
from benchmarks.experiments.measures import Change, Work, work_conserving
from benchmarks.experiments.pods import Fact
from benchmarks.experiments.serving.demand import PUBLISHED, Autoscaler, LoadPlan, Rule, parse_curve, scalings
from benchmarks.experiments.serving.outcome import TARGETS, Seen, lags_for_serving, lags_for_training, measured
from benchmarks.experiments.serving.service import Request
from benchmarks.experiments.training import JobRun
from benchmarks.experiments.zoo.step_log import LoggedStep
from benchmarks.harness import flat, judge
from benchmarks.peers.run import PeerChange
from benchmarks.steps import Gap, Step

# ---- the first: two jobs ----

PLAN = experiment1.Plan(gpus=6, workers=4, second_after=120, job_gpu_seconds=1800, scale=1)


def ideal(name, submitted, start, workers, ended):
    """A job whose steps take 36 GPU-seconds each; ``workers`` from a time on."""
    steps, now = [], start
    while now < ended - 1e-6:
        having = [count for since, count in workers.items() if since <= now][-1]
        now += 36 / having
        steps.append(LoggedStep(len(steps) + 1, now, having, 1.0))
    return JobRun(name, submitted, start, ended, tuple(steps))


def test_a_perfect_elastic_run_is_at_its_bound():
    # 120 s with 4, then 330 s in which the second has 2, then the second alone with 4.
    assert work_conserving([Work(0, 1800, 4), Work(120, 1800, 4)], 6) == pytest.approx([450, PLAN.bound()])
    first, second = ideal("first", 0, 0, {0: 4}, 450), ideal("second", 120, 120, {120: 2, 450: 4}, 735)
    series = [Change(0, "first", 4), Change(120, "second", 2), Change(450, "first", 0), Change(450, "second", 4)]
    elastic = experiment1.measured(PLAN, [*series, Change(735, "second", 0)], [first, second])
    found = {"makespan": 735, "distance": 0, "full_length_distance": 0, "gpu_seconds": 3600}
    found |= {"second_waited_for_gpus": 0, "second_first_step": 18}
    assert {name: elastic[name] for name in found} == pytest.approx(found)
    series = [Change(0, "first", 4), Change(450, "first", 0), Change(460, "second", 4), Change(910, "second", 0)]
    gang = experiment1.measured(PLAN, series, [first, ideal("second", 120, 460, {460: 4}, 910)])
    assert gang["second_waited_for_gpus"] == 340
    both = experiment1.compared(gang, elastic)
    assert (both["ratio"], both["gpu_seconds_overhead"]) == (pytest.approx(735 / 910), pytest.approx(0))
    assert [row[-1] for row in judge(both, experiment1.TARGETS)] == ["yes", "no", "yes", "yes", "yes"]


def test_what_does_not_grow_with_the_work_weighs_less_at_full_length():
    plan = experiment1.Plan(gpus=6, workers=4, second_after=12, job_gpu_seconds=180, scale=10)
    steps = tuple(LoggedStep(number, 5 + 0.9 * number, 4, 1.0) for number in range(1, 51))
    jobs = [JobRun("first", 0, 5, 50, steps), JobRun("second", 12, 15, 78.5, steps)]
    found = experiment1.measured(plan, [Change(0, "first", 4), Change(78.5, "first", 0)], jobs)
    assert found["distance"] == pytest.approx(5 / 73.5)
    assert found["full_length_distance"] == pytest.approx(0.5 / 73.5)


# ---- its peers ----


def happened(at, event, after, *pauses, waited=0.0, redone=0, restarted=0):
    before = after + (1 if event in SIGNALS else -1)
    gap = Gap(pauses, ordinary=1.0, redone=redone, lost=0, from_event=2.0)
    return Happened(at, waited, PeerChange(event, before, after, gap, restarted))


def steps(*made):
    """Of (time, number, size); one line each, as if one rank wrote all of it."""
    return [Step(time, number, str(size), size) for time, number, size in made]


def test_a_step_counts_once_as_it_was_made_last_whoever_wrote_it_down():
    assert rate(steps((10, 1, 4), (11, 2, 4), (13, 3, 2)), batch=9) == 9 * 6 / 3
    made = steps((1, 1, 4), (1.1, 1, 4), (2, 2, 4), (3, 3, 4), (5, 2, 3), (6, 3, 3), (7, 4, 3))
    assert [useful_steps(made[::-1], until) for until in (3, 5, 10)] == [12, 11, 4 + 3 + 3 + 3]


def test_the_numbers_of_a_system():
    events = [
        happened(2, LEAVE, 1, 0.5, waited=0.1, redone=2),
        happened(4, JOIN, 2, 0.25, restarted=1),
        happened(6, KILL, 1, 3.0),
        happened(8, JOIN, 2, 0.75),
    ]
    made = steps((0.5, 1, 2), (1.5, 2, 2), (3.5, 3, 1), (5, 4, 2), (7, 5, 1), (9.5, 6, 2), (10.5, 7, 2))
    numbers = summary(Course(2, 10, 20.0, 1, 10, events, made, 1))
    counts = {"events": 4, "late": 1, "redone": 2, "restarted": 1, "failures": 1}
    assert {name: numbers[name] for name in counts} == counts
    pauses = {event: (some.n, some.median, some.maximum) for event, some in numbers["pauses"].items()}
    assert pauses == {LEAVE: (1, 0.5, 0.5), JOIN: (2, 0.5, 0.75), KILL: (1, 3.0, 3.0)}
    assert numbers["disturbed"] == pytest.approx(10 * (2 + 1 + 2 + 1 + 2) / 9), "steps 2 to 6"
    assert numbers["mean_workers"] == pytest.approx((1 * 2 + 2 * 1 + 2 * 2 + 2 * 1 + 2 * 2) / 9)
    assert numbers["share"] == pytest.approx(80 / (20 / 2 * 14))
    shown = dict(zip(experiment1_peers.COLUMNS, experiment1_peers.row("it", numbers), strict=True))
    assert (shown["join, s"], shown["late"], shown["share"]) == ("0.50 (0.75)", "1 of 4", "57 %")


# ---- the second: training beside serving ----


def test_the_published_curve_has_the_published_replicas():
    plan = LoadPlan(parse_curve(PUBLISHED, 1.0, 5.0), every=5.0, window=10.0, seed=1)
    reached = scalings(plan, Autoscaler(Rule(per_replica=4.0, least=1, most=7, patience=3), 2))
    assert [each.replicas for each in reached] == [3, 6, 7, 6, 5, 3, 2]


def times(**given):
    return {Fact(name): at for name, at in given.items()}


def formed(at, *members):
    return {"time": at, "event": "world_formed", "members": list(members)}


def started(worker):
    return {"time": -20.0, "event": "worker_started", "worker": worker, "place": f"training-worker-{worker}"}


PODS = {
    "serving-1-a": times(created=-30, bound=-30, running=-29),
    "serving-1-b": times(created=10, bound=11.5, running=11.8, notice=20, ended=21, gone=21.1),
    "training-worker-0": times(created=-20, bound=-20, running=-19),
    "training-worker-1": times(created=-20, bound=-20, running=-19, notice=10.1, ended=11, gone=11.2),
    "training-worker-2": times(created=10.2, bound=21.5, running=21.75),
}
READY = {"time": 24.0, "event": "worker_ready", "worker": 2}
JOURNAL = [*map(started, range(3)), formed(-10.0, 0, 1), formed(11.0, 0), READY, formed(24.2, 0, 2)]
SERVING, TRAINING = ((0.0, 1), (11.5, 2), (21.0, 1)), ((0.0, 2), (11.0, 1), (21.5, 2))
HELD = [(*change, "serving") for change in SERVING] + [(*change, "training") for change in TRAINING]


def seen(**changed):
    """Three GPUs for 40 s: at 10 s a replica takes one of training's two, at 20 s it gives it back."""
    given = {
        "end": 40.0,
        "gpus": 3,
        "changes": [Change(at, owner, gpus) for at, gpus, owner in sorted(HELD)],
        "rotations": [Change(at, "rotation", gpus) for at, gpus in ((0.0, 1), (15.0, 2), (20.0, 1))],
        "requests": [Request(n / 10, 0.1 + n / 1000, "a", 0, 1, "") for n in range(101)],
        "pods": PODS,
        "journal": JOURNAL,
        "steps": [LoggedStep(n, at, 2, 1.0) for n, at in enumerate((-9, 5, 10.5, 12, 24.1, 24.6, 40), 1)],
        "serving": "serving",
        "training": "training",
    }
    return Seen(**{**given, **changed})


def test_how_long_a_gpu_takes_from_one_to_the_other():
    (lag,) = lags_for_serving(seen())
    assert (lag.pod, lag.parts) == ("serving-1-b", pytest.approx({"leave": 1.5, "start": 0.3}))
    (lag,) = lags_for_training(seen())
    assert (lag.at, lag.pod, lag.total) == (21, "training-worker-2", pytest.approx(24.6 - 21))
    assert lag.parts == pytest.approx({"scheduler": 0.5, "start": 0.25, "warm_up": 2.25, "join": 0.6})
    late = {"serving-1-c": times(created=15), "serving-1-d": times(created=30, bound=35, notice=33)}
    waits = measured(seen(pods={**PODS, **late}))["reclaim_for_serving"]["unfinished"]
    assert waits == [25, 3], "who waits when it ends counts as long as that"


def test_utilisation_counts_held_gpus_and_work_only_those_that_work():
    numbers = measured(seen())
    assert numbers["utilisation"] == pytest.approx((3 * 40 - 0.5 - 0.5) / 120)
    working = 3 * 11 + 2 * (15 - 11) + 3 * (20 - 15) + 2 * (24.2 - 20) + 3 * (40 - 24.2)
    assert numbers["mean_gpus_working"] == pytest.approx(working / 40)
    assert numbers["steps"] == {"made": 7, "lost": 0, "twice": 0}
    odd = [LoggedStep(n, at, 2, 1.0) for n, at in ((1, 1), (2, 2), (2, 3), (5, 4))]
    assert measured(seen(steps=odd))["steps"] == {"made": 3, "lost": 2, "twice": 1}


def test_the_targets_are_judged_by_the_worst_and_what_was_not_measured_is_not_met():
    def met(**changed):
        return [row[-1] for row in judge(flat(measured(seen(**changed))), TARGETS)]

    assert met() == ["yes"] * 6
    late = {**PODS, "serving-1-c": times(created=1, bound=6.1, running=6.2)}
    failed = [*seen().requests, Request(1.0, 30.0, "a", 2, None, "503 no")]
    more = [*seen().steps, LoggedStep(9, 41, 2, 1.0)]
    assert met(pods=late, requests=failed, steps=more) == ["yes", "no", "yes", "no", "no", "yes"]
    assert met(pods={name: each for name, each in PODS.items() if name != "serving-1-b"})[1:3] == ["no", "no"]


# ---- the third: convergence ----


def curve(kind, seed, accuracies, losses=(1.0, 0.5)):
    return Curve(Policy.BATCH, kind, seed, tuple(accuracies), tuple(losses), (2,) * len(losses))


def test_differences_are_between_jobs_of_one_seed_and_the_verdict_is_of_the_last_accuracies():
    curves = [curve(Kind.TWO, 0, [0.5, 1.0]), curve(Kind.FOUR, 0, [0.25, 1.0], [1.0, 0.25])]
    others = [curve(Kind.TWO, 1, [0, 0], [9.0, 9.0])]
    assert difference([*curves, *others]) == {"loss": 0.25, "accuracy": 0.25, "first_step": 2}
    assert difference([curves[0], curves[0]]) == {"loss": 0, "accuracy": 0, "first_step": None}
    assert difference([curves[0], *others]) is None
    fixed = [curve(Kind.TWO, 0, [0.90]), curve(Kind.TWO, 1, [0.94]), curve(Kind.FOUR, 0, [0.96])]
    found = verdict([*fixed, curve(Kind.ELASTIC, 0, [0.98])])
    assert (found, verdict(fixed)) == (pytest.approx({"gap": 0.02, "spread_of_fixed": 0.06}), None)
    over = band([curve(Kind.TWO, 0, [0.2, 0.9]), curve(Kind.TWO, 1, [0.4, 0.7])])
    assert (over.mean, over.low, over.high) == (pytest.approx((0.3, 0.8)), (0.2, 0.7), (0.4, 0.9))


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
    forward, halves = sum(parts), sum(parts[: TERMS // 2]) + sum(parts[TERMS // 2 :])
    assert (torch.equal(forward, sum(reversed(parts))) and torch.equal(forward, halves)) is exact
    torch.testing.assert_close(forward, sum(gradients(False)), rtol=0, atol=TERMS * GRID)
    largest = [torch.tensor(LIMIT - GRID), *[torch.tensor(LIMIT)] * (TERMS - 1)]
    assert sum(largest).item() == sum(reversed(largest)).item() == TERMS * LIMIT - GRID
