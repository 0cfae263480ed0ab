"""Whole jobs under simulated time: whatever befalls them, the promises of docs/reliability.md hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.__main__ import main
from tests.simulation.lineage import Model
from tests.simulation.plan import Kind, Plan, make_plan
from tests.simulation.planted import PLANTED
from tests.simulation.run import Failure, run, run_seed, shrink
from tests.simulation.trace import Trace

BLOCK = 125
QUICK = 40


def many(*seeds: range) -> list[Any]:
    return [pytest.param(each, marks=pytest.mark.slow) for each in seeds]


@pytest.mark.parametrize(
    "seeds", [range(2 * BLOCK), *many(*(range(first, first + BLOCK) for first in range(2 * BLOCK, 8 * BLOCK, BLOCK)))]
)
def test_promises_hold_whatever_befalls_a_job(seeds: range) -> None:
    failures = [failure for seed in seeds if (failure := run_seed(seed))]
    assert not failures, "\n".join(str(shrink(failure)) for failure in failures[:3])


@pytest.mark.parametrize("seeds", [range(QUICK), *many(range(QUICK, BLOCK))])
def test_promises_hold_if_a_job_chooses_its_number_of_workers(seeds: range) -> None:
    failures = [failure for seed in seeds if (failure := run_seed(seed, policy=True))]
    assert not failures, "\n".join(str(shrink(failure)) for failure in failures[:3])


@pytest.mark.parametrize("seeds", [range(QUICK), *many(range(QUICK, 2 * BLOCK))])
def test_workers_that_are_unlike_the_others_are_found(seeds: range) -> None:
    failures = [failure for seed in seeds if (failure := run_seed(seed, unlike=True))]
    assert not failures, "\n".join(str(shrink(failure)) for failure in failures[:3])


@pytest.mark.parametrize("seeds", [range(QUICK), *many(range(QUICK, 2 * BLOCK))])
def test_launches_are_bounded_where_one_worker_after_another_is_taken_away(seeds: range) -> None:
    failures = [failure for seed in seeds if (failure := run_seed(seed, hostile=True))]
    assert not failures, "\n".join(str(shrink(failure)) for failure in failures[:3])


def test_a_history_is_its_seed() -> None:
    courses = []
    for _ in range(2):
        trace = Trace(steps=True)
        run(make_plan(4), trace)
        courses.append(trace.lines)
    assert courses[0] == courses[1]
    assert len(courses[0]) > 100


def test_a_job_that_nothing_befalls_succeeds() -> None:
    trace = Trace()
    assert run(replace(make_plan(4), faults=()), trace) is None
    assert any("EndJob" in line and "succeeded" in line for line in trace.lines)


def test_a_failing_history_is_made_short() -> None:
    def rerun(plan: Plan) -> Failure | None:
        guilty = any(fault.kind is Kind.KILL for fault in plan.faults)
        return Failure(plan, "a rule", "what") if guilty else None

    plans = map(make_plan, range(100))
    plan = next(plan for plan in plans if sum(fault.kind is Kind.KILL for fault in plan.faults) > 1)
    assert [fault.kind for fault in shrink(Failure(plan, "a rule", "what"), rerun).plan.faults] == [Kind.KILL]


def test_the_command_says_how_many_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "4", "--first", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("4 histories in ")


def test_the_command_shows_a_failing_history(capsys: pytest.CaptureFixture[str]) -> None:
    fault = next(fault for fault in PLANTED if fault.name == "a torn step is not undone")
    with fault.plant():
        seed = next(seed for seed in range(100) if run_seed(seed))
        assert main(["--seed", str(seed), "--trace", "--shrink"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any("FAULT" in line for line in lines)
    assert any("broken: weights, buffers and the user's values are of one moment" in line for line in lines)


def test_models_are_one_if_they_were_trained_alike() -> None:
    origin = Model()
    first, second = origin.after(0, 0b0011, 1), origin.after(0, 0b0110, 1)
    assert first is origin.after(0, 0b0011, 1)
    assert first is not second
    assert first is not origin.after(0, 0b0011, 2)
    later = first.after(0, 0b1100, 1)
    assert later.comes_from(first)
    assert not later.comes_from(second)
    assert later.seen == 0b1111
    assert later.after(1, 0b0001, 1).seen == 0b0001
