"""The one task that owns the job's state, and the one that acts for it.

One task of `Loop` decides: it takes events from a `Mailbox` and puts what `Job.step` wants into a queue. The other task acts:
it carries out the queue in order, and waits where the state must be saved first. A store that does not answer therefore
delays only what must not be done unsaved: events, heartbeats among them, are still taken.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from pydantic import ValidationError

from elasticdl.common.errors import ReplacedError, first_finding
from elasticdl.job import messages
from elasticdl.job.journal import KINDS
from elasticdl.job.messages import FACTS, MOST_FACTS, Broken, Change, Heartbeat, Notice, Progress, standing
from elasticdl.master.core import events
from elasticdl.master.core.events import (
    AdoptWorld,
    EndJob,
    Instruction,
    KillWorker,
    LaunchWorker,
    NewSteps,
    ReadStacks,
    Record,
    SaveState,
    Tell,
    TerminateWorker,
    is_unsaved,
)
from elasticdl.master.core.job_core import Job
from elasticdl.master.core.values import World
from elasticdl.master.core.worker_record import Snapshot
from elasticdl.master.shell.journal_file import Journal
from elasticdl.master.shell.observers import Observer
from elasticdl.places.base import Launcher
from elasticdl.proto import elasticdl_pb2 as pb

# Saves a master's state where it outlives the master.

RETRY_SECONDS = 1.0
CLOSE_SECONDS = 5.0
_log = logging.getLogger(__name__)


class SnapshotStore(Protocol):
    """A place for the state of one job's master. Only one master at a time can write there."""

    @property
    def news_seconds(self) -> float:
        """At least so long after the last save is the next, if only the journal has grown."""
        return math.inf

    async def load(self) -> Snapshot | None:
        """What an earlier master saved last, None if there was none.

        Raises:
            UserError: there is something that can't be read, or is no snapshot.
        """
        return None

    async def save(self, snapshot: Snapshot) -> None:
        """Replace what is there, wholly or not at all.

        Raises:
            ReplacedError: another master has the job.
            OSError: it can't be saved now; it is tried again.
        """


class NoStore(SnapshotStore):
    """For a master whose workers end with it: it can have no successor."""

    async def save(self, snapshot: Snapshot) -> None:
        """Nobody would read it."""


class StateSaver:
    """Saves the newest snapshot in the background, and tries again what has failed, until it is closed.

    A snapshot of many workers takes long to make. So it is made only when the store is ready for it: what happens
    together, and what happens while the store is busy, is in one snapshot.
    """

    def __init__(self, store: SnapshotStore, replaced: Callable[[], None] = lambda: None) -> None:
        """``replaced``: called when another master has taken the job over."""
        self.store = store
        self._replaced = replaced
        self._newest: Callable[[], Snapshot] | None = None  # makes what is not yet being saved
        self._waiting: list[asyncio.Future[None]] = []
        self._saving: asyncio.Task[None] | None = None
        self.problem = ""  # why the last attempt failed, if it did

    def save(self, make: Callable[[], Snapshot]) -> asyncio.Future[None]:
        """Done once a snapshot of this moment, or of a later one, is saved. ``make`` makes one of the moment of its call.

        The future raises what the store raised, unless that was an OSError.
        """
        saved = asyncio.get_running_loop().create_future()
        self._newest = make
        self._waiting.append(saved)
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save())
        return saved

    async def close(self) -> None:
        """Wait (bounded) until the last one is saved."""
        if self._saving:
            await asyncio.wait({self._saving}, timeout=CLOSE_SECONDS)
            self._saving.cancel()
            await asyncio.wait({self._saving})
        for future in self._waiting:
            future.cancel()

    async def _save(self) -> None:
        while self._newest is not None:
            make, self._newest = self._newest, None
            waiting, self._waiting = self._waiting, []
            try:
                await self.store.save(make())
            except OSError as error:
                if not self.problem:
                    _log.error("can't save the job's state, and try again: %s", error)
                self.problem = str(error)
                self._newest, self._waiting = self._newest or make, [*waiting, *self._waiting]
                if isinstance(error, ReplacedError):
                    self._replaced()
                    return
                await asyncio.sleep(RETRY_SECONDS)
            except Exception as error:  # noqa: BLE001 - raised again where the future is waited for
                for future in waiting:
                    if not future.done():
                        future.set_exception(error)
            else:
                self.problem = ""
                for future in waiting:
                    if not future.done():
                        future.set_result(None)


