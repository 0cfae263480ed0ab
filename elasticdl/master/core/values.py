"""What events, instructions and the core's own state are made of, and the settings that it decides by."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum, StrEnum
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from elasticdl.common.errors import first_finding
from elasticdl.common.reason import describe, parse
from elasticdl.job.messages import Member as Member
from elasticdl.job.messages import Pace as Pace
from elasticdl.job.messages import StepReport as StepReport
from elasticdl.job.messages import StepTimes as StepTimes
from elasticdl.job.spec import AUTO, MOST_WORKERS, JobSpec, WorkerRange


class Phase(StrEnum):
    """Where the job stands; `elasticdl.master.core.values.JOB` says what follows what."""

    PENDING = "pending"  # no world has been formed yet
    RUNNING = "running"
    WAITING = "waiting"  # too few workers; those that are left keep their state
    STOPPING = "stopping"  # decided how it ends; workers are leaving
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"  # on request

    @property
    def final(self) -> bool:
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.STOPPED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the job will have ended once its workers are gone."""

    phase: Phase
    reason: str
    traceback: str = ""
    checkpoint: bool = False  # whether those who leave write one


@dataclass(frozen=True, slots=True)
class World:
    """An ordered list of workers; a member's place is its rank. Versions only grow."""

    version: int
    members: tuple[Member, ...]
    reason: str

    @property
    def worker_ids(self) -> tuple[int, ...]:
        return tuple(member.worker_id for member in self.members)


@dataclass(frozen=True, slots=True)
class Settings:
    """The part of the job's specification that the core needs. Times in seconds."""

    workers: WorkerRange
    join_window: float = 0.3
    start_timeout: float = 600.0
    heartbeat_timeout: float = 10.0
    progress_timeout: float | None = None  # learnt
    stop_grace: float = 30.0
    # For workers to come back to a master that was started again: its address may take long to be known everywhere.
    recovery_timeout: float = 60.0
    scale_policy: str = "all"
    min_efficiency: float = 0.0
    # The workers run the user's own program, which may never connect.
    own_program: bool = False
    replace_slow: bool = False
    gang: bool = False  # all or none: there is no place for a worker more
    job_name: str = ""
    first_worker: int = 0  # number of the first; lower ones were in jobs of the same training before this one
    image: str = ""
    checkpoint_dir: str = ""

    @property
    def state_can_be_left(self) -> bool:
        """There is a place where all workers see what the last one leaves: pods share no folder."""
        return bool(self.checkpoint_dir) or not self.image

    @classmethod
    def from_spec(cls, spec: JobSpec, first_worker: int = 0) -> Settings:
        names = {field.name for field in fields(cls)} - {"workers", "own_program", "first_worker"}
        given = {name: getattr(spec, name) for name in names}
        if spec.progress_timeout == AUTO:
            given["progress_timeout"] = None
        return cls(spec.num_workers, own_program=bool(spec.command), first_worker=first_worker, **given)


# In which states a worker can be, and in which phases a job: what follows what.
#
# A worker has one state; `elasticdl.master.core.transitions` has the table of what changes it. `JOB` is the table of the job's phases.
# `scripts/draw_states.py` draws both.


class WorkerState(StrEnum):
    PENDING = "pending"  # asked for; the launcher has no place for it
    STARTING = "starting"  # asked for, or its process has started; has had no session
    INITIALIZING = "initializing"  # has had a session, and has not asked for a world: imports, reads data
    STANDBY = "standby"  # has asked for a world, and is in none
    MEMBER = "member"  # is in the present world
    REJOINING = "rejoining"  # was in the present world, and has asked for the next
    EXCLUDED = "excluded"  # a world goes on without it, which it may not know; has yet to ask for the next
    DRAINING = "draining"  # was told to leave
    FINISHED = "finished"  # its training is complete; its process still runs
    COMPLETED = "completed"  # has finished, and its process is gone
    FAILED = "failed"  # said that it can't go on; its process should end
    KILLING = "killing"  # given up; its process is being killed; of what it says only that it has finished counts
    GONE = "gone"  # its process is gone, and with it the record


