"""What a worker says to its master; on the wire these are the messages of `proto/elasticdl.proto`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticdl.job.shared_values import StepReport as StepReport
from elasticdl.job.shared_values import StepTimes

# Characters. What the master keeps of a job has to fit into one object of a cluster, and each worker may fail.
MOST_OF_MESSAGE = 500
MOST_OF_TRACEBACK = 20_000


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of each session. ``rank``, ``size``: in the world that the worker is in; 0 in none."""

    world_version: int
    step: int
    rank: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    world_version: int
    step: int
    progress: int  # grows with everything that the worker does
    waiting: bool  # in a collective
    times: StepTimes | None = None
    ending: bool = False  # its training function has returned


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """The worker is in no world (any more) and ready for the next."""

    left_world: int
    step: int
    has_state: bool
    broken: bool
    reason: str
    epoch: int
    synced_in: int  # version of the world in which it last stood where rank 0 stood


@dataclass(frozen=True, slots=True)
class Draining:
    """The worker was told to leave. ``lingers``: it stays until another member has its state, or the master says that others have."""

    reason: str
    lingers: bool = False


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """An entry of the store by which the members of a world find each other."""

    world_version: int
    scope: str
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class StepReports:
    steps: tuple[StepReport, ...]
    total_steps: int
    total_epochs: int


@dataclass(frozen=True, slots=True)
class Pause:
    """Seconds without training on one survivor of a change of workers, split by what they went into.

    ``first_step`` is by what the first step took longer than an ordinary one before: with more workers for the same
    global batch it may well be shorter, and is then zero.
    """

    world_version: int
    kind: str  # grow, shrink or failure
    notice: float
    drain: float
    rendezvous: float
    init: float
    sync: float
    first_step: float
    steps_torn: int
    number: int = 0  # as the stream to the master counts what must not be lost

    @property
    def total(self) -> float:
        return self.notice + self.drain + self.rendezvous + self.init + self.sync + self.first_step


@dataclass(frozen=True, slots=True)
class Notice:
    """For the job's journal: ``event`` and its fields as in `elasticdl.job.event_catalogue`."""

    event: str
    fields: Mapping[str, Any]
    number: int = 0  # as the stream to the master counts what must not be lost


@dataclass(frozen=True, slots=True)
class Finished:
    """Training is complete. ``together``: on all members of the worker's world."""

    step: int
    epochs: int
    metrics: Mapping[str, float]
    together: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker can't go on. ``users``: the user's code raised, and no other worker would do better. ``trained``: this worker
    has made a step of the job; the core fills it in."""

    users: bool
    message: str
    traceback: str
    trained: bool = False


Message = Hello | Heartbeat | JoinRequest | Draining | StoreEntry | StepReports | Pause | Notice | Finished | Failed


def failed(message: str, traceback: str, *, users: bool) -> Failed:
    """Of the message only the first line is told."""
    line = _shortened(message.strip().partition("\n")[0], MOST_OF_MESSAGE) or "no reason was given"
    return Failed(users, line, _shortened(traceback, MOST_OF_TRACEBACK))


def _shortened(text: str, most: int) -> str:
    """Without its middle if it is longer."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters left out) ... {text[-half:]}"
