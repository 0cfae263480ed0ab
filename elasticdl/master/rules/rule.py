"""What a rule is: it is made with the job that it may see, looks at it with each tick, and says what is to be done.

| rule | question |
| --- | --- |
| `elasticdl.master.rules.watching` | who is silent, late or stuck, and who is given up for it |
| `elasticdl.master.rules.slowness` | who holds the others up, and who is replaced for it |
| `elasticdl.master.rules.sizing` | how many workers pay, and what other jobs of the queue are told |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from elasticdl.job.spec import WorkerRange
from elasticdl.master.rules.progress_limits import ProgressLimits
from elasticdl.master.state.instructions import Instruction
from elasticdl.master.state.records_by_state import Records
from elasticdl.master.state.rendezvous import Rendezvous
from elasticdl.master.state.training import Training
from elasticdl.master.state.values import Settings
from elasticdl.master.state.worker_record import WorkerRecord


class Seen(Protocol):
    """What a rule may see of the job."""

    settings: Settings
    limits: WorkerRange  # as they are now
    records: Records
    rendezvous: Rendezvous
    training: Training
    progress_limits: ProgressLimits


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Kill this worker, and replace it."""

    worker: WorkerRecord
    reason: str


@dataclass(frozen=True, slots=True)
class Replace:
    """Let this worker leave, and another take its place. ``first``: it stays until that one is ready."""

    worker: WorkerRecord
    reason: str
    first: bool = False


@dataclass(frozen=True, slots=True)
class LetGo:
    """Let this worker leave: another is there in its place."""

    worker: WorkerRecord
    reason: str


@dataclass(frozen=True, slots=True)
class LeaveWorld:
    """Let all members leave their world, and form the next."""

    cause: str


Act = Instruction | GiveUp | Replace | LetGo | LeaveWorld


class Rule(Protocol):
    """A rule remarks on workers in their records. Whatever else is to change, it says by an act."""

    def look(self, now: float) -> Iterable[Act]:
        """Called with each tick, until it is decided how the job ends. An act is done before the next is asked for."""
