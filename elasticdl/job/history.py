"""The history of a job, and what it consists of. Times are seconds since the epoch, durations seconds."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from enum import StrEnum

from elasticdl.job.journal import Fields, Steps

# The state of a job as a whole, by its journal.


MOST_SLOW = 2000


@dataclass(slots=True, kw_only=True)
class JobFacts:
    """The state of the job as a whole, by what its journal has told so far."""

    job: str = ""
    phase: str = "pending"
    reason: str = ""
    over: bool = False
    wanted: str = ""  # number of workers asked for
    step: int = 0
    resumed: int = 0  # the step that it went on from
    loss: float | None = None  # of the last steps that were told, as the rate
    rate: float | None = None  # samples per second
    learning_rate: float | None = None
    steps_made: int = 0  # one that is made again counts again
    samples_made: int = 0
    collective: str = ""
    compared: tuple[int, int] = (0, 0)  # the step after which states were compared last, and how many workers were one
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    checkpoint: tuple[int, str] = (0, "")  # the last: its step and path
    no_checkpoint: tuple[int, str] = (0, "")  # the last that failed: its step, and why
    wants_checkpoint: bool = False  # it was stopped, and is to be kept
    advice: str = ""
    speedup: tuple[tuple[float, float, bool], ...] = ()  # workers, speedup, whether it was measured
    target: int = 0  # workers that the job wants by its own decision; 0: it decides nothing
    decision: str = ""  # why
    replaced: int = 0  # workers that took the place of one that left
    slow: dict[int, tuple[str, str, float]] = field(default_factory=dict)  # host, phase and factor, by worker

    def take(self, told: Fields) -> None:
        """To be called with every entry, except those on steps: some of these are told twice."""
        match told.event:
            case "job_started":
                self.job, self.wanted = told.job or self.job, told.workers
                # What an earlier job of the same training has told of its end.
                self.phase, self.reason, self.over, self.wants_checkpoint = "pending", "", False, False
            case "scale_requested":
                self.wanted = told.workers
            case "collective":
                self.collective = told.engine
            case "resumed":
                self.step = self.resumed = told.step
            case "evaluation":
                self.metrics = told.metrics or self.metrics
            case "epoch_finished":
                self.compared = (told.compared, told.compared_workers)
            case "checkpoint":
                self.checkpoint = (told.step, told.path)
            case "checkpoint_failed":
                self.no_checkpoint = (told.step, told.reason)
            case "stop_requested":
                self.wants_checkpoint = told.checkpoint
            case "advice":
                self.advice = told.text
                self.speedup = tuple((each.workers, each.speedup, each.measured) for each in told.curve)
            case "decision":
                self.target, self.decision = int(told.workers) if told.workers.isdecimal() else 0, told.reason
            case "phase":
                self.phase, self.reason = told.phase or self.phase, told.reason
            case "job_finished":
                self.over = True
                self.phase, self.reason = told.phase or self.phase, told.reason
                self.step = told.steps or self.step
                self.metrics = told.metrics or self.metrics
            case "worker_launched":
                self.replaced += told.replaces
            case "master_restarted":
                self.slow.clear()  # a new master finds them anew, and never says of the others that they recovered
            case "worker_slow" | "worker_recovered" | "worker_left" if told.worker is not None:
                self.slow.pop(told.worker, None)
                if told.event == "worker_slow" and len(self.slow) < MOST_SLOW:
                    self.slow[told.worker] = (told.host, told.phase, told.factor)


class TimeUse(StrEnum):
    """What the job did at a moment, in the order in which shares of the time are shown."""

    PRODUCTIVE = "productive"  # steps that nobody had made before
    SLOW = "slow"  # all waited for the slowest of them
    AGAIN = "again"  # steps whose result had been lost
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"  # as far as training stood still for it
    GROW = "grow"  # pauses, by what changed the world
    SHRINK = "shrink"
    FAILURE = "failure"
    WAITING = "waiting"  # fewer workers than the minimum
    STARTING = "starting"  # up to the first step
    ENDING = "ending"  # from the last step, or the decision that it ends, to the end


class WorkerPhase(StrEnum):
    """What a worker was at a moment."""

    PENDING = "pending"  # asked for, without a place
    STARTING = "starting"
    WARM = "warm"  # ready, and in no world
    TRAINING = "training"  # member of a world
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class Span:
    """``until`` is None while it lasts."""

    phase: WorkerPhase
    since: float
    until: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Lane:
    """One worker. ``cause`` is empty while it is there."""

    worker: int
    host: str
    spans: tuple[Span, ...]
    cause: str = ""
    reason: str = ""
    code: int | None = None
    trouble: str = ""  # what was last found of it: that it is slow or stuck


@dataclass(frozen=True, slots=True)
class WorldSpan:
    """``members`` are in rank order, and missing of old worlds where there are too many. ``until``: None while it lasts."""

    version: int
    size: int
    members: tuple[int, ...]
    reason: str
    step: int
    since: float
    until: float | None = None


@dataclass(slots=True)
class WorldChange:
    """The way from one world to the next, until its first step is told."""

    since: float
    use: TimeUse
    told: bool = False  # a survivor has told the pause


@dataclass(frozen=True, slots=True)
class PauseRecord:
    """One change of the world, as told by the survivor with the longest pause. ``parts`` add up to ``total``."""

    world: int
    kind: str
    time: float  # at which it was over
    total: float
    workers: int  # survivors that have told of it
    steps_torn: int
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at one moment; ``value`` are the numbers that belong to it."""

    time: float
    event: str
    text: str
    step: int = 0
    value: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Point(Steps):
    """A point of the curves over steps."""

    time: float
    workers: int

    @property
    def rate(self) -> float | None:
        """Samples per second; None where the seconds are not known, or make no sense."""
        rate = self.samples / self.seconds if self.seconds > 0 and self.samples else math.inf
        return rate if math.isfinite(rate) else None


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Where the time went, counted in two ways. The parts of each add up to its whole.

    ``wall``: seconds of the job. Each moment counts once, however many workers there were: this says how much sooner the job
    could have ended. ``workers``: worker-seconds of the workers that had a place. A pause of 100 workers counts a
    hundredfold: this says what was paid for. Here the time of workers in no world is starting, waiting or ending.
    """

    wall: Mapping[TimeUse, float]
    workers: Mapping[TimeUse, float]

    @property
    def productive(self) -> float:
        """The share of wall time, 0 to 1."""
        return self.wall[TimeUse.PRODUCTIVE] / max(sum(self.wall.values()), 1e-9)

    @property
    def utilized(self) -> float:
        """The share of worker-seconds, 0 to 1."""
        return self.workers[TimeUse.PRODUCTIVE] / max(sum(self.workers.values()), 1e-9)


@dataclass(slots=True, kw_only=True)
class History(JobFacts):
    """All that is known up to ``until``. Lists that are too long lack their least important items; ``counts`` count all."""

    began: float
    until: float
    lanes: tuple[Lane, ...]
    worlds: tuple[WorldSpan, ...]
    pauses: tuple[PauseRecord, ...]
    marks: tuple[Mark, ...]  # evaluations, checkpoints, requests, decisions, phases, slow and stuck workers
    warnings: tuple[Mark, ...]
    points: tuple[Point, ...]
    spent: TimeSpent
    counts: Mapping[str, int]
    changes: Mapping[str, int]  # of the world after training had begun, by kind: grow, shrink, failure
    causes: Mapping[str, int]  # of workers that left
    remarks: tuple[str, ...]  # on what was left out or can't be known


# What each worker was, when, and why.


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


# Where the time went: every moment of a job has one label, so that the parts add up to the whole.
#
# The label of the present is known from what has happened. A later entry may change labels of the past, as a pause is told when
# it is over. Such a change reaches back to the last report of steps but one at most. Whatever lies before is final, and is
# only added up, so memory is bounded. What is told without its time (an evaluation, waiting for the slowest member) is taken
# out of the time in which the job trained.


MOST_SEGMENTS = 512
# Labels that a pause may replace. Waiting for workers, starting and ending stay.
_TRAINING = (TimeUse.PRODUCTIVE, TimeUse.GROW, TimeUse.SHRINK, TimeUse.FAILURE)


@dataclass(frozen=True, slots=True)
class Crew:
    """Workers that have a place, by what they do."""

    training: int = 0
    starting: int = 0
    warm: int = 0
    leaving: int = 0


@dataclass(slots=True)
class _Segment:
    since: float
    until: float
    doing: TimeUse
    crew: Crew

    @property
    def seconds(self) -> float:
        return self.until - self.since


class _Sums:
    """Seconds by label, of segments that do not change any more."""

    def __init__(self) -> None:
        self.wall: dict[TimeUse, float] = defaultdict(float)
        self.workers: dict[TimeUse, float] = defaultdict(float)
        self.owed: dict[TimeUse, float] = defaultdict(float)  # to be taken out of productive time

    def add(self, segment: _Segment) -> None:
        crew, left = segment.crew, segment.seconds
        self.workers[TimeUse.STARTING] += crew.starting * left
        self.workers[TimeUse.WAITING] += crew.warm * left
        self.workers[TimeUse.ENDING] += crew.leaving * left
        if segment.doing is TimeUse.PRODUCTIVE:
            for doing, owed in self.owed.items():
                taken = min(owed, left)
                self.owed[doing] = owed - taken
                left -= taken
                self._add(doing, taken, crew)
        self._add(segment.doing, left, crew)

    def _add(self, doing: TimeUse, seconds: float, crew: Crew) -> None:
        self.wall[doing] += seconds
        self.workers[doing] += crew.training * seconds

    def result(self) -> TimeSpent:
        return TimeSpent({each: self.wall[each] for each in TimeUse}, {each: self.workers[each] for each in TimeUse})


class Timeline:
    """Time never goes back in it: a moment before the present is the present."""

    def __init__(self, began: float, doing: TimeUse) -> None:
        self.now = self._since = began  # what it does, it does since then
        self._sums = _Sums()
        self._segments = [_Segment(began, began, doing, Crew())]

    @property
    def doing(self) -> TimeUse:
        return self._segments[-1].doing

    def advance(self, now: float) -> None:
        self.now = self._segments[-1].until = max(now, self.now)

    def change(self, doing: TimeUse | None = None, crew: Crew | None = None) -> None:
        """From now on the job does something else, or with other workers."""
        last = self._segments[-1]
        doing, crew = doing or last.doing, crew or last.crew
        if doing is not last.doing:
            self._since = self.now
        if (doing, crew) == (last.doing, last.crew):
            return
        if last.seconds == 0:
            last.doing, last.crew = doing, crew
            return
        self._segments.append(_Segment(self.now, self.now, doing, crew))
        self._shorten()

    def skip(self, now: float, doing: TimeUse) -> None:
        """The time until then is not the job's; from then on it does this. All that was before is final."""
        for segment in self._segments:
            self._sums.add(segment)
        self.now = self._since = max(now, self.now)
        self._segments = [_Segment(self.now, self.now, doing, Crew())]

    def relabel(self, doing: TimeUse, since: float, until: float) -> None:
        """Replace the label of the training in this time; what is final stays."""
        until = min(until, self.now)
        split: list[_Segment] = []
        for segment in self._segments:
            if segment.doing not in _TRAINING or segment.until <= since or segment.since >= until:
                split.append(segment)
                continue
            low, high = max(segment.since, since), min(segment.until, until)
            cuts = ((segment.since, low, segment.doing), (low, high, doing), (high, segment.until, segment.doing))
            split += [_Segment(a, b, label, segment.crew) for a, b, label in cuts if b > a]
        present = self._segments[-1]
        if split[-1].doing is not present.doing:
            split.append(_Segment(self.now, self.now, present.doing, present.crew))
        self._segments = split
        self._shorten()

    def take(self, doing: TimeUse, seconds: float) -> None:
        """So many seconds of training, up to now, were spent on this. Those since the job began to end count as its end."""
        ending = self.now - self._since if self.doing is TimeUse.ENDING else 0.0
        self._sums.owed[doing] += max(seconds - ending, 0.0)

    def settle(self, before: float) -> None:
        """Make final what lies before."""
        while len(self._segments) > 1 and self._segments[0].until <= before:
            self._sums.add(self._segments.pop(0))
        first = self._segments[0]
        cut = min(max(before, first.since), first.until)
        self._sums.add(_Segment(first.since, cut, first.doing, first.crew))
        first.since = cut

    def _shorten(self) -> None:
        while len(self._segments) > MOST_SEGMENTS:
            self._sums.add(self._segments.pop(0))

    def settled(self) -> TimeSpent:
        """What is final, and all that is no training: these numbers never fall."""
        sums = deepcopy(self._sums)
        for segment in self._segments:
            if segment.doing not in _TRAINING:
                sums.add(segment)
        return sums.result()

    def spent(self, until: float) -> TimeSpent:
        """Up to ``until``, if that is later than now, as if all stayed as it is."""
        sums = deepcopy(self._sums)
        for segment in self._segments[:-1]:
            sums.add(segment)
        last = self._segments[-1]
        sums.add(replace(last, until=max(last.until, until)))
        return sums.result()
