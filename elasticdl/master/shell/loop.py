"""The one task that owns the job's state, and the one that acts for it.

One task of `Loop` decides: it takes events from a `Mailbox` and puts what `Job.step` wants into a queue. The other task acts:
it carries out the queue in order, and waits where the state must be saved first. A store that does not answer therefore
delays only what must not be done unsaved: events, heartbeats among them, are still taken.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from elasticdl.job.messages import Broken, Change, Heartbeat, Notice, Progress
from elasticdl.master.core.job_core import Job
from elasticdl.master.shell.convert import WorldMessages, to_message
from elasticdl.master.shell.journal_file import Journal
from elasticdl.master.shell.observer import Observer
from elasticdl.master.shell.saver import StateSaver
from elasticdl.master.shell.sessions import Sessions
from elasticdl.master.state import events
from elasticdl.master.state.instructions import (
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
from elasticdl.master.state.snapshot import JobSnapshot, Snapshot
from elasticdl.master.state.values import World
from elasticdl.places.base import Launcher

TICK_SECONDS = 0.1
# Numbers that only grow are saved this often.
SAVE_SECONDS = 15.0
# When the store takes longer, the status says that the job waits for it.
SLOW_SAVE_SECONDS = 1.0
# What workers say without which a job goes on.
_NEWS = (Heartbeat, Notice, Progress)
_log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class Ports:
    """What the loop acts through."""

    launcher: Launcher
    sessions: Sessions
    journal: Journal
    saver: StateSaver
    observer: Observer
    clock: Callable[[], float]
    wrap: Callable[[JobSnapshot], Snapshot]  # what is saved of this master besides the job's state


# To carry out an instruction; to wait until the state is saved; to set an event, as all before it is done.
Pending = Instruction | asyncio.Future[None] | asyncio.Event


class Loop:
    def __init__(self, job: Job, ports: Ports, mailbox: Mailbox) -> None:
        self._job = job
        self._ports = ports
        self._mailbox = mailbox
        self.pending: asyncio.Queue[Pending] = asyncio.Queue()
        self._unpublished: list[int] = []  # versions of worlds that are decided and not yet told
        self._world: WorldMessages | None = None  # of the last that was told, or adopted
        self._saved_at = ports.clock()
        self._news_at = math.inf  # when the journal got the first of its entries that are not saved

    async def run(self) -> EndJob:
        """Until the job has ended. It begins with what the launcher finds, and starts with the first tick."""
        remembered = {worker.worker_id: worker.place for worker in self._job.snapshot().workers}
        self.decide(events.WorkersFound(tuple(await self._ports.launcher.find(remembered))))
        deciding, acting = asyncio.create_task(self._decide_all()), asyncio.create_task(self._act_all())
        try:
            await asyncio.wait({deciding, acting}, return_when=asyncio.FIRST_COMPLETED)
            if deciding.done():
                deciding.result()
            return await acting
        except asyncio.CancelledError:  # another master takes the job over, and must know its newest state
            self._save(self._ports.clock())
            raise
        finally:
            for task in (deciding, acting):
                task.cancel()
            await asyncio.wait({deciding, acting})
            self._mailbox.close()
            while not self.pending.empty():
                if isinstance(mark := self.pending.get_nowait(), asyncio.Event):
                    mark.set()
            await self._ports.saver.close()

    # ---- to decide ----

    async def _decide_all(self) -> None:
        running = asyncio.get_running_loop()
        timer = running.call_soon(self._mailbox.post, events.Tick())
        try:
            while True:
                event = await self._mailbox.events.get()
                if isinstance(event, asyncio.Event):
                    if self._ports.sessions.has_unsaved:
                        self.pending.put_nowait(self._save(self._ports.clock()))
                    self.pending.put_nowait(event)
                    continue
                if isinstance(event, events.Tick):
                    timer = running.call_later(TICK_SECONDS, self._mailbox.post, events.Tick())
                self.decide(event)
        finally:
            timer.cancel()

    def decide(self, event: events.Event) -> None:
        """Put what the job wants into `pending`; do at once what need not be saved first."""
        now = self._ports.clock()
        _log.debug("%s", event)
        match event:
            case events.FromWorker(worker_id, Notice(number=number)) if not self._ports.sessions.take(
                worker_id, number
            ):
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
        has_news = now - max(self._saved_at, self._news_at) >= self._ports.saver.news_seconds
        if has_news or now - self._saved_at >= SAVE_SECONDS:
            # If saving mere numbers fails, so does the next that is waited for.
            self._save(now).add_done_callback(lambda saved: saved.cancelled() or saved.exception())

    def _step(self, event: events.Event, now: float) -> list[Instruction]:
        """What the job wants. News that it can't take is dropped: the worker would tell it to the next master as well."""
        try:
            return self._job.step(event, now)
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
        saved = self._ports.saver.save(lambda: self._ports.wrap(self._job.snapshot()))
        if numbers := self._ports.sessions.saving():
            saved.add_done_callback(partial(self._tell_saved, numbers))
        return saved

    def _tell_saved(self, numbers: Mapping[int, int], saved: asyncio.Future[None]) -> None:
        if not saved.cancelled() and saved.exception() is None:
            self._ports.sessions.saved(numbers)

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
            self._mailbox.post(events.StateSaveStalled(self._ports.saver.problem or "it takes long"))
            await asyncio.wait({saved})
            self._mailbox.post(events.StateSaveStalled(""))
        saved.result()

    async def act(self, instruction: Instruction) -> None:
        """Carry out one instruction; all before it in `pending` must be done."""
        ports = self._ports
        match instruction:
            case LaunchWorker(worker_id, away_from=away_from):
                await ports.launcher.launch(worker_id, away_from)
            case TerminateWorker(worker_id):
                ports.launcher.terminate(worker_id)
            case KillWorker(worker_id):
                ports.launcher.kill(worker_id)
            case Tell(to, World() as world):
                self._unpublished.remove(world.version)
                messages = self._begin(world)
                for worker_id in to:
                    ports.sessions.send((worker_id,), messages.told(worker_id))
                if len(to) == 1:  # told again: it may also have missed entries
                    ports.sessions.replay(to[0])
            case AdoptWorld(world):
                self._begin(world)
            case _:
                self._tell(instruction)

    def _begin(self, world: World) -> WorldMessages:
        """The sessions know this world from now on, if they did not yet. Returns what its members are told."""
        if self._world is None or self._world.version != world.version:
            self._world = WorldMessages(world)
            self._ports.sessions.begin_world(world.version, self._world.worker_ids)
        return self._world

    def _tell(self, instruction: Instruction) -> None:
        match instruction:
            case Tell(to, message) if not isinstance(message, World):
                self._ports.sessions.send(to, to_message(message))
            case ReadStacks(worker_id):
                self._ports.launcher.read_stacks(worker_id)
            case Record(name, fields):
                self._ports.journal.append(name, fields)
                self._news_at = min(self._news_at, self._ports.clock())
            case NewSteps(steps, pace):
                self._ports.observer.trained(steps, pace)
