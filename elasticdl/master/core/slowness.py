"""Who is slow, judged from how each worker spends its steps.

Each step lasts as long for one member as for all, so the slowest is the one that waits least. A member is slow if for some
time it has needed much longer for its own work than the median member, in all and for each sample, while the others waited.
The limit is that of NVIDIA's resiliency extension: a score of 0.7 against the median.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from statistics import fmean, median_high, median_low

from elasticdl.common.backoff import Backoff
from elasticdl.job.messages import Pace, StepTimes
from elasticdl.master.core.events import Instruction, Record
from elasticdl.master.core.rule import RuledJob
from elasticdl.master.core.worker_record import MOST_FACTOR, Verdict, WorkerRecord

SCORE = 0.7  # of the median worker's time over its own; less is slow
SCORE_RECOVERED = 0.85
LEAST_STEPS = 8  # over which the medians must have been taken
# A verdict counts once it has stood for so many steps and seconds.
STEPS_TO_JUDGE = 20
SECONDS_TO_JUDGE = 10.0
LEAST_LOSS = 0.001  # seconds a step; smaller losses are ignored
SECONDS_BETWEEN_REPLACEMENTS = 300.0  # twice as many after one that has not helped, and so on
MOST_SECONDS_BETWEEN = 3600.0
PHASES = ("data", "compute", "update")


class SlowRule:
    def __init__(self, *, replace: bool) -> None:
        """``replace``: who is slow is to be replaced."""
        self._replace = replace
        # Who seems to have become slow, or to have recovered, which is not said yet: since when, and from which step on.
        self._opinions: dict[int, tuple[float, int]] = {}
        self._replaced_at: float | None = None
        self._backoff = Backoff(first=SECONDS_BETWEEN_REPLACEMENTS, longest=MOST_SECONDS_BETWEEN)

    def look(self, job: RuledJob, now: float) -> Iterator[Instruction]:
        world = job.rendezvous.world
        alone = world is not None and len(world.members) == 1
        records, slow = self.judge(job.rendezvous.active_members(), now, alone=alone)
        yield from records
        if not job.progress_limits.ending and (
            record := self.due(slow, now)
        ):  # at the end it may be writing the result
            yield from job.replace(record, f"slow: {record.slow}", now)

    def judge(
        self, members: Sequence[WorkerRecord], now: float, *, alone: bool = False
    ) -> tuple[list[Record], list[WorkerRecord]]:
        """With each tick: the members of the world. Returns entries for the journal, and who is slow at this moment.

        ``alone``: the world has one member.
        """
        timed = _timed(members)
        self._opinions = {worker_id: self._opinions[worker_id] for worker_id in timed if worker_id in self._opinions}
        if not len(timed) == len(members) > 1:  # a new world has to make its first steps; alone nobody is slow
            return [_recovered(record) for record in members if alone and record.slow], []
        out: list[Record] = []
        slow: list[WorkerRecord] = []
        crowd = _Crowd(timed.values())
        for record in members:
            verdict = crowd.judge(timed[record.worker_id], SCORE if record.slow is None else SCORE_RECOVERED)
            if not self._stands(record, (verdict is None) != (record.slow is None), now):
                record.slow = verdict if record.slow and verdict else record.slow
            elif verdict is None:
                out.append(_recovered(record))
            else:
                record.slow = verdict
                fields = {"phase": verdict.phase, "factor": verdict.factor, "seconds": verdict.seconds}
                out.append(Record("worker_slow", {"worker": record.worker_id, "host": record.place, **fields}))
            if record.slow and verdict:
                slow.append(record)
        return out, slow

    def suspects(self, members: Sequence[WorkerRecord]) -> bool:
        """Whether a member looks slow, and has not been watched for long enough to say so."""
        return any(record.worker_id in self._opinions and record.slow is None for record in members)

    def _stands(self, record: WorkerRecord, differs: bool, now: float) -> bool:
        """Whether what is thought of a worker has differed for long enough from what was said of it."""
        if not differs:
            self._opinions.pop(record.worker_id, None)
            return False
        since, step = self._opinions.setdefault(record.worker_id, (now, record.step))
        if now - since < SECONDS_TO_JUDGE or record.step - step < STEPS_TO_JUDGE:
            return False
        del self._opinions[record.worker_id]
        return True

    def due(self, slow: Sequence[WorkerRecord], now: float) -> WorkerRecord | None:
        """Whom of them to replace now."""
        since = now - self._replaced_at if self._replaced_at is not None else math.inf
        if not self._replace or not slow or since < self._backoff.bound():
            return None
        # It may be what rank 0 alone does, or the machine, that makes whoever comes slow.
        if since > 2 * self._backoff.bound():
            self._backoff.reset()
        self._backoff.delay()
        self._replaced_at = now
        return max(slow, key=lambda record: record.slow.seconds if record.slow else 0.0)


def _recovered(record: WorkerRecord) -> Record:
    record.slow = None
    return Record("worker_recovered", {"worker": record.worker_id})


def pace_of(members: Sequence[WorkerRecord]) -> Pace:
    """Of the world, as far as its members have told."""
    times = _timed(members).values()
    if not times:
        return Pace()
    waits = [each.wait for each in times]
    return Pace(fmean(each.busy for each in times), fmean(waits), min(waits))


class _Crowd:
    """All members of a world. Of two members the median is the faster one."""

    def __init__(self, times: Iterable[StepTimes]) -> None:
        self._times = list(times)
        self._busy = self._median(lambda t: t.busy)
        self._by_sample = self._median(_busy_by_sample)
        self._wait = median_high(t.wait for t in self._times)
        self._phases = {name: self._median(attrgetter(name)) for name in PHASES}

    def judge(self, own: StepTimes, score: float) -> Verdict | None:
        lost = own.busy - self._busy
        slower = self._busy < score * own.busy and self._by_sample < score * _busy_by_sample(own)
        if not slower or own.wait >= score * self._wait or lost < LEAST_LOSS:
            return None
        excess = {name: getattr(own, name) - usual for name, usual in self._phases.items()}
        phase = max(excess, key=excess.__getitem__)
        factor = own.busy / max(self._busy, 1e-9)  # of a phase that takes the others no time it would say nothing
        return Verdict(phase, round(min(factor, 10 * MOST_FACTOR), 2), round(lost, 6))

    def _median(self, of: Callable[[StepTimes], float]) -> float:
        return median_low(map(of, self._times))


def _busy_by_sample(times: StepTimes) -> float:
    """Where the samples are not known, seconds a step."""
    return times.busy / (times.samples or 1.0)


def _timed(members: Sequence[WorkerRecord]) -> dict[int, StepTimes]:
    """Those that have made some steps in this world."""
    found = ((r.worker_id, r.pulse.times if r.pulse else None) for r in members)
    return {worker_id: times for worker_id, times in found if times and times.steps >= LEAST_STEPS}
