"""What the core wants done.

The loop carries instructions out in the order of the list, and answers none; what comes of them returns as events. What
follows `SaveState` is carried out only once the state is saved, so that a successor can't contradict it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticdl.job import messages
from elasticdl.job.shared_values import Pace, StepReport
from elasticdl.master.state.values import Outcome as Outcome
from elasticdl.master.state.values import Phase as Phase
from elasticdl.master.state.values import World as World


@dataclass(frozen=True, slots=True)
class Instruction:
    """Something to be done."""


@dataclass(frozen=True, slots=True)
class WorkerInstruction(Instruction):
    """Something to be done with one worker."""

    worker_id: int
    reason: str


# ---- to workers ----


@dataclass(frozen=True, slots=True)
class Tell(Instruction):
    """Say this to each of them, over its session; lost if it has none. A world is told to its members, or to one of them again
    after it reconnected."""

    to: tuple[int, ...]
    message: World | messages.Order


# ---- to the store ----


@dataclass(frozen=True, slots=True)
class SaveState(Instruction):
    """What a successor must know has changed: save `Job.snapshot` before anything else is done."""


# ---- to the edge's own record of the world ----


@dataclass(frozen=True, slots=True)
class AdoptWorld(Instruction):
    """This world goes on under a new master; its members know it."""

    world: World


# ---- to the launcher ----


@dataclass(frozen=True, slots=True)
class LaunchWorker(WorkerInstruction):
    """It has never been launched before. ``away_from``: nodes to avoid, if there are others."""

    away_from: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TerminateWorker(WorkerInstruction):
    """Ask the process to end (SIGTERM); for workers that have no session to be told over."""


@dataclass(frozen=True, slots=True)
class ReadStacks(Instruction):
    """Find out where a worker stands that does not answer; `StacksFound` tells."""

    worker_id: int


@dataclass(frozen=True, slots=True)
class KillWorker(WorkerInstruction):
    """End the process and its children now; a worker without a place is taken off the list."""


# ---- to the journal and the observers ----


@dataclass(frozen=True, slots=True)
class NewSteps(Instruction):
    """Steps that were not reported before."""

    steps: tuple[StepReport, ...]
    pace: Pace


@dataclass(frozen=True, slots=True)
class Record(Instruction):
    """An entry for the journal; `elasticdl.job.event_catalogue` names them."""

    event: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EndJob(Instruction):
    """All workers are gone and nothing more will happen."""

    phase: Phase
    reason: str
    traceback: str = ""


_UNSAVED = (ReadStacks, Record, NewSteps)
_UNSAVED_MESSAGES = (messages.Change, messages.Broken, messages.DumpStacks, messages.Learnt)


def is_unsaved(instruction: Instruction) -> bool:
    """Whether it comes before `SaveState`: a successor need not know of it, and workers wait for some."""
    if isinstance(instruction, Tell):
        return isinstance(instruction.message, _UNSAVED_MESSAGES)
    return isinstance(instruction, _UNSAVED)
