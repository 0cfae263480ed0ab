"""The course of a history in lines for people: without heartbeats and steps, unless they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from elasticdl.elastic.core import protocol as p
from elasticdl.job import messages as m
from elasticdl.master.core import events as e
from tests.simulation.clock import Clock

if TYPE_CHECKING:
    from tests.simulation.masters import Master
    from tests.simulation.process import Process

_QUIET_EVENTS, _QUIET_INSTRUCTIONS = (e.Tick, m.Heartbeat, m.Progress), (e.Record, e.SaveState, e.NewSteps)
_LONGEST = 150


class Silent:
    """In the place of whom nobody listens to: it takes whatever it is told."""

    clock: Clock

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given, **named: None


class Trace:
    def __init__(self, *, steps: bool = False) -> None:
        self.lines: list[str] = []
        self.clock = Clock()
        self._steps = steps

    def note(self, text: str) -> None:
        self._add("", text)

    def event(self, process: Process, event: p.Event) -> None:
        quiet = isinstance(event, p.Welcomed) or event is p.Trigger.TICK
        if not (quiet or (isinstance(event, p.Said) and isinstance(event.message, m.KvPut))):
            self._tell(process, event)

    def step(self, process: Process, what: str) -> None:
        if self._steps:
            self._tell(process, what)

    def order(self, process: Process, instruction: p.Instruction) -> None:
        self._add(f"worker {process.name}", f"  -> {instruction}")

    def decision(self, master: Master, event: e.Event, instructions: Sequence[e.Instruction]) -> None:
        if not isinstance(event.said if isinstance(event, e.FromWorker) else event, _QUIET_EVENTS):
            self._add(f"master {master.generation}", str(event))
        for instruction in instructions:
            if not isinstance(instruction, _QUIET_INSTRUCTIONS):
                self._add(f"master {master.generation}", f"  -> {instruction}")

    def _tell(self, process: Process, what: p.Event | str) -> None:
        step = process.core.position.progress.step
        self._add(f"worker {process.name}", f"{process.core.state}, step {step}: {what}")

    def _add(self, actor: str, text: str) -> None:
        text = text.replace("'", "").replace("world_version=", "world=")
        cut = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
        self.lines.append(f"{self.clock.now:8.3f}  {actor:9} {cut}")
