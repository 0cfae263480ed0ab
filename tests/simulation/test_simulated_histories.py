"""Whole jobs under simulated time: whatever befalls them, the promises of docs/reliability.md hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.__main__ import main
from tests.simulation.plan import make_plan
from tests.simulation.planted import PLANTED
from tests.simulation.run import run, run_seed, shrink
from tests.simulation.trace import Trace

BLOCK = 125
QUICK = 40


def histories(kind: str, quick: int, *slow: range) -> list[Any]:
    first = pytest.param(range(quick), kind, id=kind)
    return [first, *(pytest.param(each, kind, marks=pytest.mark.slow, id=f"{kind}-{each.start}") for each in slow)]


@pytest.mark.parametrize(
    ("seeds", "kind"),
    [
        *histories("all", 2 * BLOCK, *(range(first, first + BLOCK) for first in range(2 * BLOCK, 8 * BLOCK, BLOCK))),
        *histories("policy", QUICK, range(QUICK, BLOCK)),
        *histories("in_parts", QUICK, range(QUICK, 2 * BLOCK)),
        *histories("unlike", QUICK, range(QUICK, 2 * BLOCK)),
        *histories("hostile", QUICK, range(QUICK, 2 * BLOCK)),
        *histories("several", QUICK, range(QUICK, BLOCK), range(BLOCK, 2 * BLOCK), range(500, 500 + BLOCK)),
    ],
)
def test_promises_hold_whatever_befalls_a_job(seeds: range, kind: str) -> None:
    failures = [failure for seed in seeds if (failure := run_seed(seed, [kind]))]
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


def test_the_command_says_how_many_hold_and_shows_a_failing_history(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "4", "--first", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("4 histories in ")
    fault = next(fault for fault in PLANTED if fault.name == "a torn step is not undone")
    with fault.plant():
        seed = next(seed for seed in range(100) if run_seed(seed))
        assert main(["--seed", str(seed), "--trace", "--shrink"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any("FAULT" in line for line in lines)
    assert any("broken: weights, buffers and the user's values are of one moment" in line for line in lines)
