"""What the trainer needs of a framework: a `Learner` has model, data, state and checkpoints; its `Driver` has the callbacks.

And which framework that is, who writes the checkpoints, and what the options say of batches and rates.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import pkgutil
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar, TypeVar

from elasticdl.callbacks import Callback, LearningRateScheduler
from elasticdl.common.errors import UserError
from elasticdl.common.reason import name_of, one_line, shown
from elasticdl.elastic.core.learning_rate import LearningRate
from elasticdl.elastic.core.plan import BatchPolicy, equal_shares, step_seed
from elasticdl.elastic.core.protocol import World
from elasticdl.elastic.link.session import Session
from elasticdl.elastic.training.checkpoint_store import Checkpoint, CheckpointStore
from elasticdl.elastic.training.cursor import ElasticLoader, seed_generators
from elasticdl.elastic.training.epochs import EpochLedger
from elasticdl.elastic.training.evaluation import Evaluation, Evaluator
from elasticdl.elastic.training.job import JobContext
from elasticdl.elastic.training.kept_state import load_saved
from elasticdl.elastic.training.state import TrainingState
from elasticdl.job.spec import TRAIN, JobSpec
from elasticdl.worker.zoo import ModelModule

# Batch sizes and rules for the learning rate, from the options of a job.

DEFAULT_MINIBATCH = 64


def batch_policy(spec: JobSpec) -> BatchPolicy:
    """Fixed global batch or fixed batch per worker, as the options have it. Without training a worker's batch is its part of a step."""
    if spec.task != TRAIN:
        micro_batch = spec.minibatch_size or DEFAULT_MINIBATCH
        return BatchPolicy(None, micro_batch * spec.num_minibatches_per_task, micro_batch)
    worker_batch = None if spec.global_batch_size else spec.minibatch_size or DEFAULT_MINIBATCH
    return BatchPolicy(spec.global_batch_size, worker_batch, spec.max_worker_batch_size)


def largest_micro_batch(spec: JobSpec, samples: int) -> int:
    """The most samples that a worker will run through the model at once."""
    policy = batch_policy(spec)
    share = equal_shares(policy.batch_size(1), spec.num_workers.minimum if policy.fixed else 1)[0]
    return min(share, policy.max_micro_batch or share, samples)


def rate_rules(spec: JobSpec, callbacks: Iterable[Callback]) -> LearningRate:
    """Of several `LearningRateScheduler`s the last one counts."""
    schedules = [callback.schedule for callback in callbacks if isinstance(callback, LearningRateScheduler)]
    rule = spec.learning_rate_scaling
    return LearningRate(
        schedules[-1] if schedules else None,
        scaling=None if rule == "none" else rule,
        ramp_steps=spec.learning_rate_ramp_steps,
    )


# Writes checkpoints beside the training.

log = logging.getLogger(__name__)

Dump = Callable[[IO[bytes]], object]  # writes a state that was copied before
Copy = Callable[[], Dump]  # copies the state as it is now; what it returns writes the copy

CHECKPOINT_THREAD = "elasticdl-checkpoint"


def open_store(spec: JobSpec, suffix: str) -> CheckpointStore | None:
    """The job's store; None without ``--checkpoint_dir``. Raises UserError if the place is unusable."""
    if not spec.checkpoint_dir:
        return None
    writer = f"{socket.gethostname()}-{os.getpid()}"
    return CheckpointStore(spec.checkpoint_dir, keep=spec.keep_checkpoint_max, writer=writer, suffix=suffix)


