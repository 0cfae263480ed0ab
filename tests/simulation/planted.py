"""Faults planted in the cores, from outside: a simulator that can't find them is of no use.

Each stands between a core and its events or instructions, or replaces one method of a core.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from elasticdl.common.backoff import TokenBucket
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core import training_step as agreement
from elasticdl.elastic.core.plan import PartOrder, Progress, SampleOrder, StepPlan
from elasticdl.elastic.core.protocol import Member, World
from elasticdl.elastic.core.reporting import Reporting
from elasticdl.elastic.core.training_step import Position, Vote
from elasticdl.elastic.core.worker import WorkerCore
from elasticdl.job import messages as m
from elasticdl.master.core import events as e
from elasticdl.master.core.fleet import Fleet, Losses, Streak
from elasticdl.master.core.rendezvous import Rendezvous
from elasticdl.master.core.values import IN_WORLD
from elasticdl.master.core.values import WorkerState as State
from elasticdl.master.core.values import World as MastersWorld
from elasticdl.master.core.worker_record import JobSnapshot, WorkerRecord
from elasticdl.places.group_core import MASTER, Bundle, GroupCore, Say
from elasticdl.proto import elasticdl_pb2 as pb
from tests.simulation import script
from tests.simulation.adapter import MasterCore
from tests.simulation.process import Process, order_in
from tests.simulation.run import Failure, run_seed
from tests.simulation.script import _Training

Planting = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class PlantedFault:
    name: str
    plant: Planting
    kind: str = ""  # of the histories that show it
    first: int = 0  # of the seeds, of which one must show it: for a rare one shortly before the first that does

    @property
    def seeds(self) -> range:
        return range(self.first, self.first + 300)


def find(fault: PlantedFault, seeds: range) -> tuple[int, Failure] | None:
    """How many histories were needed, and the one that shows it: without the fault it holds. None if none does."""
    for number, seed in enumerate(seeds, 1):
        with fault.plant():
            failure = run_seed(seed, [fault.kind])
        if failure and run_seed(seed, [fault.kind]) is None:
            return number, failure
    return None


# ---- ways to plant ----


def _stepping(core_type: type, change: Callable[[Any, Any, Callable[[Any], list[Any]]], list[Any]]) -> Planting:
    """Other instructions than those that a core gives: ``change`` has the core, the event and the core's own step."""

    @contextmanager
    def plant() -> Iterator[None]:
        real = core_type.step  # type: ignore[attr-defined]

        def step(core: Any, event: Any, now: float) -> list[Any]:
            return change(core, event, lambda event: real(core, event, now))

        with patch.object(core_type, "step", step):
            yield

    return plant


def _each(core_type: type, change: Callable[[Any, Any], Any]) -> Planting:
    """Another instruction instead of each, or none."""
    return _stepping(
        core_type,
        lambda core, event, step: [other for each in step(event) if (other := change(event, each)) is not None],
    )


def _deaf_worker(*ignored: type) -> Planting:
    """These events, or orders, do not reach the worker's core."""

    def change(core: WorkerCore, event: p.Event, step: Callable[[Any], list[Any]]) -> list[Any]:
        return [] if isinstance(order_in(event), ignored) else step(event)

    return _stepping(WorkerCore, change)


def _unsaid(kind: type) -> Planting:
    """Messages of this kind are not sent again in a new session."""

    def change(event: p.Event, each: p.Instruction) -> p.Instruction | None:
        again = isinstance(event, p.SessionOpened) and isinstance(each, p.Send) and isinstance(each.message, kind)
        return None if again else each

    return _each(WorkerCore, change)


def _tells(each: e.Instruction, kind: type) -> bool:
    return isinstance(each, e.Tell) and isinstance(each.message, kind)


def _without(kind: type) -> Planting:
    """The master's core never wants this."""
    return _each(MasterCore, lambda event, each: None if isinstance(each, kind) or _tells(each, kind) else each)


