"""Run histories by their seeds, and make those that fail short."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace

from tests.simulation.adapter import impatient
from tests.simulation.faults import plan_faults
from tests.simulation.lineage import Violation
from tests.simulation.plan import Plan, make_plan, of_a_pass, with_hostile_nodes, with_unlike_workers
from tests.simulation.site import Site
from tests.simulation.trace import Silent, Trace

RAISED = "neither core raises, and their invariants hold"
KINDS = {
    "policy": "the jobs choose their number of workers",
    "unlike": "workers differ from each other for a while",
    "hostile": "one worker after another is taken away for a while",
    "in_parts": "the jobs evaluate or predict",
    "several": "workers of several processes, which share a model",
}


@dataclass(frozen=True, slots=True)
class Failure:
    plan: Plan
    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.plan}\n  broken: {self.rule}\n  {self.what}"


def run(plan: Plan, trace: Trace | None = None) -> Failure | None:
    """None if all promises hold."""
    site = Site(plan, trace or Silent())
    plan_faults(site)
    try:
        with impatient(site.draw_policy, lambda: plan.policy and site.clock.now < plan.calm):
            site.run()
    except Violation as violation:
        return Failure(plan, violation.rule, violation.what)
    except Exception as error:  # noqa: BLE001  a core may raise anything
        return Failure(plan, RAISED, f"{type(error).__name__}: {error}")
    return None


def plan_of(seed: int, kinds: Container[str] = ()) -> Plan:
    """``kinds``: some of `KINDS`."""
    plan = replace(make_plan(seed), policy="policy" in kinds, processes=2 + seed % 2 if "several" in kinds else 1)
    plan = of_a_pass(plan) if "in_parts" in kinds else plan
    plan = with_unlike_workers(plan) if "unlike" in kinds else plan
    return with_hostile_nodes(plan) if "hostile" in kinds else plan


def run_seed(seed: int, kinds: Container[str] = ()) -> Failure | None:
    return run(plan_of(seed, kinds))


def shrink(failure: Failure, rerun: Callable[[Plan], Failure | None] = run) -> Failure:
    """The same broken promise with as few faults as will do."""
    changed = True
    while changed:
        changed = False
        for number in range(len(failure.plan.faults)):
            faults = failure.plan.faults[:number] + failure.plan.faults[number + 1 :]
            shorter = rerun(replace(failure.plan, faults=faults))
            if shorter is not None and shorter.rule == failure.rule:
                failure, changed = shorter, True
                break
    return failure
