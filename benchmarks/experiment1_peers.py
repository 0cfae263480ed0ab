"""Elasticdl and its peers under the same disturbance, with the work of experiment 1.

    benchmarks/peers/setup.sh            # once, for torchft
    python -m benchmarks.experiment1_peers [--systems elasticdl,torchrun,horovodrun,torchft] [--cycles 3] [--period 20]
    python -m benchmarks.experiment1_peers --model 1m --workers 3 --seconds_per_sample 0      # as fast as the machine can

Each system by itself, one after another, trains ResNet20 on images of CIFAR-10's shape at the pace of a simulated GPU, 9
samples per worker and step, or another model. In each cycle a worker leaves (SIGTERM, or the notice that the system takes instead), one
joins, one is killed (SIGKILL, with whatever stands for its machine), one joins: an event each period, at moments drawn from
the seed, which are the same for all.
An event waits until the system is over the one before, that is, until all workers have made three steps together. The
worker that goes is the newest: torchrun's oldest serves its store.

*Useful* samples are those of each step once, as it was made last: what is made twice counts once. The *share* is the rate under the
disturbance, of what the workers that were there would have made undisturbed, at the system's own rate before the first event. A
worker is there from when it is brought until it is taken, so that the time in which a newcomer starts counts against every system.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, pairwise
from typing import Any

from benchmarks.experiments.options import not_negative, positive
from benchmarks.experiments.zoo.pace import VARIABLE
from benchmarks.harness import Parser, Results, add_out, busy_cores, names, show_table, summarise
from benchmarks.models import RESNET20, TORCH_MODELS, worker_batch
from benchmarks.peers.run import PeerChange, PeerRun
from benchmarks.peers.systems import SYSTEMS
from benchmarks.processes import Failed, scratch
from benchmarks.steps import Step

JITTER = 0.1  # of the period: longer than a step, so that an event comes at any moment of one
LEAVE, JOIN, KILL = "leave", "join", "kill"
SIGNALS = {LEAVE: signal.SIGTERM, KILL: signal.SIGKILL}
CYCLE = (LEAVE, JOIN, KILL, JOIN)
SECONDS_PER_SAMPLE = 0.1
RECOVERED_STEPS = 3
BUSY_SECONDS = 2.0
PAUSES, COUNTS = ("leave, s", "join, s", "kill, s"), ("redone", "lost", "restarted", "late")
COLUMNS = ("system", *PAUSES, *COUNTS, "before", "during", "share", "failed")
NOTE = (
    "pause of the survivors: median (worst); late: events that had to wait for the system; samples/s before the first event, and "
    "during the disturbance; share: of what the workers that were there would have made undisturbed. {batch} samples per worker "
    "and step in all systems"
)


@dataclass(frozen=True, slots=True)
class Planned:
    """``after``: seconds since the event before, or since the undisturbed time; later if the system is not yet over that."""

    event: str
    after: float


@dataclass(frozen=True, slots=True)
class Happened:
    """One event; ``waited``: for how long it had to wait for the system, beyond its time."""

    at: float
    waited: float
    change: PeerChange


@dataclass(slots=True)
class Course:
    """One system's run. ``undisturbed``: samples a second of all workers; the disturbed time is from ``begin`` to ``end``."""

    workers: int
    batch: int
    undisturbed: float = 0.0
    begin: float = 0.0
    end: float = 0.0
    happened: list[Happened] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    failures: int = 0


def schedule(cycles: int, period: float, seed: int) -> list[Planned]:
    """The same for each system."""
    rng = random.Random(seed)
    moments = [number * period + rng.random() * JITTER * period for number in range(1, cycles * len(CYCLE) + 1)]
    return [
        Planned(event, after - before)
        for event, (before, after) in zip(CYCLE * cycles, pairwise([0.0, *moments]), strict=True)
    ]


def rate(steps: Sequence[Step], batch: int) -> float:
    """Samples per second of all workers, from the steps of one of them.

    Raises:
        ValueError: two steps are needed.
    """
    if len(steps) < 2:
        raise ValueError("a rate needs two steps")
    return batch * sum(step.size for step in steps[1:]) / (steps[-1].time - steps[0].time)


def useful_steps(steps: Sequence[Step], until: float) -> int:
    """Worker-steps that count at this moment: each number once, as it was made last."""
    made = sorted((step for step in steps if step.time <= until), key=lambda step: step.time)
    return sum({step.number: step.size for step in made}.values())


def mean_workers(course: Course) -> float:
    """That were there, over the disturbed time."""
    return sum(size * (end - begin) for begin, end, size in _sizes(course)) / (course.end - course.begin)


def _sizes(course: Course) -> Iterator[tuple[float, float, int]]:
    since, size = course.begin, course.workers
    for each in course.happened:
        yield since, each.at, size
        since, size = each.at, each.change.after
    yield since, course.end, size


def summary(course: Course) -> dict[str, Any]:
    """The numbers of one system. Pauses are in seconds, over all survivors."""
    changes = [each.change for each in course.happened]
    pauses = {event: [change for change in changes if change.event == event] for event in (LEAVE, JOIN, KILL)}
    useful = useful_steps(course.steps, course.end) - useful_steps(course.steps, course.begin)
    disturbed = course.batch * useful / (course.end - course.begin)
    there = mean_workers(course)
    return {
        "events": len(changes),
        "pauses": {
            event: summarise(chain.from_iterable(change.gap.pauses for change in some))
            for event, some in pauses.items()
            if some
        },
        "redone": sum(change.gap.redone for change in changes),
        "lost": sum(change.gap.lost for change in changes),
        "restarted": sum(change.restarted for change in changes),
        "late": sum(each.waited > 0 for each in course.happened),
        "undisturbed": course.undisturbed,
        "disturbed": disturbed,
        "seconds": course.end - course.begin,
        "mean_workers": there,
        "share": disturbed / (course.undisturbed * there / course.workers),
        "failures": course.failures,
    }


