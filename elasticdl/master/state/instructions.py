"""What the core wants done.

The loop carries instructions out in the order of the list, and answers none; what comes of them returns as events. What
follows `SaveState` is carried out only once the state is saved, so that a successor can't contradict it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticdl.job.shared_values import Pace, StepReport
from elasticdl.master.state.learnt import Learnt
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


# ---- to workers, over their sessions; lost if a worker has none ----


@dataclass(frozen=True, slots=True)
class AnnounceChange(Instruction):
    """Finish your step, leave together, ask for the next world."""

    worker_ids: tuple[int, ...]
    world_version: int
    reason: str


@dataclass(frozen=True, slots=True)
class BreakWorld(Instruction):
    """A member is gone: leave at once."""

    worker_ids: tuple[int, ...]
    world_version: int
    reason: str


@dataclass(frozen=True, slots=True)
class PublishWorld(Instruction):
    """Tell the world to ``worker_ids``: its members, or one of them again after it reconnected."""

    world: World
    worker_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DrainWorker(WorkerInstruction):
    """Tell the worker to leave."""


@dataclass(frozen=True, slots=True)
class StopWorkers(Instruction):
    worker_ids: tuple[int, ...]
    reason: str
    checkpoint: bool


@dataclass(frozen=True, slots=True)
class DumpStacks(Instruction):
    worker_id: int


@dataclass(frozen=True, slots=True)
class TellLearnt(Instruction):
    """Whichever worker writes the next checkpoint puts this into it."""

    worker_ids: tuple[int, ...]
    json: str


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
class ReadLog(Instruction):
    """Find out what a worker that runs without a session has printed last; `StacksFound` tells."""

    worker_id: int


@dataclass(frozen=True, slots=True)
class KillWorker(WorkerInstruction):
    """End the process and its children now; a worker without a place is taken off the list."""


# ---- to the journal and the observers ----


@dataclass(frozen=True, slots=True)
class Recall(Instruction):
    """What an earlier job has learnt, from whose checkpoint this one goes on."""

    learnt: Learnt


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


# These come before `SaveState`: a successor need not know of them, and workers wait for some.
UNSAVED = (
    AnnounceChange,
    BreakWorld,
    DumpStacks,
    ReadStacks,
    ReadLog,
    Record,
    NewSteps,
    TellLearnt,
    Recall,
)
