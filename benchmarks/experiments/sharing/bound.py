"""What mean completion time is possible at all: the jobs of experiment 4 in virtual time, where changes cost nothing.

    python -m benchmarks.experiments.sharing.bound [--seeds 16] [--gpus 8]

Every job's scaling is known from the start, a worker trains in the moment in which it is asked for, and all look at the queue
every half second. So this is what the rule of ``--share_queue`` is worth without what a cluster makes of it.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import sys
from collections.abc import Sequence

from benchmarks.experiments.sharing.workload import PlannedJob, draw_jobs
from elasticdl.master.rules.sharing import divide, gains_of
from elasticdl.master.state.claim import Claim
from elasticdl.master.state.speedup import Curve, Point

TICK_SECONDS = 0.5
SIZES = (4, 2)


def shared(jobs: Sequence[PlannedJob], gpus: int) -> float:
    """Mean completion time in seconds, if jobs share by the rule."""
    left = {job.name: job.work for job in jobs}
    held = dict.fromkeys(left, 0)
    gains = {job.name: _gains(job, gpus) for job in jobs}
    taken: dict[str, float] = {}
    now = 0.0
    while len(taken) < len(jobs):
        here = [job for job in jobs if job.arrival <= now and job.name not in taken]
        claims = [Claim(job.name, held[job.name], 0, 1, gpus, left[job.name], gains[job.name]) for job in here]
        held |= divide(claims, gpus)
        now += TICK_SECONDS
        for job in here:
            left[job.name] -= TICK_SECONDS * job.kind.speedup(held[job.name])
            if left[job.name] <= 0:
                taken[job.name] = now - job.arrival
    return statistics.fmean(taken.values())


def fixed(jobs: Sequence[PlannedJob], gpus: int, size: int) -> float:
    """The same, if each job has so many workers, and waits for them in the order in which jobs come."""
    ends: list[float] = []
    taken = []
    for job in jobs:
        begins = job.arrival
        if len(ends) >= gpus // size:
            begins = max(begins, heapq.heappop(ends))
        end = begins + job.work / job.kind.speedup(size)
        heapq.heappush(ends, end)
        taken.append(end - job.arrival)
    return statistics.fmean(taken)


def ratio(seed: int, gpus: int) -> float:
    """Of the mean completion time to that with the better fixed size."""
    jobs = draw_jobs(seed, 1.0)
    return shared(jobs, gpus) / min(fixed(jobs, gpus, size) for size in SIZES)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("bound", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--gpus", type=int, default=8)
    given = parser.parse_args(argv)
    if given.seeds < 1 or given.gpus < max(SIZES):
        parser.error(f"at least one seed, and {max(SIZES)} GPUs")
    found = [ratio(seed, given.gpus) for seed in range(given.seeds)]
    print(
        f"seed 0: {found[0]:.2f}; {given.seeds} seeds: mean {statistics.fmean(found):.2f}, {min(found):.2f} to {max(found):.2f}"
    )
    return 0


def _gains(job: PlannedJob, gpus: int) -> tuple[float, ...]:
    levels = [(n, job.kind.speedup(n)) for n in range(1, gpus + 1)]
    return gains_of(Curve(tuple(Point(n, level, level, level, 0.0, 0.0, 0.0) for n, level in levels)), gpus)


if __name__ == "__main__":
    sys.exit(main())
