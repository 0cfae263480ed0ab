"""What training needs of a framework: `Learner`, which each framework fills in, and what it keeps beside the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar

from elasticdl.callbacks import Callback
from elasticdl.common.spec import JobSpec
from elasticdl.elastic.core.world import World
from elasticdl.elastic.training.context import JobContext
from elasticdl.elastic.training.epochs import EpochLedger
from elasticdl.elastic.training.sampler import ElasticLoader
from elasticdl.elastic.training.state import TrainingState
from elasticdl.worker.checkpoint import Checkpoint, open_store
from elasticdl.worker.evaluation import Evaluation, Evaluator
from elasticdl.worker.resume import Codec, Origin, content, load_newest
from elasticdl.worker.zoo import ModelModule


@dataclass
class Ledger(EpochLedger):
    """What has been done once and must not be done again, whichever worker did it.

    Part of the training state: sent to newcomers, kept in checkpoints, and committed with steps only. Whether something
    is due is decided from this and the step alone, so that all members decide alike, and alike again when they come
    back to the same point after a change of workers: one that got through an evaluation in which another lost the world
    forgets it, and both do it again.
    """

    evaluation: dict[str, Any] = field(default_factory=dict)  # the last one: step, epoch, samples, metrics
    checkpointed_step: int = 0
    finished_epochs: int = 0

    @property
    def evaluated_step(self) -> int:
        return int(self.evaluation.get("step", 0))

    @property
    def metrics(self) -> dict[str, float]:
        """Of the last evaluation; empty before the first."""
        return dict(self.evaluation.get("metrics", {}))


class Learner(ABC):
    """A model being trained, with its data, optimizer and state.

    Making one runs a warm-up pass: it takes long, and belongs before joining.
    """

    context_class: ClassVar[type[JobContext[Any]]]  # of which this worker's part in the job is one
    codec: ClassVar[Codec]
    state: TrainingState  # its values hold the ledger
    loader: ElasticLoader[Any]
    callbacks: list[Callback]  # those of the module, for the trainer to call
    evaluator: Evaluator | None = None  # none without evaluation data

    def __init__(self, module: ModelModule, spec: JobSpec, context: JobContext[Any], model: Any) -> None:
        """Raises:
        UserError: the module does not keep the contract.
        Exception: whatever the user's code raises.
        """
        self._spec = spec
        self._context = context
        self._model = model
        self.ledger = Ledger()
        self.store = open_store(spec, self.codec.suffix)
        self._make(module)

    @property
    def _origin(self) -> Origin:
        return Origin(self.loader.sampler.order.samples, self._spec.seed, self._spec.shuffle)

    def evaluate(self) -> Evaluation | None:
        """Over all members; None if there is no evaluation data.

        Raises:
            WorldBroken: a member was lost meanwhile.
        """
        return self.evaluator.evaluate() if self.evaluator else None

    def resume(self) -> Checkpoint | None:
        """Load the newest checkpoint, and tell which; None if there is none.

        Raises:
            UserError: it is of another model, or there are some and none can be read.
        """
        found = load_newest(self.store, self.state, self._origin, self.codec) if self.store else None
        if found is None:
            return None
        self._load_extra(found.extra)
        return found.checkpoint

    def copy(self) -> Callable[[IO[bytes]], object]:
        """Copy the state; what is returned writes the copy as a checkpoint."""
        return content(self.state, self._origin, self.codec, self._extra())

    # -- what differs between frameworks --

    @staticmethod
    @abstractmethod
    def check(module: ModelModule, spec: JobSpec, model: Any) -> None:
        """Whether a worker could train this model.

        Raises:
            UserError: it could not; one line says why.
        """

    @abstractmethod
    def _make(self, module: ModelModule) -> None:
        """Make what the class names, from the module."""

    @abstractmethod
    def follow_rules(self) -> None:
        """Let the learning rate go by the options and the schedules among the callbacks."""

    @abstractmethod
    def make_step(self, batch: Any) -> float:
        """Forward, backward, reduction and update for one global batch, whose mean loss it returns.

        Raises:
            WorldBroken: the step is torn.
        """

    @abstractmethod
    def save_model(self, folder: Path) -> Path:
        """Write the trained model below the folder."""

    # -- for callbacks that keep something, or stop the training --

    def enter(self, world: World) -> None:  # noqa: B027
        """In each world, before the members are brought to one state."""

    def agree(self, *, entering: bool) -> bool:
        """Bring what the callbacks of all members keep to one state; tell whether training is to stop here.

        All members call it at the same points: on ``entering`` a world, and at the end of each epoch.

        Raises:
            WorldBroken: a member was lost meanwhile.
        """
        return False

    def complete(self) -> None:  # noqa: B027
        """All steps are made: the model is what is to be saved after this, once however often it is called."""

    def _extra(self) -> dict[str, Any]:
        """What a checkpoint holds besides the state."""
        return {}

    def _load_extra(self, extra: dict[str, Any]) -> None: ...  # noqa: B027
