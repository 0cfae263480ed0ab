"""What a journal tells, taken entry by entry by `Facts.take`. It needs a few MB however long the journal is.

The report, the dashboard, `summary.json`, the metrics and what a command shows at a job's end are views of `Facts`. Times are seconds
since the epoch, durations seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from elasticdl.job.journal import KINDS, PAUSE_PARTS, PAUSE_TIMES, Entry, Fields, SpeedupRow, Steps, parse_entry

MOST_SHOWN = 2000  # worlds, pauses, marks, and workers that are gone: of more the newest
MOST_POINTS = 3000
PAUSE_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 180.0)  # seconds, for the metrics
_IN_ORDER = ("clean", "drained", "finished")  # causes for which a worker that left is no loss


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


_PAUSES = {"grow": TimeUse.GROW, "shrink": TimeUse.SHRINK, "failure": TimeUse.FAILURE}


class WorkerPhase(StrEnum):
    """What a worker was at a moment."""

    PENDING = "pending"  # asked for, without a place
    STARTING = "starting"
    WARM = "warm"  # ready, and in no world
    TRAINING = "training"  # member of a world
    LEAVING = "leaving"


@dataclass(slots=True)
class Span:
    """``until`` is None while it lasts."""

    phase: WorkerPhase
    since: float
    until: float | None = None
    reason: str = ""


@dataclass(slots=True)
class Lane:
    """One worker. ``cause`` is empty while it is there."""

    worker: int
    host: str = ""
    spans: list[Span] = field(default_factory=list)
    cause: str = ""
    reason: str = ""
    code: int | None = None

    @property
    def phase(self) -> WorkerPhase | None:
        return self.spans[-1].phase if self.spans else None


@dataclass(slots=True)
class WorldSpan:
    """``members`` are in rank order. ``until``: None while it lasts."""

    version: int
    members: tuple[int, ...]
    reason: str
    step: int
    since: float
    until: float | None = None


@dataclass(slots=True)
class PauseRecord:
    """One change of the world, as told by the survivor with the longest pause. ``parts`` add up to ``total``."""

    world: int
    kind: str
    time: float  # at which it was over
    total: float
    workers: int = 0  # survivors that have told of it
    steps_torn: int = 0
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


def _newest() -> deque[Any]:
    return deque(maxlen=MOST_SHOWN)


class Curve:
    """Points of a curve. When there are too many, each two are joined, so the whole curve has one resolution."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._each = 1  # of the points that were added, those that make one
        self._in_last = 0

    def add(self, point: Point) -> None:
        points = self.points
        if points and self._in_last < self._each and points[-1].workers == point.workers:
            points[-1] += point
            self._in_last += 1
        else:
            points.append(point)
            self._in_last = 1
        if len(points) >= MOST_POINTS:
            self.points = [first + second for first, second in zip(points[::2], points[1::2], strict=False)]
            self._in_last += self._each
            self._each *= 2


class Histogram:
    """Counts of seconds by the lowest of `PAUSE_BOUNDS` that is not below them, and their sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(PAUSE_BOUNDS) + 1)  # the last: of larger ones
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(PAUSE_BOUNDS, value)] += 1
        self.sum += value


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Where the time went, counted in two ways. The parts of each add up to its whole.

    ``wall``: seconds of the job. Each moment counts once, however many workers there were: this says how much sooner the job
    could have ended. ``workers``: worker-seconds of the workers that had a place. A pause of 100 workers counts a
    hundredfold: this says what was paid for. Here the time of workers in no world is starting, waiting or ending.
    """

    wall: dict[TimeUse, float] = field(default_factory=lambda: dict.fromkeys(TimeUse, 0.0))
    workers: dict[TimeUse, float] = field(default_factory=lambda: dict.fromkeys(TimeUse, 0.0))

    def add(self, use: TimeUse, seconds: float, workers: int) -> None:
        self.wall[use] += seconds
        self.workers[use] += seconds * workers

    @property
    def productive(self) -> float:
        """The share of wall time, 0 to 1."""
        return self.wall[TimeUse.PRODUCTIVE] / max(sum(self.wall.values()), 1e-9)

    @property
    def utilized(self) -> float:
        """The share of worker-seconds, 0 to 1."""
        return self.workers[TimeUse.PRODUCTIVE] / max(sum(self.workers.values()), 1e-9)


