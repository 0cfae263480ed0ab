"""The one task that owns the job's state: events go in through `post`, instructions are carried out here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from elasticdl.master import events as e
from elasticdl.master import instructions as i
from elasticdl.master.convert import to_message
from elasticdl.master.job import Job
from elasticdl.master.journal import Journal
from elasticdl.master.launchers.base import Launcher
from elasticdl.master.sessions import KeyValueRelay, Sessions
from elasticdl.master.status import Training
from elasticdl.master.steps import StepFilter

TICK_SECONDS = 0.1
_log = logging.getLogger(__name__)

Observer = Callable[[e.Event], None]


class Mailbox:
    """Where everybody leaves events, in order; only `Loop` takes them out."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[e.Event] = asyncio.Queue()

    def post(self, event: e.Event) -> None:
        self._events.put_nowait(event)

    async def take(self) -> e.Event:
        return await self._events.get()


@dataclass(frozen=True, slots=True)
class Ports:
    """What the loop acts through."""

    launcher: Launcher
    sessions: Sessions
    relay: KeyValueRelay
    journal: Journal
    world_formed: Callable[[int], None]  # told the size of each world


class Loop:
    def __init__(
        self, job: Job, ports: Ports, training: Training, observer: Observer, clock: Callable[[], float]
    ) -> None:
        self._job = job
        self._ports = ports
        self._training = training
        self._observer = observer
        self._clock = clock
        self._steps = StepFilter()

    async def run(self, mailbox: Mailbox) -> i.EndJob:
        """Until the job has ended. The first tick starts it."""
        running = asyncio.get_running_loop()
        timer = running.call_soon(mailbox.post, e.Tick())
        try:
            while True:
                event = await mailbox.take()
                if isinstance(event, e.Tick):
                    timer = running.call_later(TICK_SECONDS, mailbox.post, e.Tick())
                if end := await self._handle(event):
                    return end
        finally:
            timer.cancel()

    async def _handle(self, event: e.Event) -> i.EndJob | None:
        now = self._clock()
        _log.debug("%s", event)
        if isinstance(event, e.ProgressReported):
            event = self._steps.news(event)
        self._observer(event)
        end = None
        for instruction in [*self._training.observe(event, now), *self._job.step(event, now)]:
            if isinstance(instruction, i.EndJob):
                end = instruction
            else:
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
