"""`python -m tests.simulation`: run many histories, or look at one."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from tests.simulation.plan import Plan
from tests.simulation.planted import PLANTED, find
from tests.simulation.run import KINDS, Failure, plan_of, run, run_seed, shrink
from tests.simulation.trace import Trace

SHOWN = 5


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many histories")
    parser.add_argument("--first", type=int, default=0, metavar="S", help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="processes")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--trace", action="store_true", help="with --seed: what happened")
    parser.add_argument("--steps", action="store_true", help="with --trace: each step, too")
    parser.add_argument("--planted", action="store_true", help="how many histories it takes to find each planted fault")
    parser.add_argument("--shrink", action="store_true", help="with --seed: as few faults as make it fail")
    for kind, about in KINDS.items():
        parser.add_argument(f"--{kind}", action="store_true", help=about)
    options = parser.parse_args(argv)
    kinds = [kind for kind in KINDS if getattr(options, kind)]
    if options.planted:
        return show_planted(options.first, options.seeds)
    if options.seed is not None:
        return show(plan_of(options.seed, kinds), shrinks=options.shrink, traces=options.trace, steps=options.steps)
    seeds = range(options.first, options.first + options.seeds)
    return run_many(seeds, options.jobs, partial(run_seed, kinds=kinds))


def show(plan: Plan, *, shrinks: bool, traces: bool, steps: bool) -> int:
    failure = run(plan)
    if failure is not None and shrinks:
        failure = shrink(failure)
        plan = failure.plan
    if traces:
        trace = Trace(steps=steps)
        run(plan, trace)
        print("\n".join(trace.lines))
    print(failure or f"{plan}\n  all promises hold")
    return 0 if failure is None else 1


def show_planted(first: int, most: int) -> int:
    """A table for docs/reliability_tests.md."""
    missed = 0
    for fault in PLANTED:
        found = find(fault, range(first, first + most))
        missed += found is None
        told = f"{found[0]} | {found[1].rule}" if found else "not found |"
        print(f"| {fault.name} | {told} |", flush=True)
    return 1 if missed else 0


def run_many(seeds: Sequence[int], jobs: int, run_one: Callable[[int], Failure | None]) -> int:
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        failures = _show_failures(pool.imap(run_one, seeds, chunksize=10))
    seconds = time.monotonic() - began
    print(f"{len(seeds)} histories in {seconds:.0f} s ({len(seeds) / seconds:.0f} per second), {failures} failed")
    return 1 if failures else 0


def _show_failures(results: Iterable[Failure | None]) -> int:
    count = 0
    for failure in results:
        if failure is not None:
            count += 1
            if count <= SHOWN:
                trace = Trace()
                shortest = shrink(failure)
                run(shortest.plan, trace)
                print("\n".join(trace.lines))
            print(failure, flush=True)
    return count


if __name__ == "__main__":
    sys.exit(main())
