"""What each worker was, when, and why."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import replace

from elasticdl.job.fields import Fields
from elasticdl.job.history import Lane, Span, WorkerPhase
from elasticdl.job.timeline import Crew

MOST_LANES = 2000
MOST_SPANS = 64


class Lanes:
    """When too many workers are gone, the first of them are forgotten; `forgotten` counts them."""

    def __init__(self) -> None:
        self._there: dict[int, Lane] = {}
        self._gone: OrderedDict[int, Lane] = OrderedDict()
        self._phases: Counter[WorkerPhase] = Counter()
        self._training: set[int] = set()  # whose phase is training
        self.forgotten = 0
        self.next_worker = 0  # no worker of this number or above has been there

    @property
    def crew(self) -> Crew:
        phases = self._phases
        training, starting = phases[WorkerPhase.TRAINING], phases[WorkerPhase.STARTING]
        return Crew(training, starting, phases[WorkerPhase.WARM], phases[WorkerPhase.LEAVING])

    def take(self, told: Fields, now: float) -> None:
        """What an entry says of one worker."""
        worker = told.worker
        if worker is None:
            return
        self.next_worker = max(self.next_worker, worker + 1)
        match told.event:
            case "worker_launched" | "worker_pending":
                self.become(worker, WorkerPhase.PENDING, now, told.reason)
            case "worker_started":
                self._started(worker, told.host, now)
            case "worker_ready":
                self.become(worker, WorkerPhase.WARM, now)
                self._found(worker, "")  # whatever held it up has passed
            case "worker_draining":
                self.become(worker, WorkerPhase.LEAVING, now, told.reason)
            case "worker_slow":
                self._found(worker, f"slow {told.phase}".strip())
            case "worker_stuck":
                self._found(worker, f"stuck {told.standing}".strip())
            case "worker_recovered":
                self._found(worker, "")
            case "worker_left":
                self.left(worker, now, told.cause, told.reason, told.code)

    def become(self, worker: int, phase: WorkerPhase, now: float, reason: str = "") -> None:
        """Begin another span of a worker's lane; nothing changes once the worker is gone."""
        if worker in self._gone:
            return
        lane = self._there.get(worker) or Lane(worker, "", ())
        if lane.spans and lane.spans[-1].phase is phase:
            return
        if lane.spans:
            self._phases[lane.spans[-1].phase] -= 1
        self._phases[phase] += 1
        (self._training.add if phase is WorkerPhase.TRAINING else self._training.discard)(worker)
        spans = _ended(lane.spans, now)
        if len(spans) >= MOST_SPANS:  # two of the oldest become one
            spans = (replace(spans[1], since=spans[0].since), *spans[2:])
        self._there[worker] = replace(lane, spans=(*spans, Span(phase, now, None, reason)))

    def _started(self, worker: int, host: str, now: float) -> None:
        self.become(worker, WorkerPhase.STARTING, now)
        if worker in self._there:
            self._there[worker] = replace(self._there[worker], host=host)

    def left(self, worker: int, now: float, cause: str, reason: str, code: int | None) -> None:
        if worker in self._gone:
            return
        self._training.discard(worker)
        lane = self._there.pop(worker, None) or Lane(worker, "", ())
        if lane.spans:
            self._phases[lane.spans[-1].phase] -= 1
        self._gone[worker] = replace(lane, spans=_ended(lane.spans, now), cause=cause, reason=reason, code=code)
        if len(self._gone) > MOST_LANES:
            self._gone.popitem(last=False)
            self.forgotten += 1

    def _found(self, worker: int, trouble: str) -> None:
        """Note that a worker is slow or stuck; empty: no longer."""
        if worker in self._there:
            self._there[worker] = replace(self._there[worker], trouble=trouble)

    def nothing_found(self) -> None:
        """Forget which workers are slow or stuck."""
        self._there = {worker: replace(lane, trouble="") for worker, lane in self._there.items()}

    def form(self, members: Collection[int], before: Collection[int], now: float) -> None:
        """The members of a new world train. Who was in the world ``before``, is not in this one and does not leave, waits."""
        inside = set(members)
        for worker in inside - self._training:
            self.become(worker, WorkerPhase.TRAINING, now)
        for worker in self._training.intersection(before) - inside:
            self.become(worker, WorkerPhase.WARM, now, "was cut off as its world broke")

    def rest(self, since: float, reason: str) -> None:
        """Whoever trained has stopped training at ``since``, and leaves."""
        for worker in tuple(self._training):
            spans = self._there[worker].spans
            self.become(worker, WorkerPhase.LEAVING, max(since, spans[-1].since), reason)

    def end(self, now: float) -> None:
        """The job is over, and nobody is there any more."""
        for worker in tuple(self._there):
            self.left(worker, now, "", "the job is over", None)

    def result(self) -> tuple[Lane, ...]:
        lanes = {**self._gone, **self._there}
        return tuple(lanes[worker] for worker in sorted(lanes))


def _ended(spans: tuple[Span, ...], now: float) -> tuple[Span, ...]:
    return (*spans[:-1], replace(spans[-1], until=now)) if spans else ()