STARTING = (WorkerState.PENDING, WorkerState.STARTING)
ABSENT = (
    WorkerState.INITIALIZING,
    WorkerState.STANDBY,
    WorkerState.REJOINING,
    WorkerState.EXCLUDED,
)  # in a session and in no world
# A worker in one of these states counts as one of those that the job has.
LIVE = (
    *STARTING,
    WorkerState.INITIALIZING,
    WorkerState.STANDBY,
    WorkerState.MEMBER,
    WorkerState.REJOINING,
    WorkerState.EXCLUDED,
)
IN_WORLD = (WorkerState.MEMBER, WorkerState.REJOINING)  # or left it for the next
LEAVING = (WorkerState.DRAINING, WorkerState.FAILED)
DONE = (WorkerState.FINISHED, WorkerState.COMPLETED)


class Condition(Enum):
    """What is so of the job, after each event."""

    LISTENING = "the master was started again, and does not know yet"
    NO_WORLD = "there was no world yet"
    PROGRAMS_RUN = "the user's own programs run, and need no world"
    TRAINING = "a world stands or is formed"
    TOO_FEW = "a world can't be formed"
    DECIDED = "its end is decided"
    SUCCEEDED = "all are gone: training was complete"
    FAILED = "all are gone: it had failed"
    STOPPED = "all are gone: it was stopped"


JOB: Mapping[tuple[Phase, Condition], Phase] = {
    (Phase.PENDING, Condition.PROGRAMS_RUN): Phase.RUNNING,
    (Phase.RUNNING, Condition.NO_WORLD): Phase.PENDING,  # the programs are gone, and are started again
    (Phase.PENDING, Condition.TRAINING): Phase.RUNNING,
    (Phase.WAITING, Condition.TRAINING): Phase.RUNNING,
    (Phase.WAITING, Condition.PROGRAMS_RUN): Phase.RUNNING,
    (Phase.PENDING, Condition.TOO_FEW): Phase.WAITING,
    (Phase.RUNNING, Condition.TOO_FEW): Phase.WAITING,
    (Phase.PENDING, Condition.DECIDED): Phase.STOPPING,
    (Phase.RUNNING, Condition.DECIDED): Phase.STOPPING,
    (Phase.WAITING, Condition.DECIDED): Phase.STOPPING,
    (Phase.STOPPING, Condition.SUCCEEDED): Phase.SUCCEEDED,
    (Phase.STOPPING, Condition.FAILED): Phase.FAILED,
    (Phase.STOPPING, Condition.STOPPED): Phase.STOPPED,
}


# How many workers have crashed, and when the job can't go on for it.


CRASHES_AT_START = 3
CRASHES_IN_TRAINING = 10
# So many steps without a crash clear the count.
STEPS_TO_FORGET_CRASHES = 100


@dataclass(frozen=True, slots=True)
class Crashes:
    at_start: int = 0  # in a row, by workers that had reached no world
    in_training: int = 0
    steps_since: int = 0
    most: int = 0  # the job makes do with so many workers, as more could not start; 0: with as many as are wanted
    given_up: str = ""  # why, for people

    @property
    def in_a_row(self) -> int:
        return max(self.at_start, self.in_training)

    def and_one(self, *, in_training: bool) -> Crashes:
        if in_training:
            return replace(self, in_training=self.in_training + 1, steps_since=0)
        return replace(self, at_start=self.at_start + 1, steps_since=0)

    def after_steps(self, steps: int) -> Crashes:
        since = self.steps_since + steps
        in_training = 0 if since >= STEPS_TO_FORGET_CRASHES else self.in_training
        return replace(self, steps_since=since, in_training=in_training)

    def after_world(self) -> Crashes:
        """A worker has got through its start, so others can."""
        return replace(self, at_start=0)

    def too_many(self, *, world_runs: bool) -> str:
        """Why it makes no sense to go on, if so."""
        if self.at_start >= CRASHES_AT_START and not world_runs:
            return f"{self.at_start} workers in a row failed at the start"
        if self.in_training >= CRASHES_IN_TRAINING:
            return f"{self.in_training} workers crashed in training"
        return ""


