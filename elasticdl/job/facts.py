"""What a journal tells, taken entry by entry by `Facts.take`. It needs a few MB however long the journal is.

The report, the dashboard, `summary.json`, the metrics and what a command shows at a job's end are views of `Facts`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import fields, replace
from typing import Any, Generic, TypeVar

from elasticdl.job.history import (
    MOST_LANES,
    History,
    JobFacts,
    Lanes,
    Mark,
    PauseRecord,
    Point,
    Timeline,
    TimeSpent,
    TimeUse,
    WorldChange,
    WorldSpan,
)
from elasticdl.job.journal import FORMAT, KINDS, PAUSE_PARTS, PAUSE_TIMES, STEPS, Entry, Fields, is_newer, parse_entry

# Lists, curves and histograms that stay small however long a job is.


T = TypeVar("T")
MOST_POINTS = 1500


class CappedList(Generic[T]):
    """Items in order. When there are more than twice ``most``, those of most ``worth`` stay; without ``worth`` every second."""

    def __init__(self, most: int, worth: Callable[[T], float] | None = None) -> None:
        self._most = most
        self._worth = worth
        self._items: list[T] = []
        self.count = 0

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    @property
    def dropped(self) -> int:
        return self.count - len(self._items)

    @property
    def last(self) -> T | None:
        return self._items[-1] if self._items else None

    def add(self, item: T) -> None:
        self._items.append(item)
        self.count += 1
        if len(self._items) <= 2 * self._most:
            return
        if self._worth is None:
            self._items = self._items[::2]  # the number is odd: with the first and the last
        else:
            worth = list(map(self._worth, self._items))
            kept = sorted(range(len(worth)), key=lambda place: (worth[place], place))[-self._most :]
            self._items = [self._items[place] for place in sorted({*kept, len(worth) - 1})]

    def amend(self, last: T) -> None:
        """Replace the last item."""
        self._items[-1] = last

    def change_each(self, change: Callable[[T], T]) -> None:
        """Replace each item, the newest first."""
        self._items = [change(item) for item in reversed(self._items)][::-1]


class Curve:
    """Points of a curve. When there are too many, each two are joined, so the whole curve has one resolution."""

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._each = 1  # of the points that were added, those that make one
        self._in_last = 0

    def add(self, point: Point) -> None:
        last = self._points[-1] if self._points else None
        if last is not None and self._in_last < self._each and last.workers == point.workers:
            self._points[-1] = last + point
            self._in_last += 1
        else:
            self._points.append(point)
            self._in_last = 1
        if len(self._points) >= 2 * MOST_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            self._points = [first + second for first, second in pairs]
            self._in_last += self._each
            self._each *= 2

    def result(self) -> tuple[Point, ...]:
        return tuple(self._points)


class Histogram:
    """Counts of values by the lowest of ``bounds`` that is not below them, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last: of larger ones
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


MOST_WORLDS = 2000
MOST_PAUSES = 2000
MOST_MARKS = 2000
MOST_WARNINGS = 200
MOST_MEMBERS = 500_000  # of all worlds together; of the older ones only the number stays
MOST_NAMES = 50  # of kinds of entries and of causes, which a journal could make up
PAUSE_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 180.0)  # seconds, for the metrics
FINAL = ("succeeded", "failed", "stopped")
_KINDS = {"grow": TimeUse.GROW, "shrink": TimeUse.SHRINK, "failure": TimeUse.FAILURE}
_IN_ORDER = ("clean", "drained", "finished")  # causes for which a worker that left is no loss
_AFTER_STEPS = ("evaluation", "checkpoint", "epoch_finished", "exported")


def _lasted(world: WorldSpan) -> float:
    return (world.until or float("inf")) - world.since


