"""The training state of a Keras model.

Nothing of model or optimizer changes before the reduction of the whole step has succeeded, batch norm's statistics
included: a commit copies nothing but progress and the user's own values, and a torn step has nothing to undo.

And the variables that it is made of.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.transfer import broadcast_state
from elasticdl.elastic.core.learning_rate import LearningRate
from elasticdl.elastic.core.plan import Progress
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.core.training_step import ENDED, LEAVING, LOSS, SAMPLES, STOPPING, VOTE_SIZE, Vote, mark
from elasticdl.elastic.keras.loader import ElasticContext, ElasticDataLoader
from elasticdl.elastic.keras.step import SEED_NAME, Part, TrainStep
from elasticdl.elastic.training import state
from elasticdl.elastic.training.attributes import Arrays, Attributes, Holder, is_scripts_own
from elasticdl.elastic.training.cursor import StepBatch
from elasticdl.elastic.training.pieces import Array, Local, Piece, Settings, Tensors, Trained, array_marks, as_array
from elasticdl.tensorflow import keras, tf

# The pieces of a training state of Keras'.


class Variables(Trained):
    """Some variables, dumped as NumPy arrays in their order."""

    def __init__(self, name: str, variables: Callable[[], Sequence[Any]]) -> None:
        self.name = name
        self._variables = variables

    def dump(self) -> list[Array]:
        return [np.asarray(variable.numpy()) for variable in self._variables()]

    def sent(self) -> list[tf.Tensor]:
        return [_read(variable) for variable in self._variables()]

    def load(self, dumped: Sequence[Any]) -> None:
        """Raises:
        UserError: they are of another model or optimizer.
        """
        variables = self._variables()
        if len(variables) != len(dumped):
            counts = f"it has {len(dumped)} variables, and this one has {len(variables)}"
            raise UserError(f"the state is of another {self.name}: {counts}")
        for variable, value in zip(variables, dumped, strict=True):
            if tuple(variable.shape) != tuple(value.shape):
                path = getattr(variable, "path", variable.name)
                shapes = f"{path} has shape {tuple(variable.shape)}, and there it has {tuple(value.shape)}"
                raise UserError(f"the state is of another {self.name}: {shapes}")
            variable.assign(value)

    def missing(self) -> None:
        self.load([])

    def compared(self) -> Mapping[str, Any]:
        every = [(f"{self.name}.{_path(each)}", each) for each in self._variables()]
        # The learning rate is a setting. The seed of dropout's draws is no part of the state: each worker gives its micro-batches their own.
        shared = [
            (name, each)
            for name, each in every
            if not name.endswith(SEED_NAME) and not (self.name == "optimizer" and name.endswith("/learning_rate"))
        ]
        return {f"{_without_number(name)}#{number}": each for number, (name, each) in enumerate(shared)}


class RateSetting(Settings):
    """The learning rate of an optimizer; None if it follows from the optimizer's own schedule."""

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self._optimizer = optimizer

    def dump(self) -> float | None:
        return self.rate if isinstance(self._optimizer.learning_rate, keras.Variable) else None

    def load(self, dumped: float | None) -> None:
        if dumped is not None:
            self.set_rate(dumped)

    def told(self) -> Mapping[str, Any]:
        return {"optimizer.learning_rate": self.dump()}

    @property
    def rate(self) -> float:
        """Of the next step, unless the rules (`follow`) or the optimizer's own schedule change it."""
        return float(self._optimizer.learning_rate)

    def own_rate(self) -> float:
        return self.rate

    def set_rate(self, rate: float) -> None:
        if rate != self.rate:  # the traced functions read it from its variable
            self._optimizer.learning_rate = rate


class LayerAttributes(Local):
    """What layers of the script's own keep beside variables, and a forward pass may read: it is compared, and stays each worker's own."""

    name = "attributes"

    def __init__(self, model: keras.Model) -> None:
        of_keras = frozenset({*vars(keras.Model()), "history"})  # which Keras sets at the end of an epoch
        self._attributes = Attributes(lambda: _holders(model, of_keras), Arrays(), lambda _: None)

    def compared(self) -> Mapping[str, Any]:
        return self._attributes.compared()


def _holders(model: keras.Model, of_keras: frozenset[str]) -> Iterator[Holder]:
    found, seen = [model], set[int]()
    for layer in found:  # which grows meanwhile
        kind: Any = type(layer)
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        found += [
            *getattr(layer, "layers", ()),
            *(each for each in vars(layer).values() if isinstance(each, keras.Layer)),
        ]
        if is_scripts_own(kind):
            name = f"{kind.__name__} {_without_number(layer.name)}#{len(seen)}"
            # Names that begin so are Keras's and TensorFlow's, which set some only when a layer is called.
            private = {each for each in vars(layer) if each.startswith("_")}
            yield Holder(name, name, layer, of_keras | private, is_of_model=True)


def _without_number(name: str) -> str:
    """Keras numbers layers by how many a process has made, which may be more on one worker."""
    return re.sub("_[0-9]+", "", name)


def tensors_of(job: ElasticContext) -> Tensors:
    return Tensors(
        lambda arrays: array_marks([_host_array(each) for each in arrays]),
        _host_array,
        lambda dumped, **to_all: broadcast_state(dumped, job.collective, **to_all),
        pickle.dump,
        pickle.load,
    )


def _host_array(value: Any) -> Array:
    if isinstance(value, keras.Variable | tf.Variable | tf.Tensor):
        return np.asarray(_read(value).numpy())
    return value if isinstance(value, np.ndarray) else as_array(value)


