"""Which workers to launch and which to let go, and what it means when one's process has ended.

`Fleet` compares how many workers there should be with those there are, so an event that is lost or comes twice changes
nothing. Ids are never used again.

| what became of the worker                       | what follows                                                     |
| ----------------------------------------------- | ---------------------------------------------------------------- |
| drained, killed, frozen, preempted, evicted,    | it is replaced at once if it had been in a world; if not, after  |
|   node lost, deleted                            |   a delay that grows with each in a row of its cause or its node |
|                                                 |   (`Streak`); the job does not fail for it                       |
| crashed, out of memory                          | it is replaced after a delay that doubles with each in a row     |
| three crashed in a row before reaching a world, | the job fails                                                    |
|   and no world is running                       |                                                                  |
| too many crashed after having trained           | the job fails; training on for a while clears the count          |
| ended with code 0 and never asked for a world   | the job fails: the program does not train with others            |
| could not start, while others can train         | it is replaced after a delay that doubles with each in a row, up |
|                                                 |   to 5 minutes; the job fails, and keeps its state, if too few   |
|                                                 |   are left to train and six in a row could not start             |
| finished                                        | it is not replaced                                               |

However many are lost, replacements are launched at a bounded rate (`BURST`, `RATE`).

If several things befell it, the cause is what the cluster did; else what the worker said of itself; else why the master
gave it up; else its exit code (`ENDS`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

from elasticdl.common.backoff import TokenBucket, delay_after
from elasticdl.common.front_ends import FRONT_ENDS
from elasticdl.job.journal import plural
from elasticdl.job.messages import Failed
from elasticdl.master.core.events import ExitCause, Instruction, LaunchWorker, Record, WorkerExited
from elasticdl.master.core.values import DONE, Settings, WorkerState
from elasticdl.master.core.worker_record import JobSnapshot, Records, Training, WorkerRecord

# What follows from the cause of an end. Any other cause is a loss: the worker is replaced.
CRASHES = (ExitCause.CRASHED, ExitCause.OUT_OF_MEMORY)  # too many end the job
# These stand even if the master has killed the worker itself. (DELETED does not: a kill by the master looks like that.)
_BY_THE_CLUSTER = (ExitCause.PREEMPTED, ExitCause.EVICTED, ExitCause.NODE_LOST)
_OF_THE_NODE = (
    ExitCause.EVICTED,
    ExitCause.NODE_LOST,
    ExitCause.KILLED,
    ExitCause.FROZEN,
)  # after some the node is avoided
_UNCLEAN = set(ExitCause) - {ExitCause.CLEAN}

# How long replacements wait: one back-off for each cause of losses, and one for each node.
#
# Ordinary losses cost no time: a worker that has been in a world is replaced at once, and so is the first of any kind that
# has not. Only losses in a row of workers that were in no world yet, or could not start where others train, make replacements
# wait, each time twice as long:
#
# | losses in a row            | wait from | the longest wait | other consequence                                     |
# | -------------------------- | --------- | ---------------- | ----------------------------------------------------- |
# | of one cause               | the second | 30 s            |                                                       |
# | of one node                | the third | 5 min            | from the second on replacements are kept off the node |
# | could not start            | the second | 5 min           |                                                       |
#
# Workers that were launched before a wait began, or are lost during it, do not lengthen it: they share it. After the wait their
# replacements come one after another, spread over as much time again. So one of them tries it first; if it is lost, the others
# go on waiting. A worker that reaches a world for the first time ends the streaks of causes, and that of its node, and whoever waited
# for these waits no longer. Whoever could not start may have reached a world: that streak ends when one launched later makes steps.
# Streaks are forgotten after an hour without a loss. A person is told once when a wait gets long, and sees it for as long as it lasts.


FIRST_DELAY = 0.5
LONGEST_DELAY = 30.0
LONGEST_OF_NODE = 300.0
# A person sees a wait that is longer than the first of these, and is told of one that is longer than the second.
SHOWN_DELAY, TOLD_DELAY = 1.5, 6.0
AVOIDED_FROM = 2
MOST_AVOIDED = 50  # the newest: they are named in each pod
FORGOTTEN_AFTER = 3600.0
# So many waits because of workers that could not start end a job in which too few are left to train. They take eight seconds and
# more: storage that is away for a moment must not end a job.
TRIES = 5
# Heartbeats in which its step was another by which a worker is known to train: it may have got the first of them from the others.
STEPS_OF_ITS_OWN = 2


@dataclass(slots=True)
class Streak:
    """Losses in a row of one cause, or on one node. Those that share a wait are one wave."""

    node: str = ""  # empty: of a cause
    unfit: bool = False  # they could not start
    losses: int = 0
    waves: int = 0
    delay: float = 0.0
    until: float = -math.inf  # -inf: nobody waits for it, as it has ended
    last: float = 0.0  # when there was one
    why: str = ""  # the last worker was lost
    told: bool = False  # a person was
    sharing: int = 0  # losses of the latest wave
    _next_id: int = 0  # of the workers that are launched after the latest wave

    def add(self, worker_id: int, next_id: int, why: str, now: float) -> None:
        self.losses, self.why, self.last = self.losses + 1, why, now
        if worker_id < self._next_id or now < self.until:
            self.sharing += 1
            return
        self.waves, self._next_id, self.sharing = self.waves + 1, next_id, 0
        longest = LONGEST_OF_NODE if self.node or self.unfit else LONGEST_DELAY
        self.delay = delay_after(self.waves - (AVOIDED_FROM if self.node else 1), FIRST_DELAY, longest)
        self.until = now + self.delay

    def is_followed_by(self, record: WorkerRecord) -> bool:
        """Whether this worker was launched after the latest loss, and trains."""
        return record.worker_id >= self._next_id and bool(record.pulse and record.pulse.steps >= STEPS_OF_ITS_OWN)

    @property
    def avoided(self) -> bool:
        """Whether replacements are kept off its node."""
        return bool(self.node) and self.waves >= AVOIDED_FROM

    def describe(self, seconds: float) -> str:
        """For people, if replacements wait so long."""
        workers = f"{self.losses} workers in a row were" if self.losses > 1 else "1 worker was"
        where = f" on node {self.node}" if self.node else ""
        lost = f"{workers} lost{where} before training, the last {self.why}"
        wait = f"{max(1, round(seconds))} s"
        if self.unfit:
            lost = f"{plural(self.losses, 'worker')} in a row could not start, the last: {self.why}"
        if self.avoided:
            return f"{lost}; the node is avoided, and tried again in {wait}"
        return f"replacements wait {wait}: {lost}"


@dataclass(frozen=True, slots=True)
class Departure:
    """A worker has left, and a replacement is due. ``streaks``: it waits for these. ``turn``: among those that
    wait for them, from 0 for the first to 1. ``away_from``: the node of the worker that left,
    if it was slow."""

    reason: str
    streaks: tuple[Streak, ...] = ()
    away_from: str = ""
    turn: float = 0.0

    @property
    def until(self) -> float:
        if any(streak.until == -math.inf for streak in self.streaks):
            return -math.inf
        return max((streak.until + self.turn * streak.delay for streak in self.streaks), default=-math.inf)

    @property
    def delay(self) -> float:
        return max((streak.delay for streak in self.streaks), default=0.0)

    @property
    def streak(self) -> Streak:
        """Which a person is told of."""
        return next((streak for streak in self.streaks if streak.avoided), self.streaks[0])


class Losses:
    """The losses in a row of workers that had been in no world."""

    def __init__(self) -> None:
        self._causes: dict[ExitCause | None, Streak] = {}  # None: could not start
        self._nodes: dict[str, Streak] = {}

    def count(self, record: WorkerRecord, cause: ExitCause, why: str, next_id: int, now: float) -> tuple[Streak, ...]:
        """One more; what its replacement waits for. ``next_id``: of the next worker that is launched."""
        self.forget(now)
        kind = None if record.unfit else cause
        streaks = [self._causes.setdefault(kind, Streak(unfit=record.unfit))]
        if record.node and cause in _OF_THE_NODE:
            streaks.append(self._nodes.setdefault(record.node, Streak(record.node)))
        for streak in streaks:
            streak.add(record.worker_id, next_id, why, now)
        return tuple(streaks)

    def reached_world(self, record: WorkerRecord) -> None:
        """A worker has, for the first time: whoever waits for one of the streaks that this ends waits no longer."""
        for cause in [cause for cause in self._causes if cause]:
            self._causes.pop(cause).until = -math.inf
        if streak := self._nodes.pop(record.node, None):
            streak.until = -math.inf

    def avoided(self, now: float) -> tuple[str, ...]:
        """Nodes to keep replacements off."""
        self.forget(now)
        return tuple(node for node, streak in self._nodes.items() if streak.avoided)[-MOST_AVOIDED:]

    @property
    def of_unfit(self) -> Streak | None:
        return self._causes.get(None)

    def heard(self, record: WorkerRecord) -> None:
        """A worker is alive. If it trains, it may end the streak of those that could not start."""
        streak = self.of_unfit
        if streak and streak.is_followed_by(record):
            self._causes.pop(None).until = -math.inf

    def forget(self, now: float) -> None:
        """Streaks without a loss for `FORGOTTEN_AFTER`."""
        self._causes = {cause: each for cause, each in self._causes.items() if now - each.last <= FORGOTTEN_AFTER}
        self._nodes = {node: each for node, each in self._nodes.items() if now - each.last <= FORGOTTEN_AFTER}

    def clear(self) -> None:
        self._causes.clear()
        self._nodes.clear()


# Replacements that may be launched at once (BURST), and in a second (RATE): so many for each worker of the maximum, and at least
# LEAST_BURST and LEAST_RATE.
BURST, LEAST_BURST = 2, 8
RATE, LEAST_RATE = 1 / 30, 1.0
_REMEDY = "train in a function below @elastic.run and call it (docs/library.md)"
NEVER_JOINED = (
    "ended with exit code 0 and took no part in the job: each process trains for itself unless the script uses elasticdl.elastic: "
    f"{', '.join(each.use for each in FRONT_ENDS)}, or init(): then {_REMEDY}"
)
# The exit code of a program that refuses its arguments, or its task.
REFUSES = 2
INIT_ONLY = f"ended with exit code 0 after elastic.init() and has not trained together with others: {_REMEDY}"
# Who is let go first of those that are in no world and wait for none: the highest number.
_LEAST_USE = {WorkerState.STARTING: 1, WorkerState.PENDING: 2}


@dataclass(frozen=True, slots=True)
class EndRule:
    """What the end of a worker means that stood like this."""

    stood: Callable[[WorkerRecord], bool]
    overruled_by: Container[ExitCause]  # what the launcher saw counts, if it is one of these
    cause: ExitCause  # otherwise
    reason: str  # of that


# The first that fits counts.
ENDS = (
    EndRule(lambda r: r.state is WorkerState.FINISHED, (), ExitCause.FINISHED, "finished"),
    EndRule(lambda r: r.failure != "", _BY_THE_CLUSTER, ExitCause.CRASHED, "{failure}"),
    EndRule(lambda r: r.state is WorkerState.KILLING, _BY_THE_CLUSTER, ExitCause.FROZEN, "{reason}"),
    EndRule(
        lambda r: r.state is WorkerState.DRAINING or r.waits_for_successor,
        (*_BY_THE_CLUSTER, ExitCause.DELETED),
        ExitCause.DRAINED,
        "{reason}",
    ),
    # One that had finished waits until a master has heard it.
    EndRule(lambda r: r.unheard, _UNCLEAN, ExitCause.DRAINED, "left while there was no master"),
    EndRule(lambda r: True, _UNCLEAN, ExitCause.CRASHED, "ended with exit code 0 before its training was complete"),
)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Of the end of a worker. ``fatal``: why the job can't go on, if so; ``keeps``: with its state, as nothing is wrong with those
    that train. ``warning``: what a person must know, if anything."""

    cause: ExitCause
    reason: str
    fatal: str = ""
    keeps: bool = False
    warning: str = ""