# Workers about which something seems wrong, and where they stand: what they, or their launchers, have reported.


class SuspicionKind(StrEnum):
    """Why a worker is asked where it stands."""

    STUCK = "stuck"
    LATE = "not ready"
    SILENT = "no heartbeat"
    UNREACHED = "no session"
    ABSENT = "not connected"  # a user's own program, which may do without a session
    OVER = "runs on after its training"
    WAITS = "waits for the others, as they do"


@dataclass(frozen=True, slots=True)
class StackReport:
    """Where a worker stands, as it or its launcher has reported."""

    where: str = ""  # as in train.py:31 in load
    stack: tuple[str, ...] = ()
    moves: bool = False  # its stack was seen to change, so it does something
    collectives: int = 0  # that it has begun in its world
    state: str = ""  # of its process, if that is why it can't move
    itself: bool = False  # it has told this itself

    @classmethod
    def told(cls, fields: Mapping[str, Any]) -> StackReport:
        """By the worker itself."""
        last = [f"last collectives: {', '.join(fields.get('last_collectives', ()))}"]
        stack = (*fields.get("stack", ()), *(last if fields.get("last_collectives") else ()))
        moves, begun = bool(fields.get("moves")), int(fields.get("collectives", 0))
        return cls(str(fields.get("where", "")), stack, moves, begun, itself=True)

    @classmethod
    def found(cls, text: str, state: str) -> StackReport:
        """By the launcher: ``text`` with what `faulthandler` and the worker have written, ``state`` if the process can't run."""
        stacks = parse(text)
        if not stacks:
            return cls(state=state)
        stack = tuple(describe(stacks[0], stacks[1:]))
        return cls(stacks[0].where, stack, state=state)

    def __str__(self) -> str:
        """To be put after what is wrong; empty if nothing is known."""
        return "".join([f", {self.state}" if self.state else "", f", at {self.where}" if self.where else ""])


@dataclass(slots=True)
class Suspicion:
    """Something seems wrong with a worker: from the moment at which it was asked where it stands."""

    kind: SuspicionKind
    asked: float  # when it was asked last
    report: StackReport | None = None  # the last one
    answered: bool = False  # by it, or by its launcher, since it was asked last
    launcher_asked: bool = False  # likewise
    is_due: bool = False  # it is to be named though its stack moves
    named: StackReport | None = None  # the report that people were shown last

    @property
    def answers(self) -> bool:
        """The worker itself has answered the last question."""
        return self.answered and self.report is not None and self.report.itself

    @property
    def moves(self) -> bool:
        return self.report is not None and self.report.moves

    def __str__(self) -> str:
        return str(self.report or "")


# How fast a job trains with how many workers, compared with one: what was measured, and what follows for other numbers.
#
# A number that was measured is believed as measured. For others the time of a step is
#
#     T(N) = a + b * share + c * (N - 1)        a, b, c >= 0
#
# by least squares over the numbers that were measured. ``share`` is the largest part of the global batch that one worker has;
# it is constant where the batch follows the workers. What this form misses at the next smaller number that was measured is
# corrected. As long as only one number was measured, nothing is known of others.


# Some jobs are faster with N workers than N times, as each one's part of the data fits into a cache. None is by more than this.
MOST_EFFICIENCY = 1.25
Amount = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]  # it may not be known, which is 0
# Of least squares; they take a few milliseconds.
ROUNDS = 1000


@dataclass(frozen=True, slots=True)
class Observation:
    """Ordinary steps with one number of workers."""

    workers: Annotated[int, Field(ge=1, le=MOST_WORKERS)]
    samples: Annotated[int, Field(ge=1, le=2**53)]  # of a step
    seconds: Annotated[float, Field(ge=1e-9, le=1e9, allow_inf_nan=False)]  # of a step, the mean without the extremes
    age: Amount = 0.0  # seconds since the last of these steps

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds


@dataclass(frozen=True, slots=True)
class Point:
    """With so many workers the job trains ``speedup`` times as fast as with one."""

    workers: int
    speedup: float
    measured: bool  # so many, and one; else it is an estimate

    @property
    def efficiency(self) -> float:
        """The part of one worker's work alone that each of these does."""
        return self.speedup / self.workers


@dataclass(frozen=True)
class Curve:
    """What is known of the speedup; nothing, if there are no observations, or of one number of workers only."""

    observations: tuple[Observation, ...] = ()  # by number of workers
    _measured: dict[int, Observation] = field(init=False, repr=False, compare=False)
    _form: _Form | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_measured", {each.workers: each for each in self.observations})
        object.__setattr__(self, "_form", _Form(self.observations) if len(self._measured) > 1 else None)

    @property
    def can_be(self) -> bool:
        """Else what was measured of some numbers of workers has other causes, as where the first epoch reads its data from afar."""
        each_does = [each.rate / each.workers for each in self.observations]
        return all(does <= MOST_EFFICIENCY * each_does[0] for does in each_does)

    def at(self, workers: int) -> Point | None:
        """None, if nothing is known of so many. N workers never do more than N times the work of one."""
        if self._form is None:
            return Point(1, 1.0, True) if workers == 1 in self._measured else None
        speedup = min(float(workers), self._rate(workers) / self._rate(1))
        return Point(workers, speedup, workers in self._measured and 1 in self._measured)

    def above(self, present: int) -> Iterator[Point]:
        """Of more workers, as far as twice as many, and of those beyond that were measured."""
        numbers = {*range(present + 1, 2 * present + 1), *(n for n in self._measured if n > present)}
        return (point for n in sorted(numbers) if (point := self.at(n)) is not None)

    def _rate(self, workers: int) -> float:
        assert self._form is not None, "an estimate needs several numbers of workers"
        if workers in self._measured:
            return self._measured[workers].rate
        # What the form misses where it is closest is taken to be missed here, too.
        near = max((n for n in self._measured if n < workers), default=min(self._measured))
        missed = self._measured[near].seconds / self._form.seconds(near)
        return self._form.samples(workers) / (self._form.seconds(workers) * missed)

    def points(self, present: int) -> tuple[Point, ...]:
        """Those that people are shown: of the numbers that were measured, the present one, one more, and twice as many."""
        numbers = sorted({1, *self._measured, present, present + 1, 2 * present} - {0})
        return tuple(point for n in numbers if (point := self.at(n)) is not None)

    def published(self, present: int) -> list[dict[str, Any]]:
        """For the journal and for other programs."""
        points = self.points(present)
        return [{"workers": p.workers, "speedup": round(p.speedup, 3), "measured": p.measured} for p in points]

    def differs(self, other: Curve, present: int, share: float) -> bool:
        """Whether the two know other numbers of workers, or one of them has another speedup by more than this share."""
        mine, others = ({p.workers: p.speedup for p in each.points(present)} for each in (self, other))
        return mine.keys() != others.keys() or any(abs(mine[n] - others[n]) > share * others[n] for n in mine)

    def advice(self, present: int) -> str:
        """What so many workers bring, and one more; empty if there is nothing to say."""
        here, more = self.at(present), self.at(present + 1)
        if here is None:
            alone = f"only {present} workers were measured, so what fewer or more would do is not known"
            return alone if present in self._measured else ""
        if more is None:
            return ""
        said = []
        if present > 1:
            how = "measured" if here.measured else "by estimate"
            each = f"each does {here.efficiency:.2f} of one worker, {how}"
            said.append(f"{present} workers do {here.speedup:.1f} times the work of one ({each})")
        said.append(f"{_article(present + 1)} {ordinal(present + 1)} {_brings(more, more.speedup - here.speedup)}")
        return "; ".join(said)