# Messages of protobuf from and to the core's dataclasses, whose fields have the same names. The core sees no message.

_FORMS = {kind.name: kind.form for kind in KINDS.values() if kind.of_worker}
# Of each kind of message to a worker: the name of its field in `MasterMessage`.
_BODIES = {
    type(getattr(pb.MasterMessage(), name)).__name__: name for name in pb.MasterMessage.DESCRIPTOR.fields_by_name
}


def to_event(worker_id: int, message: pb.WorkerMessage) -> events.FromWorker:
    """What a message inside a session means.

    Raises:
        ValueError: the message means nothing here, or its notice is none that a worker may give.
    """
    body = message.WhichOneof("body")
    if body is None or body == "kv_put":
        raise ValueError(f"a session does not take {body or 'an empty message'} here")
    told = getattr(message, body)
    match told:
        case pb.Notice():
            return events.FromWorker(worker_id, messages.Notice(told.event, _notice(told), message.number))
        case pb.Heartbeat():
            given: dict[str, Any] = {"times": _copied(told.times) if told.HasField("times") else None}
        case pb.Progress():
            given = {"steps": tuple(map(_copied, told.steps))}
        case pb.Finished():
            given = {"metrics": dict(told.metrics)}
        case _:
            given = {}
    return events.FromWorker(worker_id, _copied(told, **given))


def to_message(order: messages.Order) -> pb.MasterMessage:
    """It is the same for all workers that are told."""
    return pb.MasterMessage(**{_BODIES[type(order).__name__]: _values(order)})


def to_status(job_name: str, job: Job, now: float, elapsed: float) -> pb.JobStatus:
    view, training = job.view(), job.training
    shown = ("phase", "reason", "traceback", "world_version", "last_change", "advice", "decision")
    achieved = ("epoch", "total_epochs", "step", "total_steps", "loss", "samples", "metrics", "collective",
                "compared_step", "compared_workers")  # fmt: skip
    return pb.JobStatus(
        job_name=job_name,
        **{name: getattr(view, name) for name in shown},
        **{name: getattr(training, name) for name in achieved},
        workers=[_values(worker) for worker in view.workers],
        samples_per_second=training.samples_per_second(now),
        time_left=training.time_left(now),
        elapsed=elapsed,
        min_workers=view.limits.minimum,
        max_workers=view.limits.maximum,
    )


def _copied(message: object, **given: object) -> Any:
    """The core's value of the same name; ``given``: fields that the message does not have so."""
    kind = getattr(messages, type(message).__name__)
    return kind(*[given[name] if name in given else getattr(message, name) for name in kind.__match_args__])


def _values(said: object) -> dict[str, Any]:
    """The fields of one of the core's values."""
    return {name: getattr(said, name) for name in said.__match_args__}  # type: ignore[attr-defined]


def _notice(notice: pb.Notice) -> dict[str, Any]:
    if notice.event not in _FORMS:
        raise ValueError(f"a worker has no notice {notice.event!r} to give")
    # A file's name may have bytes that are no UTF-8. Python keeps such a byte as a lone surrogate, which can't be sent on.
    encodable = json.dumps(json.loads(notice.fields_json or "{}"), ensure_ascii=False).encode(errors="replace")
    try:
        form = _FORMS[notice.event].model_validate(json.loads(encodable))
    except ValidationError as error:
        raise ValueError(f"notice {notice.event}: {first_finding(error)}") from None
    return form.model_dump(exclude_unset=True)


# The open sessions: a queue of outgoing messages for each worker, and the key-value entries that workers share.

Message = TypeVar("Message")