class Timeline:
    """Gives each moment of a job one label, so that the parts add up to the whole. Time never goes back in it.

    What a time of training was is often told later: a pause when it is over, an evaluation by its seconds alone. So training stays
    open up to the last report of steps but one, and what is told is claimed of it, with the workers of that time. What lies before
    is final, and only added up.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.doing = TimeUse.STARTING  # PRODUCTIVE while it trains, for all that is known yet
        self.spent = TimeSpent()  # what is final: these numbers never fall
        self._open: deque[tuple[float, float, int]] = deque()  # training: since and until when, and by how many workers
        self._claims: defaultdict[TimeUse, float] = defaultdict(
            float
        )  # seconds of it, anywhere, that were something else

    def advance(self, now: float, crew: Mapping[WorkerPhase, int]) -> None:
        """``crew``: workers since then, by what they do."""
        since, self.now = self.now, max(now, self.now)
        seconds, training = self.now - since, crew[WorkerPhase.TRAINING]
        self.spent.workers[TimeUse.STARTING] += seconds * crew[WorkerPhase.STARTING]
        self.spent.workers[TimeUse.WAITING] += seconds * crew[WorkerPhase.WARM]
        self.spent.workers[TimeUse.ENDING] += seconds * crew[WorkerPhase.LEAVING]
        if self.doing is not TimeUse.PRODUCTIVE:
            self.spent.add(self.doing, seconds, training)
        elif seconds:
            if self._open and self._open[-1][1:] == (since, training):
                since = self._open.pop()[0]
            self._open.append((since, self.now, training))

    def skip(self, now: float, doing: TimeUse) -> None:
        """The time until then is not the job's; from then on it does this."""
        self.settle(self.now)
        self.now, self.doing = max(now, self.now), doing

    def claim(self, use: TimeUse, since: float, until: float = math.inf, most: float = math.inf) -> None:
        """This time was this, as far as it is open training; of it ``most`` seconds, the newest."""
        newer = []
        while self._open and self._open[-1][1] > since:
            began, ended, workers = self._open.pop()
            high = min(ended, until)
            low = max(began, since, high - most)
            if low >= high:
                newer.append((began, ended, workers))
                continue
            self.spent.add(use, high - low, workers)
            most -= high - low
            if ended > high:
                newer.append((high, ended, workers))
            if low > began:
                self._open.append((began, low, workers))
                break
        self._open.extend(reversed(newer))

    def claim_some(self, use: TimeUse, seconds: float) -> None:
        """So many seconds of the training were this; nobody knows which."""
        self._claims[use] += max(seconds, 0.0)

    def settle(self, until: float) -> None:
        """Make final what lies before."""
        while self._open and self._open[0][0] < until:
            since, ended, workers = self._open.popleft()
            if ended > until:
                self._open.appendleft((until, ended, workers))
            left = min(ended, until) - since
            for use, claimed in self._claims.items():
                taken = min(claimed, left)
                self._claims[use] -= taken
                self.spent.add(use, taken, workers)
                left -= taken
            self.spent.add(TimeUse.PRODUCTIVE, left, workers)