class _Form:
    """T(N) = a + b * share + c * (N - 1), by the observations of at least two numbers of workers."""

    def __init__(self, observations: Sequence[Observation]) -> None:
        fewest, most = observations[0], observations[-1]
        growth = math.log(most.samples / fewest.samples) / math.log(most.workers / fewest.workers)
        self._follows = growth > 0.5  # the global batch follows the number of workers
        self._batch = most.samples / most.workers if self._follows else float(most.samples)
        # Relative to the seconds that were measured: errors are in proportion to them.
        rows = [[term / each.seconds for term in self._terms(each.workers)] for each in observations]
        self._factors = _least_squares(rows)

    def samples(self, workers: int) -> float:
        return self._batch * workers if self._follows else self._batch

    def seconds(self, workers: int) -> float:
        """Positive, however absurd the observations are: a checkpoint may tell anything."""
        return max(sum(map(float.__mul__, self._factors, self._terms(workers))), 1e-12)

    def _terms(self, workers: int) -> list[float]:
        share = 1.0 if self._follows else math.ceil(self._batch / workers) / self._batch
        return [1.0, *([] if self._follows else [share]), workers - 1.0]


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float]:
    """Factors >= 0 of the columns, with which each row sums up to 1, nearly: one after another each is made the best beside the others.

    Where several choices are as good, as with fewer rows than columns, the earlier columns have the larger part.
    """
    columns = range(len(rows[0]))
    products = [[sum(row[i] * row[j] for row in rows) for j in columns] for i in columns]
    wanted = [sum(row[i] for row in rows) for i in columns]
    factors = [0.0 for _ in columns]
    for _ in range(ROUNDS):
        for i in columns:
            missing = wanted[i] - sum(map(float.__mul__, products[i], factors))
            factors[i] = max(0.0, factors[i] + missing / products[i][i])
    return factors


def _brings(more: Point, gain: float) -> str:
    if more.measured:
        return f"adds {gain:.1f}, measured" if round(gain, 1) > 0 else "adds nothing, measured"
    if round(gain, 1) > 0:
        return f"would add about {gain:.1f}"
    return "would make the job slower" if round(gain, 1) < 0 else "would add nothing that can be measured"


def _article(number: int) -> str:
    return "an" if number in (11, 18) or str(number).startswith("8") else "a"


def ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


# What a job has learnt of how it scales: for the next master, and in checkpoints for a job that goes on from one.


FORMAT = 1
# Numbers of workers that are kept: what a cluster keeps of a job has to be small.
MOST_OBSERVATIONS = 32
MATERIAL = 0.05


@dataclass(frozen=True, slots=True)
class Rejection:
    """A number of workers that did not pay."""

    workers: int
    left: Amount  # seconds in which it is not tried again
    backoff: Amount  # seconds in which it was not to be tried; the next time twice as many


@dataclass(frozen=True, slots=True)
class Learnt:
    observations: Annotated[tuple[Observation, ...], Field(max_length=MOST_OBSERVATIONS)] = ()
    rejections: Annotated[tuple[Rejection, ...], Field(max_length=MOST_OBSERVATIONS)] = ()

    def differs(self, other: Learnt) -> bool:
        """Whether workers are to be told it again: other numbers of workers, or another speed."""
        mine, others = ({o.workers: o.seconds for o in each.observations} for each in (self, other))
        rejected, before = ({(r.workers, r.backoff) for r in each.rejections} for each in (self, other))
        if mine.keys() != others.keys() or rejected != before:
            return True
        return any(abs(seconds - others[workers]) > MATERIAL * others[workers] for workers, seconds in mine.items())

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **_ADAPTER.dump_python(self, mode="json")})

    @classmethod
    def from_json(cls, text: str) -> Learnt:
        """
        Raises:
            ValueError: it is none, or one of another version of this package; one line.
        """
        try:
            content = json.loads(text)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        found = content.pop("format", None) if isinstance(content, dict) else None
        if found != FORMAT:
            raise ValueError(f"it has format {found}, not {FORMAT}")
        try:
            return _ADAPTER.validate_python(content)
        except ValidationError as error:
            raise ValueError(first_finding(error)) from None


_ADAPTER = TypeAdapter(Learnt)