class Outbox(Generic[Message]):
    """Messages that are yet to be sent over one stream."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[Message | None] = asyncio.Queue()
        self.replaced = False

    def put(self, message: Message) -> None:
        self.waiting.put_nowait(message)

    def close(self, *, replaced: bool = False) -> None:
        self.replaced = self.replaced or replaced
        self.waiting.put_nowait(None)

    async def messages(self) -> AsyncIterator[Message]:
        """Until it is closed."""
        while (message := await self.waiting.get()) is not None:
            yield message


SessionOutbox: TypeAlias = Outbox[pb.MasterMessage]


class Sessions:
    """A worker has at most one session; a newer one ends the older.

    An entry that a member puts into the key-value store of its world is passed on to the other members. A later world
    does not see it.
    """

    def __init__(self, taken: Mapping[int, int] | None = None) -> None:
        """``taken``: by worker, the number of its last message that an earlier master has taken and saved."""
        self._outboxes: dict[int, SessionOutbox] = {}
        self.taken = dict(taken or {})
        self._unsaved: set[int] = set()  # workers that wait to hear that what they have said is saved
        self._world = World(0, (), "")
        self._ranks: dict[int, int] = {}  # of its members
        self._alike = pb.World()  # what all of them are told of it: with many members it takes long to make
        self._entries: dict[tuple[str, str], pb.MasterMessage] = {}  # by scope and key
        # Put before a world was known: a new master learns the world from its workers.
        self._early: list[tuple[int, pb.KvPut]] = []
        self.facts = b""  # see `FACTS`; workers that come later are given it

    def open(self, worker_id: int) -> SessionOutbox:
        if older := self._outboxes.get(worker_id):
            older.close(replaced=True)
        outbox = self._outboxes[worker_id] = SessionOutbox()
        return outbox

    def close(self, worker_id: int, outbox: SessionOutbox) -> bool:
        """End this session; returns whether it was the worker's present one."""
        present = self._outboxes.get(worker_id) is outbox
        if present:
            del self._outboxes[worker_id]
        return present

    def send(self, worker_ids: Iterable[int], message: pb.MasterMessage) -> None:
        """A worker without a session misses it; the core sends it again when the worker reconnects."""
        for worker_id in worker_ids:
            if outbox := self._outboxes.get(worker_id):
                outbox.put(message)

    def take(self, worker_id: int, number: int) -> bool:
        """Whether a message of this number is new; 0 is no number. A worker repeats a message until it is saved."""
        if number == 0:
            return True
        self._unsaved.add(worker_id)
        last = self.taken.get(worker_id, 0)
        self.taken[worker_id] = max(number, last)
        return number > last

    @property
    def has_unsaved(self) -> bool:
        return bool(self._unsaved)

    def tell_when(self, saved: asyncio.Future[None]) -> None:
        """Tell the workers what of their messages is saved, once that is."""
        numbers, self._unsaved = {worker_id: self.taken[worker_id] for worker_id in self._unsaved}, set()

        def tell(saved: asyncio.Future[None]) -> None:
            if not saved.cancelled() and saved.exception() is None:
                for worker_id, number in numbers.items():
                    self.send((worker_id,), pb.MasterMessage(saved=pb.Saved(number=number)))

        if numbers:
            saved.add_done_callback(tell)

    def begin_world(self, world: World) -> None:
        """From now on entries are those of this world."""
        if world.version == self._world.version:
            return
        self._world, self._entries, members = world, {}, world.members
        self._ranks = {member.worker_id: rank for rank, member in enumerate(members)}
        root, stand = _values(members[0]), standing(members)
        self._alike = pb.World(version=world.version, reason=world.reason, size=len(members), standing=stand, root=root)
        early, self._early = self._early, []
        for worker_id, put in early:
            self.put(worker_id, put)

    def tell_world(self, worker_ids: Collection[int]) -> None:
        """The world that has begun, to these members."""
        for worker_id in worker_ids:
            rank = self._ranks[worker_id]
            message = pb.MasterMessage(world=self._alike)
            message.world.MergeFrom(pb.World(rank=rank, own=_values(self._world.members[rank])))
            self.send((worker_id,), message)
            if len(worker_ids) == 1:  # told again: it may also have missed entries
                self.replay(worker_id)

    def put(self, worker_id: int, put: pb.KvPut) -> None:
        """In a new session a member puts everything again; an entry that is known is not passed on twice."""
        if self._world.version == 0:
            self._early.append((worker_id, put))
        if put.world_version != self._world.version or worker_id not in self._ranks:
            return
        if (put.scope, put.key) == FACTS:
            self.facts = put.value if len(put.value) <= MOST_FACTS else b""
            return
        entry = pb.KvEntry(world_version=put.world_version, scope=put.scope, key=put.key, value=put.value)
        message, name = pb.MasterMessage(kv_entry=entry), (put.scope, put.key)
        if self._entries.get(name) != message:
            self._entries[name] = message
            self.send((other for other in self._ranks if other != worker_id), message)

    def replay(self, worker_id: int) -> None:
        """Send every entry again to a member that has reconnected, as it may have missed some."""
        if worker_id in self._ranks:
            for message in self._entries.values():
                self.send((worker_id,), message)


