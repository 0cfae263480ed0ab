"""The one task that owns the job's state, and the one that acts for it.

One task of `Loop` decides: it takes events from a `Mailbox` and puts what `Job.step` wants into a queue. The other task acts:
it carries out the queue in order, and waits where the state must be saved first. A store that does not answer therefore
delays only what must not be done unsaved: events, heartbeats among them, are still taken.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from elasticdl.common.errors import ReplacedError
from elasticdl.job.messages import Broken, Change, Heartbeat, Notice, Progress
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
from elasticdl.master.shell.calls import Mailbox, Sessions, to_message
from elasticdl.master.shell.journal_file import Journal
from elasticdl.master.shell.observers import Observer
from elasticdl.places.base import Launcher

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


TICK_SECONDS = 0.1
# Numbers that only grow are saved this often.
SAVE_SECONDS = 15.0
# When the store takes longer, the status says that the job waits for it.
SLOW_SAVE_SECONDS = 1.0
# What workers say without which a job goes on.
_NEWS = (Heartbeat, Notice, Progress)


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