def _method(owner: Any, name: str, new: Any) -> Planting:
    return lambda: patch.object(owner, name, new)


# ---- the faults ----


def _keep_batch_unsaved(position: Position, workers: int) -> None:
    if position.batch is not None:
        position.progress = position.batch.after
    _REAL_COMMIT(position, workers)


def _leave_unsaved(position: Position) -> None:
    """What no commit has saved is lost with a torn step."""
    position.batch = position.vote = None
    position.unsaved = position.is_reduced = False


def _forget_staleness(position: Position) -> None:
    """What was trained alone is lost with a world that breaks before it is entered."""
    position.is_stale = False
    _REAL_LEAVE(position)


def _saved_alone(position: Position, progress: Progress, version: int, *, alone: bool) -> None:
    _REAL_SYNCED(position, progress, version, alone=True)


def _synced_at_zero(position: Position, progress: Progress, version: int, *, alone: bool) -> None:
    _REAL_SYNCED(position, progress if position.has_state else Progress(), version, alone=alone)


def _by_step_alone(member: Member, root: Member) -> bool:
    return member.has_state and (member.step, member.epoch) == (root.step, root.epoch)


def _claims_no_state(event: p.Event, each: p.Instruction) -> p.Instruction:
    if isinstance(each, p.Send) and isinstance(each.message, m.Ask):
        return p.Send(replace(each.message, has_state=False))
    return each


def _last_first(event: e.Event, each: e.Instruction) -> e.Instruction:
    if isinstance(each, e.Tell) and isinstance(each.message, MastersWorld):
        return replace(each, message=replace(each.message, members=each.message.members[::-1]))
    return each


def _forgets_world(core: MasterCore) -> JobSnapshot:
    return replace(_REAL_SNAPSHOT(core), world=None)


def _any_world(core: WorkerCore, world: World) -> p.Trigger:
    return p.Trigger.WORLD


def _finds_nobody(core: MasterCore, event: e.Event, step: Callable[[Any], list[Any]]) -> list[Any]:
    return step(e.WorkersFound(()) if isinstance(event, e.WorkersFound) else event)


def _publishes_unsaved(core: MasterCore, event: e.Event, step: Callable[[Any], list[Any]]) -> list[Any]:
    return sorted(step(event), key=lambda each: not _tells(each, MastersWorld))


@contextmanager
def _drains_are_not_heard() -> Iterator[None]:
    """A draining worker's finish is ignored."""
    draining: set[tuple[int, int]] = set()

    def change(core: MasterCore, event: e.Event, step: Callable[[Any], list[Any]]) -> list[Any]:
        if isinstance(event, e.FromWorker):
            who = id(core), event.worker_id
            if isinstance(event.said, m.Draining):
                draining.add(who)
            elif isinstance(event.said, m.Finished) and who in draining:
                return []
        return step(event)

    with _stepping(MasterCore, change)():
        yield


def _votes_for_one(what: str) -> Planting:
    """Whatever differs, the sum of the votes says that it does not."""
    real = Vote.of

    def of(sums: Sequence[float]) -> Vote:
        vote = real(sums)
        return replace(vote, one_batch=True) if what == "one_batch" else replace(vote, one_state=True)

    return _method(Vote, "of", of)


def _all_that_differ(members: Sequence[tuple[int, bool]], differing: Container[int]) -> tuple[int, ...]:
    """Refused alone, also who has trained."""
    return tuple(worker for worker, _ in members if worker in differing)


def _counts_who_leaves(rendezvous: Rendezvous, record: WorkerRecord) -> bool:
    others = (each for each in rendezvous._records.each_of(*IN_WORLD, State.DRAINING) if each is not record)
    return not any(each.has_state or each.step for each in others)


def _lingers_for_ever(core: WorkerCore, now: float) -> list[p.Instruction]:
    until, core._linger_until = core._linger_until, None
    out = _REAL_TICK(core, now)
    core._linger_until = None if core.stopping else until
    return out


