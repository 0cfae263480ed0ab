"""What can happen to a job, and what its core then wants done.

Sessions, launchers, timers and commands only make these; `elasticdl.master.core.job_core.Job.step` alone acts on them. Any
event may come late, twice or out of order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from elasticdl.job import messages
from elasticdl.job.messages import Message, Pace, StepReport
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core.values import Phase, World


class ExitCause(StrEnum):
    """Why a worker's process is gone. A launcher reports what it saw; the last three are the fleet's judgement."""

    CLEAN = "clean"  # it ended by itself with exit code 0
    CRASHED = "crashed"  # a non-zero exit code, or a signal of its own making (SIGSEGV, SIGABRT)
    OUT_OF_MEMORY = "out_of_memory"  # it took more memory than it may
    KILLED = "killed"  # ended from outside, by a signal or by the launcher that was told to: SIGKILL, SIGTERM
    PREEMPTED = "preempted"  # its place was given to something more urgent
    EVICTED = "evicted"  # its node was drained or ran short of something
    NODE_LOST = "node_lost"  # its node is gone or does not answer
    DELETED = "deleted"  # somebody else than the launcher took it away
    LOST = "lost"  # while there was no master, so nobody has seen why
    DRAINED = "drained"  # it was told to leave
    FROZEN = "frozen"  # the master had given it up
    FINISHED = "finished"  # its training was complete


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""


@dataclass(frozen=True, slots=True)
class WorkerEvent(Event):
    """Something that happened to one worker, or that it said."""

    worker_id: int


# ---- from a worker's session ----


@dataclass(frozen=True, slots=True)
class FromWorker(WorkerEvent):
    """It has said this. `Hello`: a session began, or began anew."""

    said: Message


@dataclass(frozen=True, slots=True)
class WorkerDisconnected(WorkerEvent):
    """The session ended, for whatever reason. The process may be alive or not."""


# ---- from a launcher ----


@dataclass(frozen=True, slots=True)
class FoundWorker:
    """A worker that an earlier master launched; without a host it has no place yet."""

    worker_id: int
    host: str = ""
    pid: int = 0
    over: bool = False  # its process has ended; a WorkerExited follows
    node: str = ""
    place: str = ""  # the id of that in which it is, or was


@dataclass(frozen=True, slots=True)
class WorkersFound(Event):
    """The workers that were there when this master started, also those that have ended. Always the first event."""

    workers: tuple[FoundWorker, ...]


@dataclass(frozen=True, slots=True)
class WorkerPending(WorkerEvent):
    """This worker can't run yet, and the launcher goes on trying. ``node``: where its place is, if it only has to start."""

    reason: str
    node: str = ""


@dataclass(frozen=True, slots=True)
class WorkerPlaced(WorkerEvent):
    """The worker's process has been started. ``node``: of a cluster, on which it is. ``place``: the id of that in which it is."""

    host: str
    pid: int
    node: str = ""
    place: str = ""


@dataclass(frozen=True, slots=True)
class WorkerExited(WorkerEvent):
    """The worker's process is gone. With code 0 it ended by itself, even if it was told to.

    ``output`` is the end of what it printed. ``node``: of a cluster, on which it was, or which has refused it.
    """

    cause: ExitCause
    code: int
    detail: str = ""
    output: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True)
class StacksFound(WorkerEvent):
    """The answer to `ReadStacks`. ``text``: has the dump that the worker left, if any. ``state``: in words, if
    the process can't run, or why nothing is known. ``has_session``: the worker runs, left no dump, and believes that it has a
    session."""

    text: str
    state: str = ""
    has_session: bool = False


@dataclass(frozen=True, slots=True)
class LauncherFailed(Event):
    """No worker of this job can be started, now or later; ``reason`` is one line that says what is to be mended."""

    reason: str


# ---- from the store ----


@dataclass(frozen=True, slots=True)
class StateSaveStalled(Event):
    """The state could not be saved yet. Saving is tried again, and what follows it waits, until there is no ``problem``."""

    problem: str


# ---- from commands and timers ----


@dataclass(frozen=True, slots=True)
class ScaleRequested(Event):
    workers: WorkerRange


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    reason: str
    checkpoint: bool = True
    now: bool = False


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time has passed."""


# What the core wants done.
#
# The loop carries instructions out in the order of the list, and answers none; what comes of them returns as events. What
# follows `SaveState` is carried out only once the state is saved, so that a successor can't contradict it.


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
    """An entry for the journal; `elasticdl.job.journal` names them."""

    event: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EndJob(Instruction):
    """All workers are gone and nothing more will happen."""

    phase: Phase
    reason: str
    traceback: str = ""


_UNSAVED = (ReadStacks, Record, NewSteps)
_UNSAVED_MESSAGES = (messages.Change, messages.Broken, messages.DumpStacks)


def is_unsaved(instruction: Instruction) -> bool:
    """Whether it comes before `SaveState`: a successor need not know of it, and workers wait for some."""
    if isinstance(instruction, Tell):
        return isinstance(instruction.message, _UNSAVED_MESSAGES)
    return isinstance(instruction, _UNSAVED)