class Lanes:
    """What each worker was, when, and why. When too many workers are gone, the first of them are forgotten."""

    def __init__(self) -> None:
        self.there: dict[int, Lane] = {}
        self.gone: dict[int, Lane] = {}  # in the order in which they left
        self.crew: Counter[WorkerPhase] = Counter()  # of those that are there

    def become(self, worker: int, phase: WorkerPhase, now: float, reason: str = "") -> None:
        """Begin another span of a worker's lane; nothing changes once the worker is gone."""
        if worker in self.gone:
            return
        lane = self.there.setdefault(worker, Lane(worker))
        if lane.phase is phase:
            return
        self._end_span(lane, now)
        self.crew[phase] += 1
        lane.spans.append(Span(phase, now, None, reason))

    def leave(self, worker: int, now: float, cause: str, reason: str, code: int | None) -> None:
        if worker in self.gone:
            return
        lane = self.gone[worker] = self.there.pop(worker, Lane(worker))
        self._end_span(lane, now)
        lane.cause, lane.reason, lane.code = cause, reason, code
        if len(self.gone) > MOST_SHOWN:
            del self.gone[next(iter(self.gone))]

    def _end_span(self, lane: Lane, now: float) -> None:
        if lane.spans:
            lane.spans[-1].until = now
            self.crew[lane.spans[-1].phase] -= 1

    def form(self, members: Collection[int], before: Collection[int], now: float) -> None:
        """The members of a new world train. Who was in the world ``before``, is not in this one and does not leave, waits."""
        for worker in members:
            self.become(worker, WorkerPhase.TRAINING, now)
        for worker in set(before).difference(members):
            if worker in self.there and self.there[worker].phase is WorkerPhase.TRAINING:
                self.become(worker, WorkerPhase.WARM, now, "was cut off as its world broke")

    def rest(self, since: float, reason: str) -> None:
        """Whoever trained has stopped training at ``since``, and leaves."""
        for worker, lane in self.there.items():
            if lane.phase is WorkerPhase.TRAINING:
                self.become(worker, WorkerPhase.LEAVING, max(since, lane.spans[-1].since), reason)

    def end(self, now: float) -> None:
        """The job is over, and nobody is there any more."""
        for worker in tuple(self.there):
            self.leave(worker, now, "", "the job is over", None)


@dataclass(slots=True)
class _Change:
    """The way from one world to the next, until its first step is told."""

    since: float
    use: TimeUse
    told: bool = False  # a survivor has told the pause


