"""Numbers from GPUs over time. Pure: times are seconds since the experiment began, a series is a list of changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Change:
    """From ``time`` on ``owner`` has so many GPUs; before its first change none."""

    time: float
    owner: str
    gpus: int


@dataclass(frozen=True, slots=True)
class Span:
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Work:
    """A job as a schedule without any overhead sees it: so many GPU-seconds, on at most so many GPUs at once."""

    submitted: float
    gpu_seconds: float
    most_gpus: int


def spans(changes: Sequence[Change], end: float) -> Iterator[tuple[Span, Mapping[str, int]]]:
    """What each owner has, between any two changes, from 0 to ``end``."""
    held: dict[str, int] = {}
    ordered = sorted((change for change in changes if change.time < end), key=lambda change: change.time)
    times = [0.0, *(max(change.time, 0.0) for change in ordered), end]
    for (start, stop), change in zip(pairwise(times), [None, *ordered], strict=True):
        if change is not None:
            held[change.owner] = change.gpus
        if stop > start:
            yield Span(start, stop), dict(held)


def gpu_seconds(changes: Sequence[Change], end: float, owner: str | None = None) -> float:
    """The integral over time, of one owner or of all."""
    return sum(
        span.seconds * (sum(held.values()) if owner is None else held.get(owner, 0))
        for span, held in spans(changes, end)
    )


def mean_gpus(changes: Sequence[Change], end: float) -> float:
    return gpu_seconds(changes, end) / end if end > 0 else 0.0


def first_use(changes: Iterable[Change], owner: str) -> float | None:
    return min((change.time for change in changes if change.owner == owner and change.gpus), default=None)


def work_conserving(jobs: Sequence[Work], gpus: int) -> list[float]:
    """When each job ends if no GPU that a job could use is ever free and nothing takes time but the work itself.

    Who comes first is served first, and keeps what it has: as in a cluster whose jobs have equal priority. Taking GPUs
    from an earlier job for a later one could end all of them sooner still.
    """
    left = [job.gpu_seconds for job in jobs]
    ends = [job.submitted if job.gpu_seconds <= 0 else 0.0 for job in jobs]
    order = sorted(range(len(jobs)), key=lambda index: jobs[index].submitted)
    now = 0.0
    while any(work > 0 for work in left):
        free, shares = gpus, dict[int, int]()
        for index in order:
            if left[index] > 0 and jobs[index].submitted <= now:
                shares[index] = min(jobs[index].most_gpus, free)
                free -= shares[index]
        done = {index: now + left[index] / share for index, share in shares.items() if share}
        later = [job.submitted for job in jobs if job.submitted > now]
        then = min([*done.values(), *later])
        for index, share in shares.items():
            left[index] = 0.0 if done.get(index) == then else left[index] - share * (then - now)
            if left[index] <= 0:
                ends[index] = then
        now = then
    return ends
