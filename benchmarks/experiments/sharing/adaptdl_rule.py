"""AdaptDL's published rule, as far as it decides how many workers each job has.

Its scheduler looks for the allocation with the largest sum of speedups, where that of a job which would be restarted counts
nine tenths (Qiao et al., OSDI 2021; `adaptdl_sched/policy/pollux.py`). There it is searched for by a genetic algorithm; for
eight places it can be worked out. A job whose speedup is not known yet is taken to scale perfectly, up to twice as many
workers as it has had, as `adaptdl/goodput.py` and `adaptdl_sched/allocator.py` have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RESTART_FACTOR = 0.9


@dataclass(frozen=True, slots=True)
class Candidate:
    name: str
    workers: int  # at present
    most_had: int
    speedups: Mapping[int, float]  # by number of workers, as far as they are known

    def speedup(self, workers: int) -> float:
        if workers == 0:
            return 0.0
        if workers in self.speedups:
            return self.speedups[workers]
        return float(workers)


def allocate(candidates: Sequence[Candidate], places: int) -> dict[str, int]:
    """Workers of each job; those that come first have theirs if there are more jobs than places."""
    # Best sum of speedups, and the allocation, of the jobs so far, by the places that they take.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for each in candidates:
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for taken, (total, shares) in best.items():
            for workers in range(min(places - taken, max(1, 2 * each.most_had)) + 1):
                restarted = each.workers > 0 and workers != each.workers
                value = total + each.speedup(workers) * (RESTART_FACTOR if restarted else 1.0)
                if value > following.get(taken + workers, (-1.0, ()))[0]:
                    following[taken + workers] = value, (*shares, workers)
        best = following
    _, shares = max(best.values(), default=(0.0, ()))
    return {each.name: workers for each, workers in zip(candidates, shares, strict=True)}