class Facts:
    """``job``: the job's name, if the journal does not tell it."""

    def __init__(self, job: str = "") -> None:
        self.state = JobFacts(job=job)
        self._time: Timeline | None = None
        self._began = 0.0
        self._lanes = Lanes()
        self._worlds: CappedList[WorldSpan] = CappedList(MOST_WORLDS, _lasted)
        self._pauses: CappedList[PauseRecord] = CappedList(MOST_PAUSES, lambda pause: pause.total)
        self._marks: CappedList[Mark] = CappedList(MOST_MARKS)
        self._warnings: CappedList[Mark] = CappedList(MOST_WARNINGS, lambda warning: warning.time)
        self._curve = Curve()
        self._members = 0
        self._changing: WorldChange | None = None
        self._lost = False  # a member of the present world
        self._reported = 0.0  # when steps were told last
        self._told = (0, 0)  # world and step of that
        # Of the runs of this training before the present one, whose worlds are counted from 1 again.
        self._worlds_before = 0
        self.counts: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()
        self._changes: Counter[str] = Counter()
        self._unknown: set[str] = set()
        self._damaged = self._went_back = 0
        self._furthest_back = 0.0
        self._cut = False
        self._format = ""
        self.pause_times: defaultdict[tuple[str, str], Histogram] = defaultdict(lambda: Histogram(PAUSE_BOUNDS))

    @classmethod
    def of(cls, lines: Iterable[str], job: str = "") -> Facts:
        facts = cls(job)
        facts.read(lines)
        return facts

    # ---- what is told ----

    def read(self, lines: Iterable[str]) -> None:
        """Lines of a journal. What is no entry is left out, and remarked."""
        for line in lines:
            if not line.strip():
                continue
            entry = parse_entry(line)
            if entry is None:
                self._damaged += 1
            else:
                self.take(entry)

    def take(self, entry: Entry) -> None:
        """The next entry, which has a time and an event; nothing in it makes this raise."""
        told = Fields.of(entry)
        event, time = told.event, told.time
        if self._time is None:
            self._cut = event != "job_started"
            self._began = time
            self._time = Timeline(time, TimeUse.PRODUCTIVE if self._cut else TimeUse.STARTING)
        elif event == "job_started":
            self._begin_again(time)
        if told.world:
            told.world += self._worlds_before
        line = self._line
        if time < line.now:
            self._went_back += 1
            self._furthest_back = max(self._furthest_back, line.now - time)
        line.advance(time)
        now = line.now
        kind = KINDS.get(event)
        self.counts[event if kind else ""] += 1
        if kind is None and len(self._unknown) < MOST_NAMES:
            self._unknown.add(event[:MOST_NAMES])
        if event != STEPS:  # of which there are most, and some are told twice
            self.state.take(told)
        self._lanes.take(told, now)
        self._act(told, now)
        if kind and kind.marked:
            said = (told.workers, told.phase, told.path, told.reason, told.message, told.standing)
            value = told.metrics | told.given("worker", "seconds", "factor")
            self._marks.add(Mark(now, event, " ".join(filter(None, said)), told.step, value))
        line.change(crew=self._lanes.crew)

    def _begin_again(self, time: float) -> None:
        """A training that was stopped goes on: its next job has begun. What was between is nobody's time."""
        self._lanes.end(self._line.now)
        self._end_world(self._line.now)
        self._line.skip(time, TimeUse.STARTING)
        self._worlds_before = self._worlds.last.version if self._worlds.last else 0
        self._changing, self._lost = None, False

    # ---- what is asked ----

    @property
    def next_worker(self) -> int:
        """The number of a worker that no worker has had."""
        return self._lanes.next_worker

    def settled(self, until: float = 0.0) -> TimeSpent:
        """Where the time went, as far as that is final: these numbers never fall.

        ``until``: the present, for a job that goes on; what is told later counts as later.
        """
        line = self._time or Timeline(until, TimeUse.STARTING)
        if not self.state.over:
            line.advance(until)
        return line.settled()

    def result(self, until: float = 0.0) -> History:
        """``until``: the present, for a job that goes on."""
        facts, line = self.state, self._time or Timeline(until, TimeUse.STARTING)
        if facts.over:
            until = line.now
        change = self._changing
        if change and not change.told and not self._tells_no_steps:  # nothing was trained since
            line = deepcopy(line)
            line.advance(until)
            line.relabel(change.use, change.since, line.now)
        pauses, changes = tuple(self._pauses), dict(self._changes)
        if change and not change.told and facts.over and change.use in _KINDS.values() and self._worlds.last:
            # No step came after it that would have told it.
            lasted = line.now - change.since
            pauses += (PauseRecord(self._worlds.last.version, str(change.use), line.now, lasted, 0, 0),)
            changes[str(change.use)] = changes.get(str(change.use), 0) + 1
        return History(
            **{each.name: getattr(facts, each.name) for each in fields(JobFacts) if each.name != "slow"},
            slow=dict(facts.slow),
            began=self._began if self._time else until,
            until=max(line.now, until),
            lanes=self._lanes.result(),
            worlds=tuple(self._worlds),
            pauses=pauses,
            marks=tuple(self._marks),
            warnings=tuple(self._warnings),
            points=self._curve.result(),
            spent=line.spent(until),
            counts={**self.counts, "pauses": self._pauses.count},
            changes=changes,
            causes=dict(self.causes),
            remarks=tuple(self._remarks()),
        )

    def _remarks(self) -> Iterable[str]:
        """What a reader of a report must know of its journal, in words."""
        if self._cut:
            yield "the beginning of the journal is missing: what came before its first entry is not counted"
        if (times := self.counts["job_started"] - 1) > 0:
            yield f"the training was stopped and went on, times: {times:,}; what was between counts as nobody's time"
        if is_newer(self._format):
            yield f"a newer version of elasticdl wrote the journal (format {self._format}, not {FORMAT}): some of it may be misread"
        if self._damaged:
            yield f"damaged lines of the journal, which are left out: {self._damaged:,}"
        if self._unknown:
            some = ", ".join(sorted(self._unknown)[:5])
            yield f"entries of kinds that this version does not know: {self.counts['']:,} ({some})"
        if self._went_back:
            yield (
                f"entries older than the one before, by up to {self._furthest_back:.3g} s, as clocks go back: {self._went_back:,}; "
                "they count as of the moment before"
            )
        if self._tells_no_steps:
            yield "the journal tells no steps: an older version wrote it, and there are no curves"
        if self._lanes.forgotten:
            yield f"{self._lanes.forgotten:,} workers are not shown: the newest {MOST_LANES:,} of those that left are"
        lists: Mapping[str, CappedList[Any]] = {"worlds": self._worlds, "pauses": self._pauses, "warnings": self._warnings,
                                                "other events": self._marks}  # fmt: skip
        for what, kept in lists.items():
            if kept.dropped:
                yield f"{kept.dropped:,} {what} are counted, but not shown one by one"

    @property
    def _tells_no_steps(self) -> bool:
        """The job has made steps, but the journal has no entry on them."""
        facts = self.state
        made = (facts.over and facts.step > facts.resumed) or any(self.counts[event] for event in _AFTER_STEPS)
        return made and not self.counts[STEPS]

    # ---- the job ----

    @property
    def _line(self) -> Timeline:
        assert self._time is not None, "it begins with the first entry"
        return self._time

    def _act(self, told: Fields, now: float) -> None:
        """What the entry means for where the time went, for worlds and curves."""
        match told.event:
            case "steps":
                self._steps(told, now)
            case "steps_over":
                self._steps_over(told, now)
            case "pause":
                self._pause(told, now)
            case "world_formed":
                self._world_formed(told, now)
            case "world_broken":
                self._world_broken(now)
            case "master_restarted":
                self._master_restarted(told, now)
            case "worker_left":
                self._worker_left(told)
            case "evaluation":
                self._line.take(TimeUse.EVALUATION, told.seconds)
            case "checkpoint":
                self._line.take(TimeUse.CHECKPOINT, told.held)
            case "warning":
                self._warnings.add(Mark(now, "warning", told.message))
            case "job_started":
                self._format = told.format
            case "phase":
                self._phase(now)
            case "job_finished":
                self._line.change(TimeUse.ENDING)
                self._lanes.end(now)
                self._end_world(now)

    def _worker_left(self, told: Fields) -> None:
        cause, last = told.cause, self._worlds.last
        self.causes[cause if cause in self.causes or len(self.causes) < MOST_NAMES else "other"] += 1
        if not self._lost and last is not None and cause not in _IN_ORDER:
            self._lost = told.worker in last.members

    def _phase(self, now: float) -> None:
        phase, line = self.state.phase, self._line
        if phase == "waiting":
            line.change(TimeUse.WAITING)
        elif phase in ("stopping", *FINAL):
            line.change(TimeUse.ENDING)
            self._lanes.rest(now, self.state.reason)
        elif phase == "running" and line.doing is TimeUse.WAITING:
            line.change(TimeUse.PRODUCTIVE)

    # ---- worlds ----

    def _world_formed(self, told: Fields, now: float) -> None:
        line, before, ids = self._line, self._worlds.last, tuple(told.members)
        first = line.doing is TimeUse.STARTING
        if self._changing is None:
            # If the last member is lost, nobody is left whose world could be called broken.
            grew = before is None or len(ids) > before.size
            doing = TimeUse.FAILURE if self._lost else TimeUse.GROW if grew else TimeUse.SHRINK
            since = now if first else now - told.seconds
            self._changing = WorldChange(since, TimeUse.STARTING if first else doing)
        self._changing.told = self._lost = False
        self._end_world(now)
        self._lanes.form(ids, before.members if before else (), now)
        self._worlds.add(WorldSpan(told.world, len(ids), ids, told.reason, told.step, now))
        self._members += len(ids)
        if self._members > MOST_MEMBERS:
            self._members = 0
            self._worlds.change_each(self._without_members)
        line.change(TimeUse.PRODUCTIVE)

    def _without_members(self, world: WorldSpan) -> WorldSpan:
        """Keep the members of the newest worlds, half as many as there may be."""
        if self._members + len(world.members) > MOST_MEMBERS // 2:
            return replace(world, members=())
        self._members += len(world.members)
        return world

    def _world_broken(self, now: float) -> None:
        self._end_world(now)
        if self._line.doing is TimeUse.PRODUCTIVE:
            self._line.change(TimeUse.FAILURE)
        self._changing = self._changing or WorldChange(now, TimeUse.FAILURE)

    def _master_restarted(self, told: Fields, now: float) -> None:
        """The entry tells the world that the new master has found: the journal may lack its ``world_formed``. The new master
        knows nothing of slow or stuck workers, so it never tells that they recovered."""
        self._lanes.nothing_found()
        version, last = told.world, self._worlds.last
        if version and (last is None or last.version < version):
            # In the seconds of the entry the master waited for workers, and they trained.
            found = {"reason": "found by a master that was started again", "seconds": 0.0}
            self._world_formed(told.model_copy(update=found), now)

    def _end_world(self, now: float) -> None:
        last = self._worlds.last
        if last is not None and last.until is None:
            self._worlds.amend(replace(last, until=now))

    def _pause(self, told: Fields, now: float) -> None:
        """Each survivor tells its pause; the longest counts."""
        world, total, kind = told.world, told.total, told.kind
        doing = _KINDS.get(kind)
        if doing is None:
            return
        for part, seconds in told.given(*PAUSE_TIMES).items():
            self.pause_times[kind, part].add(seconds)
        if change := self._changing:
            # Until now all time since the break counted as failure.
            if change.use is TimeUse.FAILURE and not change.told:
                self._line.relabel(TimeUse.PRODUCTIVE, change.since, now)
            change.told = True
        parts = {name: getattr(told, name) for name in PAUSE_PARTS}
        paused, last = PauseRecord(world, kind, now, total, 1, told.steps_torn, parts), self._pauses.last
        if last is None or last.world != world:
            self._pauses.add(paused)
            self._changes[kind] += 1
        elif total > last.total:
            torn = max(last.steps_torn, told.steps_torn)
            self._pauses.amend(replace(paused, kind=last.kind, workers=last.workers + 1, steps_torn=torn))
        else:
            self._pauses.amend(replace(last, workers=last.workers + 1))
            return
        self._line.relabel(doing, now - total, now)

    # ---- steps ----

    def _steps_over(self, told: Fields, now: float) -> None:
        """Whatever a script does after its last step counts as the job's end."""
        line = self._line
        since = now - told.seconds
        line.relabel(TimeUse.ENDING, since, now)
        if line.doing is TimeUse.PRODUCTIVE:
            line.change(TimeUse.ENDING)
        self._lanes.rest(since, "has made its last step")

    def _steps(self, told: Fields, now: float) -> None:
        line, last, took = self._line, self._worlds.last, told.seconds
        made, world, step = told.steps, told.world, told.step
        if step > 0 and (world, step) <= self._told:
            return  # a master that was started again is told the last steps once more
        self._told = world, step
        # Steps of a world are also told after it broke.
        current = last is not None and (world > last.version or (world == last.version and last.until is None))
        change = self._changing
        if change and current:
            if not change.told:
                began = max(change.since, now - took)
                line.relabel(change.use, change.since, began)
                if change.use is TimeUse.FAILURE:
                    self._pauses.add(PauseRecord(world, str(change.use), began, began - change.since, 0, 0))
                self._changes[str(change.use)] += 1
            self._changing = None
        again = min(told.again, made)
        slowest, workers = told.slowest, last.size if last else 0
        line.take(TimeUse.AGAIN, took * again / made if made else 0.0)
        line.take(TimeUse.SLOW, slowest * (made - again))  # each second counts once
        point = Point(step, world, made, told.samples, told.loss, told.learning_rate,
                      took, again, told.waited, slowest, time=now, workers=workers)  # fmt: skip
        self._curve.add(point)
        state = self.state
        state.step, state.loss, state.rate = step or state.step, point.loss, point.rate
        state.learning_rate = point.learning_rate
        state.steps_made, state.samples_made = state.steps_made + made, state.samples_made + point.samples
        line.settle(self._reported)
        self._reported = now