def _says_it_is_new(event: p.Event, each: p.Instruction) -> p.Instruction:
    if isinstance(each, p.Send) and isinstance(each.message, m.Failed):
        return p.Send(replace(each.message, trained=False))
    return each


@contextmanager
def _replaces_at_once() -> Iterator[None]:
    """Whatever workers are lost of, and however many."""

    def count(losses: Losses, *lost: Any) -> tuple[Streak, ...]:
        streaks = _REAL_COUNT(losses, *lost)
        for streak in streaks:
            streak.until = 0.0
        return streaks

    with patch.object(Losses, "count", count), patch.object(TokenBucket, "take", lambda *_: 0.0):
        yield


def _puts_away_late(training: _Training, plan: StepPlan, samples: int) -> None:
    _REAL_PUT_AWAY(training, plan, samples)
    training._process.state.counted += plan.batch


def _counts_early(training: _Training, plan: StepPlan, samples: int) -> None:
    """Where a torn step is not undone."""
    _REAL_PUT_AWAY(training, plan, samples)
    training._process.state.counted += plan.batch
    training._process.saved.counted = training._process.state.counted


def _by_itself(process: Process, mine: Any) -> Generator[None, Any, Any]:
    """In the place of what the processes of a worker agree upon."""
    yield from ()
    return mine


def _asks_at_once(bundle: Bundle, number: int, ask: pb.Ask) -> list[Say]:
    return [Say(MASTER, pb.WorkerMessage(ask=ask))]


def _tells_one_of_breaks(bundle: Bundle, message: pb.MasterMessage) -> list[Say]:
    said = _REAL_OF_MASTER(bundle, message)
    return said[:1] if message.HasField("broken") else said


def _keeps_asks(bundle: Bundle, message: pb.MasterMessage) -> list[Say]:
    asks = bundle._asks
    said = _REAL_OF_MASTER(bundle, message)
    bundle._asks = asks
    return said


def _finished_at_once(bundle: Bundle, number: int, message: pb.WorkerMessage) -> list[Say]:
    return [Say(MASTER, message)] if message.HasField("finished") else _REAL_OF_PROCESS(bundle, number, message)


def _loses_what_is_early(core: GroupCore, number: int, message: pb.WorkerMessage, now: float) -> Any:
    return _REAL_HEARD(core, number, message, now) if core._bundle or message.HasField("failed") else []


_REAL_HEARD = GroupCore.heard
_REAL_OF_MASTER, _REAL_OF_PROCESS = Bundle.of_master, Bundle.of_process
_REAL_PUT_AWAY = _Training._before_vote
_REAL_COMMIT, _REAL_LEAVE, _REAL_SYNCED = Position.commit, Position.leave, Position.synced
_REAL_TICK = WorkerCore._tick
_REAL_SNAPSHOT, _REAL_COUNT = MasterCore.snapshot, Losses.count