def judge_loss(record: WorkerRecord, event: WorkerExited) -> Judgement:
    """What it was lost of, and why, for people; nothing follows yet."""
    rule = next(rule for rule in ENDS if rule.stood(record))
    if event.cause not in rule.overruled_by:
        return Judgement(rule.cause, rule.reason.format(failure=record.failure, reason=record.reason))
    detail = f": {event.detail}" if event.detail else ""
    return Judgement(event.cause, event.cause.replace("_", " ") + detail)


def misuse(record: WorkerRecord, event: WorkerExited, *, somebody_joined: bool) -> str:
    """Why a user's own program that ended with code 0 has not trained with others, if it has not; no other would."""
    untrained = (WorkerState.PENDING, WorkerState.STARTING, WorkerState.INITIALIZING)
    if event.cause is not ExitCause.CLEAN or record.state not in untrained or record.ready or record.unheard:
        return ""
    if record.state is WorkerState.INITIALIZING:
        return f"worker {record.worker_id} {INIT_ONLY}"
    return "" if somebody_joined else f"worker {record.worker_id} {NEVER_JOINED}"


def refusal(record: WorkerRecord, event: WorkerExited) -> str:
    """Why a user's own program has refused to train, if it has; no other would do better."""
    if event.code != REFUSES or event.cause is not ExitCause.CRASHED or record.ready or record.failure:
        return ""
    return f"worker {record.worker_id} has refused to train: {event.detail}"


