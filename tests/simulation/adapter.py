"""The simulator's only knowledge of how masters and workers are put together around their cores.

A master's core is in the real `elasticdl.master.service.loop.Loop`: what is decided, what may be done before it is saved,
and in which order, is the loop's. Only its two tasks are replaced, since a simulation has no threads and no asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast
from unittest.mock import patch

from elasticdl.common.spec import WorkerRange
from elasticdl.master.core import events as e
from elasticdl.master.core import instructions as i
from elasticdl.master.core.job import Job
from elasticdl.master.core.snapshot import JobSnapshot, Snapshot
from elasticdl.master.core.values import Settings
from elasticdl.master.launchers.base import Launcher
from elasticdl.master.observers.journal_file import Journal
from elasticdl.master.observers.observer import Observer
from elasticdl.master.service.loop import PATIENCE as PATIENCE
from elasticdl.master.service.loop import Loop, Mailbox, Ports
from elasticdl.master.service.saver import StateSaver
from elasticdl.master.service.sessions import Sessions

HEARTBEAT_SECONDS = 0.4
HEARTBEAT_TIMEOUT = 2.0


def make_settings(workers: WorkerRange) -> Settings:
    """Timeouts in proportion to a step of some 40 ms."""
    return Settings(
        workers,
        join_window=0.1,
        start_timeout=6.0,
        heartbeat_timeout=HEARTBEAT_TIMEOUT,
        progress_timeout=4.0,
        stop_grace=3.0,
        recovery_timeout=4.0,
    )


class MasterCore:
    """What the loop takes for its `Job`."""

    def __init__(self, settings: Settings, snapshot: JobSnapshot | None) -> None:
        self.job = Job(settings, snapshot)
        self.watch: Callable[[e.Event, Sequence[i.Instruction]], None] | None = None

    def step(self, event: e.Event, now: float) -> list[i.Instruction]:
        instructions = self.job.step(event, now)
        self.job.validate()
        if self.watch is not None:
            self.watch(event, instructions)
        return instructions

    def snapshot(self) -> JobSnapshot:
        return self.job.snapshot()


# Instructions that a person who follows a history need not see.
QUIET_INSTRUCTIONS = (i.Record, i.SaveState, i.NewSteps)


@contextmanager
def publishing_unsaved() -> Iterator[None]:
    """A planted fault: worlds are published before they are saved."""
    real = MasterCore.step

    def step(core: MasterCore, event: e.Event, now: float) -> list[i.Instruction]:
        return sorted(real(core, event, now), key=lambda each: not isinstance(each, i.PublishWorld))

    with patch.object(MasterCore, "step", step):
        yield


class SaveRequest:
    """What the loop waits for where something must be saved first."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.done = False

    def add_done_callback(self, callback: object) -> None:
        """Nobody waits for this one."""


class _Saver:
    def __init__(self, save: Callable[[SaveRequest], None]) -> None:
        self._save = save

    def save(self, snapshot: Snapshot) -> SaveRequest:
        request = SaveRequest(snapshot)
        self._save(request)
        return request


class _Journal:
    def append(self, event: str, fields: Mapping[str, Any]) -> None:
        """Nobody reads it."""


Act = i.Instruction | SaveRequest | Callable[[], None]


class LoopDriver:
    """The real loop without its tasks."""

    def __init__(
        self,
        core: MasterCore,
        sessions: Sessions,
        launcher: Launcher,
        save: Callable[[SaveRequest], None],
        clock: Callable[[], float],
    ) -> None:
        def wrap(state: JobSnapshot) -> Snapshot:
            return Snapshot(state, 0.0)

        journal, saver = cast(Journal, _Journal()), cast(StateSaver, _Saver(save))
        ports = Ports(launcher, sessions, journal, saver, Observer(), clock, wrap)
        self._loop = Loop(cast(Job, core), ports, Mailbox())
        self._acts = cast("asyncio.Queue[Act]", self._loop.pending)

    def decide(self, event: e.Event) -> None:
        self._loop.decide(event)

    def put(self, mark: Callable[[], None]) -> None:
        """To be called when all that was decided before is done."""
        self._acts.put_nowait(mark)

    def next_act(self) -> Act | None:
        return None if self._acts.empty() else self._acts.get_nowait()

    def act(self, instruction: i.Instruction) -> None:
        coroutine = self._loop.act(instruction)
        try:
            coroutine.send(None)
        except StopIteration:
            return
        raise AssertionError("an act of the loop waits for something")
