"""The one task that owns the job's state: events go in through `post`, instructions are carried out here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from elasticdl.master.core import events as e
from elasticdl.master.core import instructions as i
from elasticdl.master.core.job import Job
from elasticdl.master.core.training import Training
from elasticdl.master.launchers.base import Launcher
from elasticdl.master.observers.journal_file import Journal
from elasticdl.master.service.convert import to_message
from elasticdl.master.service.saver import StateSaver
from elasticdl.master.service.sessions import KeyValueRelay, Sessions

TICK_SECONDS = 0.1
# What a successor must know may change with these, with a milestone of the training, and with whatever leads to more than
# an entry in the journal.
_WEIGHTY = (e.WorkersFound, e.WorkerFinished, e.WorkerFailed, e.WorkerExited, e.ScaleRequested, e.StopRequested)
# No successor needs to know of these, and workers wait for some: they come before the memory is saved. In the journal
# an entry is saved with the memory that it explains.
_BEFOREHAND = (i.AnnounceChange, i.BreakWorld, i.DumpStacks, i.Record)
_log = logging.getLogger(__name__)


class Mailbox:
    """Where everybody leaves events, in order; only `Loop` takes them out."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[e.Event | asyncio.Event] = asyncio.Queue()
        self._closed = False

    def post(self, event: e.Event) -> None:
        self._events.put_nowait(event)

    async def settled(self) -> None:
        """Wait until everything that was posted before is acted upon and remembered, or never will be."""
        if not self._closed:
            mark = asyncio.Event()
            self._events.put_nowait(mark)
            await mark.wait()

    async def take(self) -> e.Event:
        """The next; whoever asks for it is done with the one before."""
        while isinstance(event := await self._events.get(), asyncio.Event):
            event.set()
        return event

    def close(self) -> None:
        """Nobody takes any more; those who wait for what they have posted go on."""
        self._closed = True
        while not self._events.empty():
            if isinstance(event := self._events.get_nowait(), asyncio.Event):
                event.set()


@dataclass(frozen=True, slots=True)
class Ports:
    """What the loop acts through."""

    launcher: Launcher
    sessions: Sessions
    relay: KeyValueRelay
    journal: Journal
    keeper: StateSaver
    world_formed: Callable[[int], None]  # told the size of each world


class Loop:
    def __init__(
        self,
        job: Job,
        ports: Ports,
        training: Training,
        observer: Callable[[e.Event], None],
        clock: Callable[[], float],
    ) -> None:
        self._job = job
        self._ports = ports
        self._training = training
        self._observer = observer
        self._clock = clock

    async def run(self, mailbox: Mailbox) -> i.EndJob:
        """Until the job has ended. It begins with what the launcher finds, and starts with the first tick."""
        running = asyncio.get_running_loop()
        end = await self._handle(e.WorkersFound(tuple(await self._ports.launcher.find())))
        timer = running.call_soon(mailbox.post, e.Tick())
        try:
            while end is None:
                event = await mailbox.take()
                if isinstance(event, e.Tick):
                    timer = running.call_later(TICK_SECONDS, mailbox.post, e.Tick())
                end = await self._handle(event)
        finally:
            timer.cancel()
            mailbox.close()
            await self._ports.keeper.close()
        return end

    async def _handle(self, event: e.Event) -> i.EndJob | None:
        now = self._clock()
        _log.debug("%s", event)
        if isinstance(event, e.ProgressReported):
            event = self._training.news(event)
        self._observer(event)
        milestones = self._training.observe(event, now)
        instructions = [*milestones, *self._job.step(event, now)]
        for instruction in instructions:
            if isinstance(instruction, _BEFOREHAND):
                await self._carry_out(instruction)
        weighty = isinstance(event, _WEIGHTY) or milestones or any(not isinstance(it, i.Record) for it in instructions)
        await self._ports.keeper.keep(changed=bool(weighty))
        end = None
        for instruction in instructions:
            if isinstance(instruction, i.EndJob):
                end = instruction
            elif not isinstance(instruction, _BEFOREHAND):
                await self._carry_out(instruction)
        return end

    async def _carry_out(self, instruction: i.Instruction) -> None:
        ports = self._ports
        match instruction:
            case i.AnnounceChange(ids) | i.BreakWorld(ids) | i.StopWorkers(ids):
                ports.sessions.send(ids, to_message(instruction))
            case i.PublishWorld(world, ids):
                ports.relay.begin_world(world.version, world.worker_ids)
                ports.world_formed(len(world.members))
                ports.sessions.send(ids, to_message(instruction))
                if len(ids) == 1:  # told again: it may also have missed entries
                    ports.relay.replay(ids[0])
            case i.AdoptWorld(world):
                ports.relay.begin_world(world.version, world.worker_ids)
                ports.world_formed(len(world.members))
            case i.DrainWorker(worker_id) | i.DumpStacks(worker_id):
                ports.sessions.send((worker_id,), to_message(instruction))
            case i.LaunchWorker(worker_id):
                await ports.launcher.launch(worker_id)
            case i.TerminateWorker(worker_id):
                ports.launcher.terminate(worker_id)
            case i.KillWorker(worker_id):
                ports.launcher.kill(worker_id)
            case i.Record(name, fields):
                ports.journal.append(name, fields)