def _path(variable: Any) -> str:
    return str(variable.name if isinstance(variable, tf.Variable) else variable.path)


def _read(variable: Any) -> tf.Tensor:
    """Of Keras, or of TensorFlow."""
    return tf.convert_to_tensor(variable.value if isinstance(variable, keras.Variable) else variable)


OTHER_VARIABLES = "the models of the workers have different variables, or train different ones: make the model alike on all, and freeze its layers alike"


class KerasState(state.TrainingState):
    """See `elasticdl.elastic.training.state.TrainingState`."""

    _remedy = "call state.make_step(batch) once for each batch"
    _job: ElasticContext

    def _shapes(self) -> dict[str, str]:
        return {each.path: f"{each.dtype} {tuple(each.shape)}" for each in self.model.weights}

    def __init__(
        self,
        job: ElasticContext,
        train_step: TrainStep,
        loader: ElasticDataLoader,
        values: dict[str, Any],
        *,
        start: Progress | None = None,
        has_state: bool = False,
    ) -> None:
        setting = RateSetting(train_step.optimizer)
        super().__init__(job, tensors_of(job), setting, loader.sampler, values, start=start, has_state=has_state)
        self.model = train_step.model
        self.optimizer = train_step.optimizer
        self.train_step = train_step
        self.loader = loader
        self._agreed = -1  # version of the world whose members have found that they train the same variables
        self._hold(
            Variables("model", lambda: self.model.variables),
            Variables("optimizer", lambda: self.optimizer.variables),
            Variables("captured", lambda: train_step.captured),
            LayerAttributes(self.model),
        )

    def hold_first(self, piece: Piece) -> None:
        """It is loaded before all else, as it may set other parts."""
        self._hold(piece, *self._framework_pieces)

    # -- a step --

    def make_step(self, batch: StepBatch) -> float:
        """All of this worker's micro-batches, the reduction and the update; the mean loss over the global batch.

        Raises:
            WorldBroken: the step is torn; model and optimizer are untouched.
        """
        step = self.train_step
        if self._job.world.size == 1 and len(batch.plan.micro_batches) == 1 and step.has_whole:
            ((inputs, labels),) = batch
            part = self._part(batch)
            self._before_update()
            self._voted(self._count_votes(step.whole(inputs, labels, part)))
        else:
            mine = self._sum(batch)
            self._job.advance(Activity.WAIT)
            sums = self._reduce(mine)
            self._voted(self._count_votes(step.read_report(sums)))
            self._before_update()
            step.apply(sums)
        self._step_made()
        return self.loss

    def _cast_end_vote(self, state: int) -> Vote:
        mine = self.train_step.nothing(self._cast_vote((0, state), ended=True))
        return self._count_votes(self.train_step.read_report(self._reduce(mine)))

    def _sum(self, batch: StepBatch) -> tf.Tensor:
        """Of this worker's micro-batches, which may be none."""
        sums = None
        for inputs, labels in batch:
            more = self.train_step.micro(inputs, labels, self._part(batch))
            sums = more if sums is None else self.train_step.add(sums, more)
        return self.train_step.nothing(self._cast_vote(self._check.ballot(batch.plan))) if sums is None else sums

    def _part(self, batch: StepBatch) -> Part:
        """The present micro-batch."""
        number, size = batch.micro_batch, batch.micro_batch_size
        return Part(
            weight=size / batch.plan.batch,
            is_first=self._job.world.rank == number == 0,
            seed=batch.plan.seed,
            count=number,
            ballot=self._cast_vote(None if number else self._check.ballot(batch.plan), samples=size),
        )

    def _cast_vote(self, checksums: tuple[int, int] | None, *, samples: int = 0, ended: bool = False) -> list[float]:
        """``checksums``: of batch and state; None if this worker has told them with an earlier micro-batch."""
        ballot = [0.0] * VOTE_SIZE
        if checksums is not None:
            mark(ballot, *checksums)
        ballot[LEAVING] = float(self._job.leaving)
        ballot[SAMPLES] = float(samples)
        ballot[ENDED] = float(ended)
        ballot[STOPPING] = float(self._wants_to_stop)
        return ballot

    def _reduce(self, sums: tf.Tensor) -> tf.Tensor:
        """Over all members."""
        if self._agreed != self._job.world.version and self._job.world.size > 1:
            self._check.require_one(self.train_step.trained, OTHER_VARIABLES)
            self._agreed = self._job.world.version
        return self._job.collective.sum(sums, "elasticdl.step")

    @staticmethod
    def _count_votes(report: Any) -> Vote:
        loss, *ballot = report[-1 - VOTE_SIZE :].tolist()
        ballot[LOSS] = loss * ballot[SAMPLES]
        return Vote.of(ballot)

    # -- rate and epochs --

    def follow(self, rules: LearningRate) -> None:
        """As `TrainingState.follow`. Without any rule the rate is the optimizer's own affair, which may have a schedule.

        Raises:
            UserError: the rules don't fit the batch policy, or the optimizer has a schedule of its own beside them.
        """
        if rules.schedule is None and rules.scaling is None:
            return
        if not isinstance(self.optimizer.learning_rate, keras.Variable):
            raise UserError(
                f"the learning rate of {self.optimizer.name} is a schedule of the optimizer's own, which can't be combined "
                "with a scheduling callback or scaling by workers: give the optimizer a number"
            )
        super().follow(rules)