class CheckpointWriter:
    """At most one checkpoint is being written at a time, in a thread. A failure costs that checkpoint only."""

    def __init__(self, store: CheckpointStore, session: Session) -> None:
        self._store = store
        self._session = session
        self._thread: threading.Thread | None = None
        self._under_way = 0  # step
        self.written = 0  # step of the newest one that is whole

    def begin(self, step: int, copy: Copy, *, awaited: bool = False) -> bool:
        """Copy the state and write the copy in the background. False: left out, as the last one is not done.

        ``awaited``: nothing else is done meanwhile, so that writing holds training up as copying does.
        """
        if step in (self.written, self._under_way):
            return True  # training has come back to this step after a change of workers
        if self._thread is not None and self._thread.is_alive():
            log.warning("checkpoint of step %d left out: that of step %d is still being written", step, self._under_way)
            return False
        self._under_way = step
        began = time.monotonic()
        dump = copy()
        work = functools.partial(self._write, step, dump, time.monotonic() - began, awaited)
        self._thread = threading.Thread(target=work, name=CHECKPOINT_THREAD, daemon=True)
        self._thread.start()
        return True

    def wait(self, deadline: float, tick: Callable[[], None] = lambda: None) -> bool:
        """Until nothing is being written or the (monotonic) deadline has passed; ``tick`` is called each second."""
        while self._thread is not None and self._thread.is_alive():
            left = deadline - time.monotonic()
            if left <= 0:
                log.error("checkpoint of step %d was not finished in time", self._under_way)
                return False
            self._thread.join(timeout=min(left, 1.0))
            tick()
        return True

    def finish(self, step: int, copy: Copy, deadline: float, tick: Callable[[], None] = lambda: None) -> None:
        """See to it that the state of this step, the last, is written; waits for it."""
        if self.wait(deadline, tick) and self.written != step:
            self._under_way = 0  # if it has been tried, that has failed
            self.begin(step, copy, awaited=True)
            self.wait(deadline, tick)

    def _write(self, step: int, dump: Dump, held: float, awaited: bool) -> None:
        path = self._store.path(step)
        began = time.monotonic()
        try:
            self._store.write(step, dump)
        except Exception as error:  # noqa: BLE001 - whatever a storage raises must not end a training
            log.error("checkpoint %s could not be written: %s", path, one_line(error))
            self._session.notify("checkpoint_failed", step=step, path=path, reason=one_line(error))
            return
        self.written = step
        seconds = time.monotonic() - began
        log.info("checkpoint %s written in %.2f s", path, seconds)
        self._session.notify("checkpoint", step=step, path=path, seconds=seconds, held=held + awaited * seconds)


FORMAT = 3  # of checkpoints
REMEDY = "give another --checkpoint_dir"


@dataclass
class Ledger(EpochLedger):
    """What has been done once and must not be done again, whichever worker did it.

    Part of the training state: sent to newcomers, kept in checkpoints, and committed with steps only. Whether something
    is due is decided from this and the step alone, so that all members decide alike, and alike again when they come
    back to the same point after a change of workers: one that got through an evaluation in which another lost the world
    forgets it, and both do it again.
    """

    evaluation: dict[str, Any] = field(default_factory=dict)  # the last one: step, epoch, samples, metrics
    finished_epochs: int = 0

    @property
    def evaluated_step(self) -> int:
        return int(self.evaluation.get("step", 0))

    @property
    def metrics(self) -> dict[str, float]:
        """Of the last evaluation; empty before the first."""
        return dict(self.evaluation.get("metrics", {}))


@dataclass(frozen=True, slots=True)
class Codec:
    """How a framework's state is written."""

    suffix: str  # of its files
    copy: Callable[[Any], Any]  # of a nested state: training can't change the copy any more
    write: Callable[[Any, IO[bytes]], object]
    read: Callable[[IO[bytes]], Any]  # runs nothing that is in the file; raises anything, over a damaged one


class Driver:
    """What callbacks of all members do together; all call it at the same points. This one is for callbacks that have nothing to agree on.

    `WorldBroken` is raised if a member was lost meanwhile.
    """

    def enter(self, world: World) -> None:
        """In each world, before the members are brought to one state."""

    def agree(self) -> bool:
        """In each world, and at the end of each epoch: bring what the callbacks keep to one state; tell whether training is to stop here."""
        return False

    def stops_after_step(self) -> bool:
        """Whether a callback has wished so when it saw a step."""
        return False

    def complete(self) -> None:
        """All steps are made: the model is what is to be saved after this, once however often it is called."""


