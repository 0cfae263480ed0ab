"""What a master must remember so that another can take its place.

Where the training stands is not in it: workers know that, and tell. It is kept outside of the master
(`elasticdl.master.service.saver`), each time before anything is done that a successor must know of. Two memories are equal if
it does no harm to have the older one: what only grows, and what is seen or told again, is not compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from pydantic import TypeAdapter

from elasticdl.common.spec import WorkerRange
from elasticdl.master.core.instructions import Outcome, Phase, World
from elasticdl.master.core.workers import WorkerState


@dataclass(frozen=True, slots=True)
class CrashSnapshot:
    at_start: int = 0  # in a row, by workers that had reached no world
    in_training: int = 0
    last_step: int = 0


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    worker_id: int
    state: WorkerState
    reason: str
    reached_world: bool = False
    failure: str = ""
    ready: bool = False


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    next_id: int = 0
    finished: tuple[int, ...] = ()  # whether they are gone or not
    crashes: CrashSnapshot = field(default=CrashSnapshot(), compare=False)
    workers: tuple[WorkerSnapshot, ...] = field(default=(), compare=False)


NO_FLEET = FleetSnapshot()


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """Of the core."""

    limits: WorkerRange
    fleet: FleetSnapshot = NO_FLEET
    world: World | None = None  # the last; nobody may have heard of it
    phase: Phase = Phase.PENDING
    outcome: Outcome | None = None
    step: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class TrainingSnapshot:
    """Of the numbers that are shown, and of the steps that are in them."""

    epochs_done: int = 0
    epoch: int = field(default=0, compare=False)
    total_epochs: int = field(default=0, compare=False)
    step: int = field(default=0, compare=False)
    total_steps: int = field(default=0, compare=False)
    samples: int = field(default=0, compare=False)
    loss: float = field(default=math.nan, compare=False)
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)
    diverged: bool = field(default=False, compare=False)
    counted: int = field(default=0, compare=False)
    epoch_loss: tuple[float, int] = field(default=(0.0, 0), compare=False)
    newest: tuple[int, int] = field(default=(0, 0), compare=False)  # world and step of the last report taken


@dataclass(frozen=True, slots=True)
class Snapshot:
    job: JobSnapshot
    training: TrainingSnapshot
    started: float  # when the first master of the job did; seconds since the epoch

    def without_workers(self, gone: Collection[int]) -> Snapshot:
        """Of an older memory, when it is known by other means who has gone since."""
        workers = tuple(worker for worker in self.job.fleet.workers if worker.worker_id not in gone)
        return replace(self, job=replace(self.job, fleet=replace(self.job.fleet, workers=workers)))

    def to_json(self) -> str:
        return json.dumps(_ADAPTER.dump_python(self, mode="json"))

    @classmethod
    def from_json(cls, text: str) -> Snapshot:
        """
        Raises:
            ValueError: this is no memory, or one of another version of this package.
        """
        return _ADAPTER.validate_python(json.loads(text))


_ADAPTER = TypeAdapter(Snapshot)