TICK_SECONDS = 0.1
# Numbers that only grow are saved this often.
SAVE_SECONDS = 15.0
# When the store takes longer, the status says that the job waits for it.
SLOW_SAVE_SECONDS = 1.0
# What workers say without which a job goes on.
_NEWS = (Heartbeat, Notice, Progress)


class Mailbox:
    """The queue of events: anybody posts, only `Loop` takes."""

    def __init__(self) -> None:
        # An asyncio.Event in the queue is set when all before it is acted upon.
        self.events: asyncio.Queue[events.Event | asyncio.Event] = asyncio.Queue()
        self._closed = False

    def post(self, event: events.Event) -> None:
        self.events.put_nowait(event)

    async def settled(self) -> bool:
        """Wait until everything that was posted before is acted upon and saved; False: it may never be."""
        if not self._closed:
            mark = asyncio.Event()
            self.events.put_nowait(mark)
            await mark.wait()
        return not self._closed

    def close(self) -> None:
        """No event is taken any more; whoever waits in `settled` goes on."""
        self._closed = True
        while not self.events.empty():
            if isinstance(event := self.events.get_nowait(), asyncio.Event):
                event.set()


# To carry out an instruction; to wait until the state is saved; to set an event, as all before it is done.
Pending = Instruction | asyncio.Future[None] | asyncio.Event


