"""What training needs of a framework: the port between `elasticdl.worker.trainer` and the learner of each framework."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, TypeAlias, TypeVar

from elasticdl.callbacks import Callback
from elasticdl.elastic.core.world import World
from elasticdl.elastic.training.context import JobContext
from elasticdl.elastic.training.sampler import DataCursor, StepBatch
from elasticdl.elastic.training.state import TrainingState
from elasticdl.worker.checkpoint import Checkpoint, CheckpointStore

Dump = Callable[[IO[bytes]], object]  # writes a state that was copied before

BatchT = TypeVar("BatchT", bound=StepBatch)
BatchT_co = TypeVar("BatchT_co", bound=StepBatch, covariant=True)

Context: TypeAlias = JobContext[Any]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics over the whole evaluation set; the same on all members."""

    samples: int
    metrics: dict[str, float]


class Loader(Protocol[BatchT_co]):
    """Gives the batches of each step from where training stands."""

    @property
    def sampler(self) -> DataCursor: ...

    def epochs(self, count: int) -> Iterator[int]:
        """Epochs from the present one up to ``count``, the first perhaps partly done."""

    def __iter__(self) -> Iterator[BatchT_co]: ...


class Learner(Protocol[BatchT]):
    """A model being trained."""

    @property
    def state(self) -> TrainingState:
        """Its values hold the ledger."""

    @property
    def loader(self) -> Loader[BatchT]: ...

    @property
    def callbacks(self) -> Sequence[Callback]:
        """Those of the module, for the trainer to call."""

    @property
    def store(self) -> CheckpointStore | None:
        """Where checkpoints are kept, if they are."""

    def follow(self, callbacks: Sequence[Callback]) -> None:
        """Let the learning rate go by the options and the schedules among the callbacks."""

    def make_step(self, batch: BatchT) -> float:
        """Forward, backward, reduction and update for one global batch, whose mean loss it returns.

        Raises:
            WorldBroken: the step is torn.
        """

    def evaluate(self) -> Evaluation | None:
        """Over all members; None if there is no evaluation data.

        Raises:
            WorldBroken: a member was lost meanwhile.
        """

    def enter(self, world: World) -> None:
        """In each world, before the members are brought to one state."""

    def settle(self, *, entering: bool) -> bool:
        """Bring what the callbacks of all members keep to one state; tell whether training is to stop here.

        All members call it at the same points: on ``entering`` a world, and at the end of each epoch.

        Raises:
            WorldBroken: a member was lost meanwhile.
        """

    def complete(self) -> None:
        """All steps are made: the model is what is to be saved after this, once however often it is called."""

    def resume(self) -> Checkpoint | None:
        """Load the newest checkpoint, and tell which; None if there is none.

        Raises:
            UserError: it is of another model, or there are some and none can be read.
        """

    def copy(self) -> Dump:
        """Copy the state; what is returned writes the copy as a checkpoint."""

    def save_model(self, folder: Path) -> Path:
        """Write the trained model below the folder."""