def main() -> int:
    parser = Parser("experiment1_peers", __doc__)
    parser.add_argument("--systems", type=names, default=list(SYSTEMS), help=f"in this order ({','.join(SYSTEMS)})")
    parser.add_argument("--cycles", type=int, default=3, help="of four events each (3)")
    parser.add_argument("--workers", type=int, default=4, help="before the first event (4)")
    parser.add_argument("--period", type=positive, default=20.0, help="seconds from one event to the next (20)")
    parser.add_argument("--model", choices=TORCH_MODELS, default=RESNET20, help=f"that all train ({RESNET20})")
    pace = f"of a simulated GPU; 0: none ({SECONDS_PER_SAMPLE:g})"
    parser.add_argument("--seconds_per_sample", type=not_negative, default=SECONDS_PER_SAMPLE, help=pace)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the events (0)")
    add_out(parser)
    args = parser.parse_args()
    parser.require_known(args, systems=SYSTEMS)
    if args.cycles < 1 or args.workers < 2:
        parser.error(f"--cycles {args.cycles} --workers {args.workers}: at least 1, and 2, as one is taken away")
    results, rows = Results("experiment1_peers", args.out), []
    for name in args.systems:
        if numbers := measure(name, args, results):
            rows.append(row(name, numbers))
    show_table(f"The same disturbance, {args.workers} workers", COLUMNS, rows)
    print(NOTE.format(batch=worker_batch(args.model)))
    print(f"results: {results.path}")
    return 0


def measure(name: str, args: argparse.Namespace, results: Results) -> dict[str, Any] | None:
    """One system's numbers; None if there are none, as it never came to be disturbed."""
    peer, busy = SYSTEMS[name](), busy_cores(BUSY_SECONDS)
    if reason := peer.missing():
        print(f"{name}: left out: {reason}", flush=True)
        results.add("missing", system=name, reason=reason)
        return None
    print(f"{name} {peer.versions()}; busy before: {busy} cores", flush=True)
    course = Course(args.workers, worker_batch(args.model))
    kept = results.path.parent / f"failed-{name}-{time.time():.0f}"
    try:
        with scratch(kept, {VARIABLE: f"{args.seconds_per_sample:g}"}) as processes:
            follow(name, PeerRun(peer, processes), course, args, results)
    except Failed as failure:
        course.failures = 1
        results.add("failure", system=name, reason=str(failure))
        print(f"{name}: FAILED: {failure}", flush=True)
    if not course.begin:
        return None
    numbers, facts = summary(course), {"versions": peer.versions(), "busy_cores_before": busy}
    setting = {each: getattr(args, each) for each in ("model", "workers", "period", "seconds_per_sample")}
    results.add("summary", system=name, **facts, **setting, plan=plan_of(args), **numbers)
    return numbers


def plan_of(args: argparse.Namespace) -> list[Planned]:
    return schedule(args.cycles, args.period, args.seed)


def follow(name: str, run: PeerRun, course: Course, args: argparse.Namespace, results: Results) -> None:
    """Measure it undisturbed, then disturb it.

    Where a system does not come through an event its run ends, and its logs are kept; the time that it was waited for counts.
    """
    try:
        run.start(args.model, args.workers)
        run.settle(RECOVERED_STEPS)
        since = time.monotonic()
        made = run.settle(RECOVERED_STEPS, args.period)
        course.undisturbed = rate([step for step in made if step.time > since], course.batch)
        course.begin = before = time.monotonic()
        for planned in plan_of(args):
            course.happened.append(disturb(run, planned, before))
            before = course.happened[-1].at
            tell(name, planned, course.happened[-1], results)
        time.sleep(max(0.0, before + args.period - time.monotonic()))
        run.logs.read()
    finally:
        course.end = time.monotonic()
        course.steps += chain.from_iterable(run.logs.steps.values())


def disturb(run: PeerRun, planned: Planned, before: float) -> Happened:
    """When it is time, and the system is over the event ``before``."""
    run.settle(RECOVERED_STEPS)
    due = before + planned.after
    waited = max(0.0, time.monotonic() - due)
    time.sleep(max(0.0, due - time.monotonic()))
    now, number = time.monotonic(), SIGNALS.get(planned.event)
    return Happened(now, waited, run.lose(planned.event, number) if number else run.gain(planned.event))


def tell(name: str, planned: Planned, happened: Happened, results: Results) -> None:
    results.add("event", system=name, **asdict(happened))
    pauses = ", ".join(f"{pause:.2f}" for pause in happened.change.gap.pauses)
    print(f"{name} {planned.event}: pauses {pauses} s; had waited {happened.waited:.1f} s", flush=True)


def row(name: str, numbers: dict[str, Any]) -> list[str]:
    found = numbers["pauses"]
    pauses = [
        f"{found[event].median:.2f} ({found[event].maximum:.2f})" if event in found else "-"
        for event in (LEAVE, JOIN, KILL)
    ]
    counts = [str(numbers[count]) for count in ("redone", "lost", "restarted")]
    late = f"{numbers['late']} of {numbers['events']}"
    rates = [f"{numbers[each]:.1f}" for each in ("undisturbed", "disturbed")]
    return [name, *pauses, *counts, late, *rates, f"{100 * numbers['share']:.0f} %", str(numbers["failures"])]


if __name__ == "__main__":
    sys.exit(main())
