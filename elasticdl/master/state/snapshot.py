"""What a master must know to take the place of another.

It is saved outside of the master (`elasticdl.master.shell.saver`) before anything is done that a successor must know
of. Where the training stands is not in it: workers know that, and tell. Fields with ``compare=False`` may be a
little old without harm, so a snapshot that differs only in these equals the one before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from elasticdl.common.errors import first_finding
from elasticdl.job.spec import WorkerRange
from elasticdl.master.state.crashes import Crashes
from elasticdl.master.state.learnt import Learnt
from elasticdl.master.state.states import WorkerState
from elasticdl.master.state.values import Outcome, Phase, World

# Raised only if an older master would misunderstand what is written. A field may be added, with a default: a master that does not
# know it ignores it, and a master that misses it takes the default. A test keeps what the first version of this format wrote.
FORMAT = 2


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """Of a worker whose process is not known to be gone. The name ``processes`` is reserved: how many a worker has, by default 1."""

    worker_id: int
    state: WorkerState
    reason: str
    world_version: int = 0
    ready: bool = False
    failure: str = ""
    place: str = ""  # the id of that in which it is, as far as it is known


@dataclass(slots=True)
class TrainingSnapshot:
    """The numbers that are shown, and which steps are in them."""

    epochs_done: int = 0
    begun: bool = False  # a step was made, whether or not anybody still holds what came of it
    epoch: int = field(default=0, compare=False)
    epoch_steps: int = field(default=0, compare=False)  # of this epoch, as far as they were seen
    total_epochs: int = field(default=0, compare=False)
    step: int = field(default=0, compare=False)
    total_steps: int = field(default=0, compare=False)
    samples: int = field(default=0, compare=False)
    loss: float = field(default=math.nan, compare=False)
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)
    collective: str = field(default="", compare=False)  # what sums gradients
    diverged: bool = field(default=False, compare=False)
    counted: int = field(default=0, compare=False)  # the last step whose loss is in the sum
    epoch_loss: tuple[float, int] = field(default=(0.0, 0), compare=False)  # sum over samples, and their number
    newest: tuple[int, int] = field(default=(0, 0), compare=False)  # world and step of the last report taken
    # The step after which the workers' states were compared last, and of how many they were one.
    compared_step: int = field(default=0, compare=False)
    compared_workers: int = field(default=0, compare=False)
    marks: Mapping[int, float] = field(default_factory=dict, compare=False)  # of the model, at the beginning of epochs


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """The state of the core."""

    limits: WorkerRange
    next_id: int = 0
    finished: tuple[int, ...] = ()  # whether their processes are gone or not
    together: bool = False  # the members of the world said that all of them have finished
    world: World | None = None  # the last; perhaps nobody has heard of it
    phase: Phase = Phase.PENDING
    outcome: Outcome | None = None
    training: TrainingSnapshot = field(default_factory=TrainingSnapshot)
    workers: tuple[WorkerSnapshot, ...] = field(default=(), compare=False)
    crashes: Crashes = field(default=Crashes(), compare=False)
    target: int = 0  # workers that the policy wants; 0 if there is none
    learnt: Learnt = field(default=Learnt(), compare=False)


@dataclass(frozen=True, slots=True)
class UnwrittenSteps:
    """Steps that this state counts, and the journal does not tell yet. ``joined``: its next entry, as far as it has come."""

    joined: Mapping[str, Any] | None = None
    ordinary: float = 0.0  # seconds of a step, as the last entry has them


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one master leaves to the next. With the journal of the same moment it is the whole truth: nothing in it happens
    again under the next master, and what came later is told again by those who know it."""

    job: JobSnapshot
    started: float  # when the first master of the job did; seconds since the epoch
    generation: int = 1  # how many masters the job has had, this one included
    taken: Mapping[int, int] = field(default_factory=dict)  # by worker: the number of its last message that was taken
    steps: UnwrittenSteps = UnwrittenSteps()
    journal_bytes: int | None = None  # length of the journal at this moment; None: all that there is

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **_ADAPTER.dump_python(self, mode="json")})

    @classmethod
    def from_json(cls, text: str) -> Snapshot:
        """
        Raises:
            ValueError: this is no snapshot, or one of another version of this package; one line.
        """
        content = json.loads(text)
        found = content.pop("format", None) if isinstance(content, dict) else None
        if found != FORMAT:
            raise ValueError(f"a snapshot has format {FORMAT}, not {found}: another version of elasticdl wrote it")
        try:
            return _ADAPTER.validate_python(content)
        except ValidationError as error:
            raise ValueError(f"snapshot: {first_finding(error)}") from None


_ADAPTER = TypeAdapter(Snapshot)