_FAULTS: tuple[tuple[Any, ...], ...] = (
    # The worker's core.
    ("a vote to leave is ignored", _deaf_worker(m.Change, m.Drain)),
    ("SIGTERM is ignored", _deaf_worker(p.Terminated)),
    (
        "the last ones that hold the state leave at once",
        _method(WorkerCore, "_terminated", lambda core, reason, now: core._drain(reason)),
        "hostile",
    ),
    (
        "who alone holds the state goes as soon as another has it, which may leave as well",
        _method(Rendezvous, "alone", _counts_who_leaves),
        "hostile",
    ),
    ("the only one that holds the state stays for ever", _method(WorkerCore, "_tick", _lingers_for_ever)),
    ("a worker sends no heartbeats", _method(Reporting, "tick", lambda *_: [])),
    ("a torn step is not undone", _method(Process, "restore", lambda process: None)),
    ("a torn step takes the user's values along", _method(Position, "leave", _leave_unsaved)),
    ("what was trained alone is not kept", _method(Position, "leave", _forget_staleness)),
    ("steps of several are not kept", _method(Position, "synced", _saved_alone)),
    ("a commit at the top of the loop skips the batch", _method(Position, "commit", _keep_batch_unsaved)),
    ("a newcomer does not take over the place of training", _method(Position, "synced", _synced_at_zero)),
    ("nobody is sent another's state", _method(World, "needs_sync", False)),
    ("two at one step are taken to hold one model", _method(Member, "stands_with", _by_step_alone), "", 3900),
    ("a request to join does not say that it has the state", _each(WorkerCore, _claims_no_state), "", 700),
    ("a request to join is not said again to another master", _unsaid(m.Ask)),
    ("a last word is not said again to another master", _unsaid(m.Finished), "", 300),
    ("a broken world is not left", _deaf_worker(m.Broken)),
    ("any world is entered, however old", _method(WorkerCore, "_world_trigger", _any_world)),
    (
        "a part is put away once its step is closed",
        lambda: patch.multiple(_Training, _before_vote=lambda *_: None, _after_vote=_puts_away_late),
        "in_parts",
    ),
    (
        "a part is counted before its step is closed",
        lambda: patch.multiple(_Training, _before_vote=_counts_early, _after_vote=lambda *_: None),
        "in_parts",
    ),
    ("parts are cut by the number of workers", _method(PartOrder, "batches", SampleOrder.batches), "in_parts"),
    # The master's.
    ("the finish of a draining worker is ignored", _drains_are_not_heard),
    ("a world is published before it is saved", _stepping(MasterCore, _publishes_unsaved)),
    ("the last in a world is first", _each(MasterCore, _last_first)),
    ("members are not told of a change", _without(m.Change)),
    ("members are not told that their world is broken", _without(m.Broken)),
    ("who is given up is not killed", _without(e.KillWorker)),
    ("workers are not told that the job ends", _without(m.StopWork)),
    ("the world is not remembered over a restart", _method(MasterCore, "snapshot", _forgets_world)),
    ("workers are not looked for after a restart", _stepping(MasterCore, _finds_nobody)),
    ("no replacement ever waits", _replaces_at_once, "hostile"),
    # What the processes of a worker do as one.
    ("a step that failed in one process is made by the others", _method(script, "_agree", _by_itself), "several"),
    ("votes are not summed over the processes", _method(script, "_sum_inside", _by_itself), "several", 80),
    ("each process keeps the state by itself", _method(script, "_any", _by_itself), "several"),
    ("a worker asks when one of its processes does", _method(Bundle, "_ask", _asks_at_once), "several"),
    (
        "one process alone hears that the world is broken",
        _method(Bundle, "of_master", _tells_one_of_breaks),
        "several",
        60,
    ),
    ("a world does not answer who has asked for it again", _method(Bundle, "of_master", _keeps_asks), "several", 520),
    ("a worker has finished when a process has", _method(Bundle, "of_process", _finished_at_once), "several", 25),
    (
        "what a process says before the others have come is lost",
        _method(GroupCore, "heard", _loses_what_is_early),
        "several",
    ),
    # What workers compare.
    ("the batches of a step are not compared", _votes_for_one("one_batch"), "unlike"),
    ("the states of workers are not compared", _votes_for_one("one_state"), "unlike"),
    (
        "a newcomer that alone differs ends the job",
        _method(agreement, "newcomers_alone", lambda members, differing: ()),
        "unlike",
    ),
    ("who has trained is refused alone", _method(agreement, "newcomers_alone", _all_that_differ), "unlike"),
    ("who has trained fails as one that could not start", _each(WorkerCore, _says_it_is_new), "unlike"),
    (
        "a newcomer that cannot start is taken for the user's code",
        _method(Fleet, "failed", lambda fleet, record, event: event),
        "unlike",
    ),
)
PLANTED = tuple(PlantedFault(*each) for each in _FAULTS)
# Each takes many histories, and another breaks the same promise sooner.
SLOW = ("a broken world is not left", "workers are not told that the job ends")
