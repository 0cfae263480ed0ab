"""The simulator's only knowledge of how masters and workers are put together around their cores.

A master's core is in the real `elasticdl.master.shell.loop.Loop`: what is decided, what may be done before it is saved,
and in which order, is the loop's. Only its two tasks are replaced, since a simulation has no threads and no asyncio.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast
from unittest.mock import patch

from elasticdl.job.spec import WorkerRange
from elasticdl.master.core import events as e
from elasticdl.master.core import sizing
from elasticdl.master.core.job_core import Job
from elasticdl.master.core.sizing import MeasuredSteps, Observation
from elasticdl.master.core.values import Settings
from elasticdl.master.core.worker_record import JobSnapshot, Snapshot
from elasticdl.master.shell.calls import Mailbox, Sessions
from elasticdl.master.shell.journal_file import Journal
from elasticdl.master.shell.loop import Loop, NoStore, StateSaver
from elasticdl.master.shell.observers import Observer
from elasticdl.places.base import Launcher
from tests.simulation.job_invariants import check_job
from tests.simulation.trace import Silent

HEARTBEAT_SECONDS = 0.4
HEARTBEAT_TIMEOUT = 2.0
LINGER_SECONDS = 1.5


def make_settings(workers: WorkerRange, *, policy: bool = False, folder: bool = True) -> Settings:
    """Timeouts in proportion to a step of some 40 ms. ``folder``: all workers see one."""
    return Settings(
        workers,
        scale_policy="efficiency" if policy else "all",
        min_efficiency=0.6,
        join_window=0.1,
        start_timeout=6.0,
        heartbeat_timeout=HEARTBEAT_TIMEOUT,
        progress_timeout=4.0,
        stop_grace=3.0,
        recovery_timeout=4.0,
        image="" if folder else "of pods",
    )


class MasterCore:
    """What the loop takes for its `Job`."""

    def __init__(self, settings: Settings, snapshot: JobSnapshot | None, watch: Callable[..., None]) -> None:
        self.job = Job(settings, snapshot)
        self.watch = watch

    def step(self, event: e.Event, now: float) -> list[e.Instruction]:
        instructions = self.job.step(event, now)
        check_job(self.job)
        self.watch(event, instructions)
        return instructions

    def snapshot(self) -> JobSnapshot:
        return self.job.snapshot()

    @property
    def target(self) -> int:
        """Workers that the policy wants; 0 without one."""
        return self.job.snapshot().target


@contextmanager
def impatient(draw: random.Random, measures: Callable[[], bool]) -> Iterator[None]:
    """The policy for the number of workers forgets within a moment what did not pay. As long as it ``measures``, how the job scales
    is something else each time."""

    def observations(steps: MeasuredSteps, now: float) -> tuple[Observation, ...]:
        found, does = [], 1.0
        for workers in range(1, 9):
            if workers == steps.workers or draw.random() < 0.4:
                found.append(Observation(workers, 8, 1.0 / (workers * does)))
            does *= draw.choice((1.0, 0.9, 0.5))
        return tuple(found)

    enough = property(lambda steps: steps.workers > 0 and measures())
    with (
        patch.multiple(sizing, FIRST_BACKOFF=0.1, NEXT_BACKOFF=0.3, SHORT=0.0, FIRST_SECONDS=0.05, LONGEST_SECONDS=0.8),
        patch.multiple(MeasuredSteps, enough=enough, observations=observations),
    ):
        yield


class SaveRequest:
    """What the loop waits for where something must be saved first."""

    def __init__(self, make: Callable[[], Snapshot]) -> None:
        self.make = make
        self.done = False

    def add_done_callback(self, callback: object) -> None:
        """Nobody waits for this one."""


Save = Callable[[SaveRequest], None]


class _Saver:
    store = NoStore()

    def __init__(self, save: Save) -> None:
        self._save = save

    def save(self, make: Callable[[], Snapshot]) -> SaveRequest:
        request = SaveRequest(make)
        self._save(request)
        return request


Act = e.Instruction | SaveRequest | Callable[[], None]


class LoopDriver:
    """The real loop without its tasks."""

    def __init__(
        self, core: MasterCore, sessions: Sessions, launcher: Launcher, save: Save, clock: Callable[[], float]
    ) -> None:
        def snapshot() -> Snapshot:
            return Snapshot(core.snapshot(), 0.0)

        journal, saver = cast(Journal, Silent()), cast(StateSaver, _Saver(save))
        self._loop = Loop(cast(Job, core), Mailbox(), launcher, sessions, journal, saver, Observer(), clock, snapshot)
        self._acts = cast("asyncio.Queue[Act]", self._loop.pending)
        self.decide = self._loop.decide

    def put(self, mark: Callable[[], None]) -> None:
        """To be called when all that was decided before is done."""
        self._acts.put_nowait(mark)

    def next_act(self) -> Act | None:
        return None if self._acts.empty() else self._acts.get_nowait()

    def act(self, instruction: e.Instruction) -> None:
        coroutine = self._loop.act(instruction)
        try:
            coroutine.send(None)
        except StopIteration:
            return
        raise AssertionError("an act of the loop waits for something")