@dataclass(eq=False)
class Loop:
    """Decides for ``job`` what happens, and acts through the others."""

    job: Job
    mailbox: Mailbox
    launcher: Launcher
    sessions: Sessions
    journal: Journal
    saver: StateSaver
    observer: Observer
    clock: Callable[[], float]
    snapshot: Callable[[], Snapshot]  # what is saved of this master, as it is now

    def __post_init__(self) -> None:
        self.pending: asyncio.Queue[Pending] = asyncio.Queue()
        self._unpublished: list[int] = []  # versions of worlds that are decided and not yet told
        self._saved_at = self.clock()
        self._news_at = math.inf  # when the journal got the first of its entries that are not saved

    async def run(self) -> EndJob:
        """Until the job has ended. It begins with what the launcher finds, and starts with the first tick."""
        remembered = {worker.worker_id: worker.place for worker in self.job.snapshot().workers}
        self.decide(events.WorkersFound(tuple(await self.launcher.find(remembered))))
        deciding, acting = asyncio.create_task(self._decide_all()), asyncio.create_task(self._act_all())
        try:
            await asyncio.wait({deciding, acting}, return_when=asyncio.FIRST_COMPLETED)
            if deciding.done():
                deciding.result()
            return await acting
        except asyncio.CancelledError:  # another master takes the job over, and must know its newest state
            self._save(self.clock())
            raise
        finally:
            for task in (deciding, acting):
                task.cancel()
            await asyncio.wait({deciding, acting})
            self.mailbox.close()
            while not self.pending.empty():
                if isinstance(mark := self.pending.get_nowait(), asyncio.Event):
                    mark.set()
            await self.saver.close()

    # ---- to decide ----

    async def _decide_all(self) -> None:
        running = asyncio.get_running_loop()
        timer = running.call_soon(self.mailbox.post, events.Tick())
        try:
            while True:
                event = await self.mailbox.events.get()
                if isinstance(event, asyncio.Event):
                    if self.sessions.has_unsaved:
                        self.pending.put_nowait(self._save(self.clock()))
                    self.pending.put_nowait(event)
                    continue
                if isinstance(event, events.Tick):
                    timer = running.call_later(TICK_SECONDS, self.mailbox.post, events.Tick())
                self.decide(event)
        finally:
            timer.cancel()

    def decide(self, event: events.Event) -> None:
        """Put what the job wants into `pending`; do at once what need not be saved first."""
        now = self.clock()
        _log.debug("%s", event)
        match event:
            case events.FromWorker(worker, Notice(number=number)) if not self.sessions.take(worker, number):
                return
        for instruction in self._step(event, now):
            if isinstance(instruction, SaveState):
                self.pending.put_nowait(self._save(now))
            elif is_unsaved(instruction) and not self._precedes_its_world(instruction):
                self._tell(instruction)
            else:
                if isinstance(instruction, Tell) and isinstance(instruction.message, World):
                    self._unpublished.append(instruction.message.version)
                self.pending.put_nowait(instruction)
        has_news = now - max(self._saved_at, self._news_at) >= self.saver.store.news_seconds
        if has_news or now - self._saved_at >= SAVE_SECONDS:
            # If saving mere numbers fails, so does the next that is waited for.
            self._save(now).add_done_callback(lambda saved: saved.cancelled() or saved.exception())

    def _step(self, event: events.Event, now: float) -> list[Instruction]:
        """What the job wants. News that it can't take is dropped: the worker would tell it to the next master as well."""
        try:
            return self.job.step(event, now)
        except Exception as error:
            told = event.said if isinstance(event, events.FromWorker) else event
            if not isinstance(event, events.WorkerEvent) or not isinstance(told, (*_NEWS, events.StacksFound)):
                raise
            _log.exception("worker %d: %s is dropped", event.worker_id, type(told).__name__)
            problem = f"the master can't use what it has told ({type(error).__name__}: {error}), and goes on without it"
            return [Record("warning", {"worker": event.worker_id, "message": f"worker {event.worker_id}: {problem}"})]

    def _save(self, now: float) -> asyncio.Future[None]:
        """The state, with the journal, as both are at one moment: this one, or one soon after it."""
        self._saved_at, self._news_at = now, math.inf
        saved = self.saver.save(self.snapshot)
        self.sessions.tell_when(saved)
        return saved

    def _precedes_its_world(self, instruction: Instruction) -> bool:
        """No worker is told that a world changes or is broken before it is told that world."""
        match instruction:
            case Tell(message=Change(version) | Broken(version)):
                return version in self._unpublished
        return False

    # ---- to act ----

    async def _act_all(self) -> EndJob:
        while not isinstance(act := await self.pending.get(), EndJob):
            if isinstance(act, asyncio.Event):
                act.set()
            elif isinstance(act, asyncio.Future):
                await self._until_saved(act)
            else:
                await self.act(act)
        return act

    async def _until_saved(self, saved: asyncio.Future[None]) -> None:
        done, _ = await asyncio.wait({saved}, timeout=SLOW_SAVE_SECONDS)
        if not done:
            self.mailbox.post(events.StateSaveStalled(self.saver.problem or "it takes long"))
            await asyncio.wait({saved})
            self.mailbox.post(events.StateSaveStalled(""))
        saved.result()

    async def act(self, instruction: Instruction) -> None:
        """Carry out one instruction; all before it in `pending` must be done."""
        match instruction:
            case LaunchWorker(worker_id, away_from=away_from):
                await self.launcher.launch(worker_id, away_from)
            case TerminateWorker(worker_id):
                self.launcher.terminate(worker_id)
            case KillWorker(worker_id):
                self.launcher.kill(worker_id)
            case Tell(to, World() as world):
                self._unpublished.remove(world.version)
                self.sessions.begin_world(world)
                self.sessions.tell_world(to)
            case AdoptWorld(world):
                self.sessions.begin_world(world)
            case _:
                self._tell(instruction)

    def _tell(self, instruction: Instruction) -> None:
        match instruction:
            case Tell(to, message) if not isinstance(message, World):
                self.sessions.send(to, to_message(message))
            case ReadStacks(worker_id):
                self.launcher.read_stacks(worker_id)
            case Record(name, fields):
                self.journal.append(name, fields)
                self._news_at = min(self._news_at, self.clock())
            case NewSteps(steps, pace):
                self.observer.trained(steps, pace)