def after_training(event: WorkerExited, step: int) -> Judgement:
    """What it means that a user's own program has ended, which had finished training.

    Whether all of its training was meant to be over, only the program knows: it may have left its loop by an exit.
    """
    if event.code == 0:
        return Judgement(ExitCause.FINISHED, "finished")
    how = (
        event.detail
        if event.code > 0 and event.cause is ExitCause.CRASHED
        else f"{event.cause.replace('_', ' ')}: {event.detail}"
    )
    end = Judgement(ExitCause.FINISHED, f"ended after step {step}: {how}")
    late = f"worker {event.worker_id} has left its training after step {step} and ended: {how}"
    if event.cause in CRASHES:
        return replace(end, fatal=late)
    return replace(end, warning=f"{late}; what its program does after training may not have been done")


class Fleet:
    def __init__(self, records: Records, settings: Settings, past: JobSnapshot, training: Training) -> None:
        self._records = records
        self._training = training
        self._settings = settings
        self.departures: list[Departure] = []  # replacements that are due
        self.somebody_joined = bool(past.finished) or any(worker.ready for worker in past.workers)
        self.crashes = past.crashes
        self.losses = Losses()  # not saved, as time passes
        self._pace = TokenBucket(LEAST_RATE, LEAST_BURST)  # of replacements
        self._paced = False  # a replacement was due, and had to wait for it
        self._now = 0.0
        self.next_id = past.next_id
        self.bound(past.limits.maximum)

    @property
    def all_completed(self) -> bool:
        """Every process that ran has finished, and none is left but those without a place."""
        completed, pending = (self._records.count(state) for state in (WorkerState.COMPLETED, WorkerState.PENDING))
        return bool(completed) and completed + pending == len(self._records) and not self.holding

    @property
    def nobody_comes(self) -> bool:
        """Every worker that is not leaving waits for a place."""
        return 0 < self._records.count(WorkerState.PENDING) == self._records.live

    @property
    def awaited(self) -> str:
        """Why no worker starts, if every one waits for a place: the reason of the first that has one."""
        waiting = self._records.of(WorkerState.PENDING) if self.nobody_comes else []
        return next((record.reason for record in waiting if record.reason), "")

    @property
    def holding(self) -> bool:
        """Whether a replacement is in back-off, as of the latest plan."""
        return self._paced or self._held(self._now) > 0

    def _held(self, now: float) -> int:
        """How many replacements have to wait at this time."""
        return sum(departure.until > now for departure in self.departures)

    @property
    def wait(self) -> str:
        """For people, why replacements wait, if they do so for long."""
        waiting = (each for each in self.departures if each.until > self._now)
        first_of_longest = min(waiting, key=lambda each: (-each.delay, each.until), default=None)
        if first_of_longest is None or first_of_longest.delay < SHOWN_DELAY:
            return ""
        return first_of_longest.streak.describe(first_of_longest.until - self._now)

    def failed(self, record: WorkerRecord, told: Failed) -> Failed:
        """A worker says that it can't go on. If others train and this one has not yet, the fault is this worker's and not the
        user's code: what is returned says so."""
        if record.state is not WorkerState.FINISHED:
            record.failure = record.failure or told.message
        if told.trained or not self._others_train(record):
            return told
        record.unfit = True
        return replace(told, users=False)

    def exited(self, record: WorkerRecord, event: WorkerExited, *, world_runs: bool, least: int) -> Judgement:
        """What it means that its process is gone. ``least``: workers with which the job goes on."""
        end, own_program = judge_loss(record, event), self._settings.own_program
        if own_program and end.cause is ExitCause.FINISHED:
            return after_training(event, self._training.step)
        if own_program and (
            why := misuse(record, event, somebody_joined=self.somebody_joined) or refusal(record, event)
        ):
            return replace(end, fatal=why)
        if end.cause not in CRASHES:
            return end
        record.unfit = record.unfit or (not record.ready and self._others_train(record))
        if record.unfit:
            self.losses.forget(self._now)
            before = self.losses.of_unfit
            others = sum(each.holds_place for each in self._records.values() if each is not record)
            if others >= least or before is None or before.waves < TRIES:
                return end
            why = f"{before.losses + 1} workers in a row could not start, last worker {record.worker_id}: {end.reason}"
            return replace(end, fatal=f"{why}; too few are left to train, and the state is kept", keeps=True)
        self.crashes = self.crashes.and_one(in_training=record.world_version > 0)
        why = self.crashes.too_many(world_runs=world_runs)
        return replace(end, fatal=f"{why}, last worker {record.worker_id}: {end.reason}") if why else end

    def _others_train(self, record: WorkerRecord) -> bool:
        """Other workers have trained. After a restart only the workers know their steps."""
        return self._training.begun or any(each.step > 0 for each in self._records.values() if each is not record)

    def miss(self, record: WorkerRecord, departure: str, why: str, cause: ExitCause | None, *, now: float) -> str:
        """A replacement is due for this worker. ``departure``: why, for people; ``why``: the same, without the worker's number.
        ``cause``: why it was lost; None if it was told to leave. Returns what a person must know."""
        self._now, streaks, turn = now, tuple[Streak, ...](), 0.0
        if cause in CRASHES and not record.unfit:  # they are counted elsewhere, and a person is told of each
            number = self.crashes.in_a_row
            delay = delay_after(number, FIRST_DELAY, LONGEST_DELAY)
            streaks = (Streak(losses=number, delay=delay, until=now + delay, why=why, told=True),)
        elif cause and (record.unfit or not record.world_version):
            streaks = self.losses.count(record, cause, why, self.next_id, now)
            turn = min(1.0, streaks[0].sharing / self._maximum)
        due = Departure(departure, streaks, record.node if record.slow else "", turn)
        self.departures.append(due)
        if due.delay < TOLD_DELAY or due.streak.told:
            return ""
        due.streak.told = True
        return due.streak.describe(due.until - now)

    def scaled(self, maximum: int) -> None:
        """Somebody has scaled the job: what could not start may start now, and nobody waits."""
        self.losses.clear()
        self.departures = [replace(each, streaks=()) for each in self.departures]
        self.bound(maximum)

    def bound(self, maximum: int) -> None:
        """Set the rate at which replacements are launched, for so many workers."""
        self._maximum = maximum
        self._pace.rate, self._pace.burst = max(LEAST_RATE, RATE * maximum), BURST * maximum + LEAST_BURST

    def plan(
        self, maximum: int, retention_order: Callable[[], Sequence[int]], now: float
    ) -> tuple[int, list[WorkerRecord]]:
        """How many to launch, and whom to let go.

        ``retention_order``: workers in the world or waiting for one, those to keep first.
        """
        self._now, self._paced = now, False
        records = self._records
        wanted, live = max(0, maximum - records.count(*DONE)), records.live
        if live > wanted:
            place = {worker_id: index for index, worker_id in enumerate(retention_order())}
            by_use = sorted(
                (record for record in records.values() if record.live),
                key=lambda r: (place.get(r.worker_id, len(place)), _LEAST_USE.get(r.state, 0), r.worker_id),
            )
            self.departures.clear()
            return 0, by_use[wanted:][::-1]
        taken = live + records.count(WorkerState.FAILED) + self._held(now)  # as `holds_place` says of each
        return max(0, wanted - taken), []

    def launch(self) -> list[Instruction]:
        """A new worker, in another's place if one is due for it; nobody if that would be too many for now."""
        due = next((number for number, each in enumerate(self.departures) if each.until <= self._now), None)
        self._paced = self._paced or (due is not None and self._pace.take(self._now) > 0)
        if self._paced:
            return []
        departure = None if due is None else self.departures.pop(due)
        reason = f"in place of another: {departure.reason}" if departure else "asked for"
        record = self._records[self.next_id] = WorkerRecord(self.next_id, reason)
        slow = [departure.away_from] if departure and departure.away_from else []
        self.next_id += 1
        away_from = tuple(dict.fromkeys([*slow, *self.losses.avoided(self._now)]))
        fields = {"worker": record.worker_id, "reason": reason, "replaces": departure is not None}
        return [LaunchWorker(record.worker_id, reason, away_from), Record("worker_launched", fields)]