@dataclass(eq=False)
class Facts:
    """What is known of a job. Whoever reads it changes nothing. Lists that are too long lack their oldest items; ``counts`` count all."""

    job: str = ""  # its name, if the journal does not tell it
    phase: str = "pending"
    reason: str = ""
    over: bool = False
    wanted: str = ""  # number of workers asked for
    step: int = 0
    epochs: int = 0  # that were finished, and the model's samples: told at the end
    samples: int = 0
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
    speedup: Sequence[SpeedupRow] = ()
    target: int = 0  # workers that the job wants by its own decision; 0: it decides nothing
    decision: str = ""  # why
    replaced: int = 0  # workers that took the place of one that left
    slow: dict[int, tuple[str, str, float]] = field(default_factory=dict)  # host, phase and factor, by worker
    curve: Curve = field(default_factory=Curve)
    next_worker: int = 0  # no worker of this number or above has been there
    began: float = 0.0
    until: float = 0.0  # up to which it is known
    worlds: deque[WorldSpan] = field(default_factory=_newest)
    pauses: deque[PauseRecord] = field(default_factory=_newest)
    longest_pause: float = 0.0
    marks: deque[Mark] = field(default_factory=_newest)
    counts: Counter[str] = field(default_factory=Counter)  # of entries by kind; of pauses each change once
    changes: Counter[str] = field(default_factory=Counter)  # of the world, by kind: starting, grow, shrink, failure
    causes: Counter[str] = field(default_factory=Counter)  # of workers that left
    # By kind of change and part of the pause.
    pause_times: defaultdict[tuple[str, str], Histogram] = field(default_factory=lambda: defaultdict(Histogram))

    def __post_init__(self) -> None:
        self._line = Timeline()
        self.spent = self._line.spent  # as far as that is final: once it is concluded, all
        self._lanes = Lanes()
        self._change: _Change | None = None
        self._lost = False  # a member of the present world
        self._reported = 0.0  # when steps were told last
        self._told = (0, 0)  # world and step of that
        self._worlds_before = 0  # of earlier runs of this training; each run counts its own from 1
        self._damaged = 0
        self._cut = False

    # ---- what is asked ----

    @property
    def lanes(self) -> list[Lane]:
        """The workers, by number."""
        return sorted([*self._lanes.gone.values(), *self._lanes.there.values()], key=lambda lane: lane.worker)

    def advance(self, now: float) -> None:
        """Nothing has changed since the last entry, if the job goes on. What is told later counts as later than ``now``."""
        if self.counts and not self.over:
            self._line.advance(now, self._lanes.crew)
            self.until = self._line.now

    def conclude(self, until: float = 0.0) -> Self:
        """Nothing more is told. ``until``: the present, for a job that goes on."""
        self.advance(until)
        line, change = self._line, self._change
        if self.over:
            self._end_change(line.now)
        elif change and not change.told:  # nothing was trained since
            line.claim(change.use, change.since)
        line.settle(line.now)
        return self

    def remarks(self) -> Iterator[str]:
        """On what was left out or can't be known: what a reader of a report must know of its journal, in words."""
        if self._cut:
            yield "the beginning of the journal is missing: what came before its first entry is not counted"
        if (times := self.counts["job_started"] - 1) > 0:
            yield f"the training was stopped and went on, times: {times:,}; what was between counts as nobody's time"
        if self._damaged:
            yield f"damaged lines of the journal, which are left out: {self._damaged:,}"
        if unknown := self.counts[""]:
            yield f"entries of kinds that this version does not know: {unknown:,}"
        if MOST_SHOWN in map(len, (self._lanes.gone, self.worlds, self.pauses, self.marks)):
            yield f"of workers that are gone, worlds, pauses and other events only the newest {MOST_SHOWN:,} are shown; all are counted"

    # ---- what is told ----

    def read(self, lines: Iterable[str]) -> Self:
        """Lines of a journal. What is no entry is left out, and remarked."""
        for line in lines:
            if not line.strip():
                continue
            entry = parse_entry(line)
            if entry is None:
                self._damaged += 1
            else:
                self.take(entry)
        return self

    def take(self, entry: Entry) -> None:
        """The next entry, which has a time and an event; nothing in it makes this raise."""
        told = Fields.of(entry)
        event, time, line = told.event, told.time, self._line
        if not self.counts:
            self._cut = event != "job_started"
            self.began = time
            line.skip(time, TimeUse.PRODUCTIVE if self._cut else TimeUse.STARTING)
        elif event == "job_started":
            self._begin_again(time)
        if told.world:
            told.world += self._worlds_before
        line.advance(time, self._lanes.crew)
        self.until = line.now
        kind = KINDS.get(event)
        self.counts[event if kind else ""] += 1
        if told.worker is not None:
            self.next_worker = max(self.next_worker, told.worker + 1)
            self._take_of_worker(told.worker, told, line.now)
        self._take_of_job(told, line.now)
        if kind and kind.marked:
            said = (told.workers, told.phase, told.path, told.reason, told.message, told.standing)
            value = told.metrics | told.given("worker", "seconds", "factor")
            self.marks.append(Mark(line.now, event, " ".join(filter(None, said)), told.step, value))

    def _begin_again(self, time: float) -> None:
        """A training that was stopped goes on: its next job has begun. What was between is nobody's time."""
        self._lanes.end(self._line.now)
        self._end_world(self._line.now)
        self._line.skip(time, TimeUse.STARTING)
        self._worlds_before = self.worlds[-1].version if self.worlds else 0
        self._change, self._lost = None, False
        # What the job before has told of its end.
        self.phase, self.reason, self.over, self.wants_checkpoint = "pending", "", False, False

    def _take_of_worker(self, worker: int, told: Fields, now: float) -> None:
        lanes = self._lanes
        match told.event:
            case "worker_launched" | "worker_pending":
                lanes.become(worker, WorkerPhase.PENDING, now, told.reason)
            case "worker_started":
                lanes.become(worker, WorkerPhase.STARTING, now)
                if worker in lanes.there:
                    lanes.there[worker].host = told.host
            case "worker_ready":
                lanes.become(worker, WorkerPhase.WARM, now)
            case "worker_draining":
                lanes.become(worker, WorkerPhase.LEAVING, now, told.reason)
            case "worker_slow":
                self.slow[worker] = (told.host, told.phase, told.factor)
            case "worker_recovered":
                self.slow.pop(worker, None)
            case "worker_left":
                lanes.leave(worker, now, told.cause, told.reason, told.code)
                self.slow.pop(worker, None)
                if self.worlds and told.cause not in _IN_ORDER:
                    self._lost = self._lost or worker in self.worlds[-1].members

    def _take_of_job(self, told: Fields, now: float) -> None:
        line = self._line
        match told.event:
            case "job_started":
                self.job, self.wanted = told.job or self.job, told.workers
            case "steps":
                self._steps(told, now)
            case "steps_over":
                self._steps_over(now, now - told.seconds)
            case "pause" if told.kind in _PAUSES:
                self._pause(told, now)
            case "world_formed":
                self._world_formed(told, now)
            case "world_broken":
                self._end_world(now)
                self._change = self._change or _Change(now, TimeUse.FAILURE)
            case "master_restarted":
                self._master_restarted(told, now)
            case "phase":
                self._phase(told, now)
            case "evaluation":
                line.claim(TimeUse.EVALUATION, now - told.seconds)
                self.metrics = told.metrics or self.metrics
            case "checkpoint":
                line.claim(TimeUse.CHECKPOINT, now - told.held)
                self.checkpoint = (told.step, told.path)
            case "checkpoint_failed":
                self.no_checkpoint = (told.step, told.reason)
            case "epoch_finished":
                self.compared = (told.compared, told.compared_workers)
            case "collective":
                self.collective = told.engine
            case "resumed":
                self.step = self.resumed = told.step
            case "scale_requested":
                self.wanted = told.workers
            case "stop_requested":
                self.wants_checkpoint = told.checkpoint
            case "advice":
                self.advice = told.text
                self.speedup = told.curve
            case "decision":
                self.target, self.decision = int(told.workers) if told.workers.isdecimal() else 0, told.reason
            case "worker_launched":
                self.replaced += told.replaces
            case "worker_left":
                self.causes[told.cause] += 1
            case "job_finished":
                self.over = True
                self.phase, self.reason = told.phase or self.phase, told.reason
                self.step, self.epochs, self.samples = told.steps, told.epochs, told.samples
                self.metrics = told.metrics or self.metrics
                self.collective = told.collective or self.collective
                if told.compared_workers:
                    self.compared = (told.compared, told.compared_workers)
                line.doing = TimeUse.ENDING
                self._lanes.end(now)
                self._end_world(now)

    def _phase(self, told: Fields, now: float) -> None:
        self.phase, self.reason = told.phase or self.phase, told.reason
        line = self._line
        if self.phase == "waiting":
            line.doing = TimeUse.WAITING
        elif self.phase in ("stopping", "succeeded", "failed", "stopped"):
            line.doing = TimeUse.ENDING
            self._lanes.rest(now, self.reason)
        elif self.phase == "running" and line.doing is TimeUse.WAITING:
            line.doing = TimeUse.PRODUCTIVE

    # ---- worlds ----

    def _world_formed(self, told: Fields, now: float) -> None:
        worlds, ids, line = self.worlds, tuple(told.members), self._line
        before = worlds[-1] if worlds else None
        if self._change is None and line.doing is TimeUse.STARTING:
            self._change = _Change(now, TimeUse.STARTING)
        elif self._change is None:
            # If the last member is lost, nobody is left whose world could be called broken.
            grew = before is None or len(ids) > len(before.members)
            use = TimeUse.FAILURE if self._lost else TimeUse.GROW if grew else TimeUse.SHRINK
            self._change = _Change(now - told.seconds, use)
        self._change.told = self._lost = False
        self._end_world(now)
        self._lanes.form(ids, before.members if before else (), now)
        worlds.append(WorldSpan(told.world, ids, told.reason, told.step, now))
        line.doing = TimeUse.PRODUCTIVE

    def _master_restarted(self, told: Fields, now: float) -> None:
        """The entry tells the world that the new master has found: the journal may lack its ``world_formed``. The new master
        finds slow workers anew, and never says of the others that they recovered."""
        self.slow.clear()
        if told.world and (not self.worlds or self.worlds[-1].version < told.world):
            # In the seconds of the entry the master waited for workers, and they trained.
            found = {"reason": "found by a master that was started again", "seconds": 0.0}
            self._world_formed(told.model_copy(update=found), now)

    def _end_world(self, now: float) -> None:
        if self.worlds and self.worlds[-1].until is None:
            self.worlds[-1].until = now

    def _pause(self, told: Fields, now: float) -> None:
        """Each survivor tells its pause; the longest counts."""
        kind, total, line = told.kind, told.total, self._line
        for part, seconds in told.given(*PAUSE_TIMES).items():
            self.pause_times[kind, part].add(seconds)
        if self._change:
            self._change.told = True
        if not self.pauses or self.pauses[-1].world != told.world:
            self._add_pause(PauseRecord(told.world, kind, now, 0.0))
            self.changes[kind] += 1
        pause = self.pauses[-1]
        pause.workers += 1
        pause.steps_torn = max(pause.steps_torn, told.steps_torn)
        if total > pause.total:
            line.claim(_PAUSES[kind], now - total, most=total - pause.total)
            pause.time, pause.total = now, total
            pause.parts = {name: getattr(told, name) for name in PAUSE_PARTS}
            self.longest_pause = max(self.longest_pause, total)

    def _end_change(self, first: float) -> None:
        """The ``first`` step after it begins, or the job is over without one."""
        change, self._change = self._change, None
        if change and not change.told:
            self._line.claim(change.use, change.since, first)
            self.changes[str(change.use)] += 1
            if change.use in _PAUSES and self.worlds:
                self._add_pause(PauseRecord(self.worlds[-1].version, str(change.use), first, first - change.since))

    def _add_pause(self, pause: PauseRecord) -> None:
        self.pauses.append(pause)
        self.counts["pauses"] += 1
        self.longest_pause = max(self.longest_pause, pause.total)

    # ---- steps ----

    def _steps_over(self, now: float, since: float) -> None:
        """Whatever a script does after its last step counts as the job's end."""
        line = self._line
        line.claim(TimeUse.ENDING, since)
        if self._change:
            self._change.since = now  # what was before is claimed
        if line.doing is TimeUse.PRODUCTIVE and self.worlds and self.worlds[-1].until is None:
            line.doing = TimeUse.ENDING
        self._lanes.rest(since, "has made its last step")

    def _steps(self, told: Fields, now: float) -> None:
        line, last, took = self._line, self.worlds[-1] if self.worlds else None, told.seconds
        made, world, step = told.steps, told.world, told.step
        if step > 0 and (world, step) <= self._told:
            return  # a master that was started again is told the last steps once more
        self._told = world, step
        # Steps of a world are also told after it broke.
        current = last is not None and (world > last.version or (world == last.version and last.until is None))
        if (change := self._change) and current:
            self._end_change(max(change.since, now - took))
        again = min(told.again, made)
        line.claim_some(TimeUse.AGAIN, took * again / made if made else 0.0)
        line.claim_some(TimeUse.SLOW, told.slowest * (made - again))  # each second counts once
        point = Point.of(told, time=now, workers=len(last.members) if last else 0)
        self.curve.add(point)
        self.step, self.loss, self.rate = step or self.step, point.loss, point.rate
        self.learning_rate = point.learning_rate
        self.steps_made, self.samples_made = self.steps_made + made, self.samples_made + point.samples
        line.settle(self._reported)
        self._reported = now