class Learner(ABC):
    """A model being trained, with its data, optimizer and state.

    Making one runs a warm-up pass: it takes long, and belongs before joining.
    """

    context_class: ClassVar[type[JobContext]]  # of which this worker's part in the job is one
    codec: ClassVar[Codec]
    state: TrainingState  # its values hold the ledger
    loader: ElasticLoader[Any]
    callbacks: list[Callback]  # those of the module, for the trainer to call
    driver = Driver()
    evaluator: Evaluator | None = None  # none without evaluation data

    def __init__(self, module: ModelModule, spec: JobSpec, context: JobContext, model: Any) -> None:
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

    def evaluate(self) -> Evaluation | None:
        """Over all members; None if there is no evaluation data."""
        return self.evaluator.evaluate() if self.evaluator else None

    def copy(self) -> Callable[[IO[bytes]], object]:
        """Copy everything that a training goes on from; what is returned writes the copy as a checkpoint."""
        codec = self.codec
        copied = {
            "format": FORMAT,
            "state": codec.copy(self.state.state_dict()),
            "origin": self.state.origin,
        }
        return lambda file: codec.write(copied, file)

    def resume(self) -> Checkpoint | None:
        """Load the newest checkpoint that can be read, and tell which; None if there are none at all.

        Raises:
            UserError: it is of another model or other data, or not one can be read.
        """
        readable = self.store.read_newest(self.read_checkpoint, REMEDY) if self.store is not None else None
        if readable is None:
            return None
        checkpoint, loaded = readable
        saved, it = loaded["state"], f"checkpoint {checkpoint.path}"
        load_saved(self.state, it, saved, loaded["origin"], self.state.load_state_dict, REMEDY)
        return checkpoint

    @classmethod
    def read_checkpoint(cls, file: IO[bytes]) -> dict[str, Any]:
        loaded = cls.codec.read(file)
        if not isinstance(loaded, dict) or loaded.get("format") != FORMAT:
            raise ValueError(f"not a checkpoint of format {FORMAT}")
        return loaded

    # -- what differs between frameworks --

    @staticmethod
    @abstractmethod
    def check(module: ModelModule, spec: JobSpec, model: Any) -> None:
        """Whether a worker could train this model.

        Raises:
            UserError: it could not; one line says why.
        """

    @classmethod
    @abstractmethod
    def evaluator_of(
        cls, module: ModelModule, spec: JobSpec, context: JobContext, model: Any, dataset: Any
    ) -> Evaluator:
        """For the job's task, over samples that are pairs (inputs, labels).

        Raises:
            UserError: the module does not keep the contract.
            Exception: whatever the user's code raises.
        """

    @abstractmethod
    def _make(self, module: ModelModule) -> None:
        """Make what the class names, from the module."""

    @abstractmethod
    def follow_rules(self) -> None:
        """Let the learning rate go by the options and the schedules among the callbacks."""

    @abstractmethod
    def make_step(self, batch: Any) -> float:
        """Forward, backward, reduction and update for one global batch, whose mean loss it returns."""

    @abstractmethod
    def save_model(self, folder: Path) -> Path:
        """Write the trained model below the folder."""


# Which framework a module is written for: found from the model that it makes, importing no other.

OptimizerT = TypeVar("OptimizerT")

# What of a framework can be known without importing it: a module below `elasticdl.worker`, and its learner.
TORCH = "torch_learner:TorchLearner"
KERAS = "keras_learner:KerasLearner"
FRAMEWORKS = ("torch", "keras", "tf_keras")  # as a message names them


def import_learner(framework: str) -> type[Learner]:
    """Imports the framework, too."""
    learner: type[Learner] = pkgutil.resolve_name(f"elasticdl.worker.{framework}")
    return learner


def build_model(module: ModelModule, seed: int) -> Any:
    """The module's model; every worker builds the same."""
    _seed(step_seed(seed, 0, 0))
    if "keras" in sys.modules or ("tensorflow" in sys.modules and "torch" not in sys.modules):
        # TensorFlow must hear of its devices before anything is built.
        importlib.import_module("elasticdl.elastic.keras.tensorflow_adapter").prepare_devices()
    return module.custom_model(**module.model_params)


def framework_of(model: Any, module: ModelModule) -> str:
    """Raises UserError if the model is of no framework that can be trained."""
    # A Keras model over PyTorch is a torch.nn.Module as well.
    if _is_a(model, "keras", "Model"):
        return KERAS
    if _is_a(model, "torch.nn", "Module"):
        return TORCH
    call = f"{shown(module.path)}: {name_of(module.custom_model)}()"
    if any(parent.__module__.startswith("tf_keras") for parent in type(model).__mro__):
        raise UserError(f"{call} returned a model of Keras 2; expected one of Keras 3: unset TF_USE_LEGACY_KERAS")
    raise UserError(f"{call} returned {type(model).__name__}; expected a torch.nn.Module or a keras.Model")


def make_optimizer(module: ModelModule, framework: str, kind: type[OptimizerT], **arguments: Any) -> OptimizerT:
    """What the module's ``optimizer`` returns when it is given these, by position."""
    call = f"{name_of(module.optimizer)}({', '.join(arguments)})"
    with module.blame(call):
        optimizer = module.optimizer(*arguments.values())
    if not isinstance(optimizer, kind):
        raise UserError(
            f"{shown(module.path)}: {call} returned {kind_of(optimizer)}; "
            f"expected a {'torch.optim' if framework == TORCH else 'keras.optimizers'}.Optimizer"
        )
    return optimizer


def kind_of(value: object) -> str:
    """A value's type in a message: with the framework that it comes from."""
    package = type(value).__module__.partition(".")[0]
    return f"{package}'s {type(value).__name__}" if package in FRAMEWORKS else type(value).__name__


def _is_a(value: object, module: str, name: str) -> bool:
    """As isinstance, with a type that can't be the value's as long as its module has not been imported."""
    found = getattr(sys.modules.get(module), name, None)
    return isinstance(found, type) and isinstance(value, found)


def _seed(value: int) -> None:
    """The global generators of all that the user's module has imported. Keras draws its seeds from Python's."""
    seed_generators(value)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(value)
    if tensorflow := sys.modules.get("tensorflow"):
        tensorflow.random.set_seed(value)
