"""The training state of a Keras model.

Nothing of model or optimizer changes before the reduction of the whole step has succeeded, batch norm's statistics
included: a commit copies nothing but progress and the user's own values, and a torn step has nothing to undo.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.transfer import broadcast_state
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.learning_rate import LearningRate
from elasticdl.elastic.core.progress import Progress
from elasticdl.elastic.core.step_times import Activity
from elasticdl.elastic.core.vote import ENDED, LEAVING, LOSS, SAMPLES, STOPPING, VOTE_SIZE, Vote, mark
from elasticdl.elastic.keras.keras_job import ElasticContext
from elasticdl.elastic.keras.loader import ElasticDataLoader
from elasticdl.elastic.keras.step import SEED_NAME, MicroBatch, TrainStep
from elasticdl.elastic.training import state
from elasticdl.elastic.training.cursor import StepBatch
from elasticdl.elastic.training.pieces import Array, Marks, array_marks, as_array
from elasticdl.tensorflow import keras, tf

LEARNING_RATE = "optimizer.learning_rate"


class KerasState(state.TrainingState):
    """See `elasticdl.elastic.training.state.TrainingState`."""

    _remedy = "call state.accumulate(inputs, labels) exactly once for each micro-batch"
    _dump_to = staticmethod(pickle.dump)
    _load_from = staticmethod(pickle.load)
    _job: ElasticContext

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
        super().__init__(job, loader.sampler, values, start=start, has_state=has_state)
        self.model = train_step.model
        self.optimizer = train_step.optimizer
        self.train_step = train_step
        self.loader = loader
        self.begun_epoch = -1  # the last one that callbacks were told of
        self.before_load: Callable[[int], None] = _nothing  # told of the epoch that a state is in, which is loaded then
        self.callbacks_parts: Callable[[], Mapping[str, Any]] = dict  # what they keep, to be compared
        self._sums: tf.Tensor | None = None
        self._whole: tuple[Any, Any, MicroBatch] | None = None  # the step's only micro-batch, in a world of one
        self.save(p.SaveScope.AT_COMMIT)

    @property
    def learning_rate(self) -> float:
        """Of the next step, unless the rules (`follow`) or the optimizer's own schedule change it."""
        return float(self.optimizer.learning_rate)

    def warn(self, message: str) -> None:
        """Into this worker's log and the job's journal."""
        self._job.warn(message)

    # -- a step --

    def make_step(self, batch: StepBatch) -> float:
        """All of this worker's micro-batches, the reduction and the update; the mean loss over the global batch.

        Raises:
            WorldBroken: the step is torn; model and optimizer are untouched.
        """
        self._drop()
        for inputs, labels in batch:
            self.accumulate(inputs, labels)
        return self.update()

    def accumulate(self, inputs: Any, labels: Any) -> None:
        """Add the gradients of the present micro-batch to those of the step; once for each.

        If it is the whole global batch, `update` computes them: so they need not be handed from one function to another.
        """
        batch = self.loader.sampler.current
        if batch is None:
            raise RuntimeError("state.accumulate(inputs, labels): call it within `for batch in state.loader`")
        rank, number, size = self._job.world.rank, batch.micro_batch, batch.micro_batch_size
        part = MicroBatch(
            weight=size / batch.plan.batch,
            is_first=rank == number == 0,
            seed=batch.plan.seed,
            count=number,
            ballot=self._cast_vote(batch=None if number else self._batch_check.ballot(batch.plan), samples=size),
        )
        is_whole = self._job.world.size == 1 and size == batch.plan.batch
        if is_whole and self.train_step.has_whole and self._whole is None and self._sums is None:
            self._whole = (inputs, labels, part)
        else:
            self._add(inputs, labels, part)

    def update(self) -> float:
        """Sum over all workers, and update the model by the mean gradient over the global batch; returns the mean loss.

        Raises:
            WorldBroken: the step is torn; model and optimizer are untouched.
        """
        if self._whole is not None:
            whole, self._whole = self._whole, None
            self._before_update()
            self._voted(self._count_votes(self.train_step.whole(*whole)))
        else:
            self._job.advance(Activity.WAIT)
            sums = self._reduce()
            self._voted(self._count_votes(self.train_step.read_report(sums)))
            self._before_update()
            self.train_step.apply(sums)
        self._step_made()
        return self.loss

    def _cast_end_vote(self, state: int) -> Vote:
        self._drop()
        return self._count_votes(self.train_step.read_report(self._reduce(ended=True, state=state)))

    def _drop(self) -> None:
        self._sums = self._whole = None

    def _add(self, inputs: Any, labels: Any, part: MicroBatch) -> None:
        if self._whole is not None:  # one micro-batch too many, which the vote refuses
            before, self._whole = self._whole, None
            self._add(*before)
        sums = self.train_step.micro(inputs, labels, part)
        self._sums = sums if self._sums is None else self.train_step.add(self._sums, sums)

    def _cast_vote(
        self, *, batch: int | None, samples: int = 0, ended: bool = False, state: int | None = None
    ) -> list[float]:
        """``batch``: checksum of the global batch; None if this worker has told it with an earlier micro-batch. ``state``: of the
        training state, unless it is that of a step."""
        ballot = [0.0] * VOTE_SIZE
        if batch is not None:
            mark(ballot, batch, self._check.ballot() if state is None else state)
        ballot[LEAVING] = float(self._job.leaving)
        ballot[SAMPLES] = float(samples)
        ballot[ENDED] = float(ended)
        ballot[STOPPING] = float(self._wants_to_stop)
        return ballot

    def _reduce(self, *, ended: bool = False, state: int | None = None) -> tf.Tensor:
        sums, self._sums = self._sums, None
        if sums is None:
            batch = self.loader.sampler.current
            checksum = self._batch_check.ballot(batch.plan if batch is not None and not ended else None)
            sums = self.train_step.nothing(self._cast_vote(batch=checksum, ended=ended, state=state))
        return self._job.collective.sum(sums, "elasticdl.step")

    @staticmethod
    def _count_votes(report: Any) -> Vote:
        loss, *ballot = report[-1 - VOTE_SIZE :].tolist()
        ballot[LOSS] = loss * ballot[SAMPLES]
        return Vote.of(ballot)

    # -- the parts of a state --

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

    def begin_at(self, epoch: int) -> None:
        """Passes through the samples are counted from this epoch on; nothing was given of them yet."""
        sampler = self.loader.sampler
        sampler.order = self._position.order = replace(sampler.order, first_epoch=epoch)

    def _own_rate(self) -> float:
        return self.learning_rate

    def _set_rate(self, rate: float) -> None:
        if rate != self.learning_rate:  # the traced functions read it from its variable
            self.optimizer.learning_rate = rate

    def _dump_rest(self) -> dict[str, Any]:
        return {**super()._dump_rest(), "begun_epoch": self.begun_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before_load(state.get("begun_epoch", -1))
        super().load_state_dict(state)

    def _dump_own(self) -> dict[str, Any]:
        """Copies, as NumPy arrays in the order of the variables of model, optimizer and others."""
        return {name: [np.asarray(v.numpy()) for v in variables] for name, variables in self._variables().items()}

    def _load_own(self, state: dict[str, Any]) -> None:
        """Raises UserError if the state is of another model or optimizer; nothing was loaded."""
        held = {name: variables for name, variables in self._variables().items() if variables or state.get(name)}
        for name, variables in held.items():
            _require_same(name, variables, state.get(name, ()))
        for name, variables in held.items():
            for variable, value in zip(variables, state[name], strict=True):
                variable.assign(value)

    def _dump_settings(self) -> float | None:
        """None for a rate that follows from the optimizer's own schedule."""
        rate = self.optimizer.learning_rate
        return float(rate) if isinstance(rate, keras.Variable) else None

    def _load_settings(self, settings: float | None) -> None:
        if settings is not None:
            self._set_rate(settings)

    def _restore_own(self) -> None:
        self._drop()

    def _copy_tensor(self, value: Any, before: Any) -> Any:
        return value if isinstance(value, tf.Tensor) else None  # a tensor never changes

    def _broadcast(self) -> dict[str, Any]:
        own = {name: [_read(variable) for variable in given] for name, given in self._variables().items()}
        return broadcast_state({**self._dump_rest(), **own}, self._job.collective)

    def _broadcast_model(self, values: dict[str, Any]) -> dict[str, Any]:
        own = {name: [_read(variable) for variable in given] for name, given in self._variables().items()}
        return broadcast_state({**own, "values": values}, self._job.collective, to_all=True)

    def settings(self) -> Mapping[str, Any]:
        return {LEARNING_RATE: self._dump_settings()}

    def model_parts(self) -> Mapping[str, Any]:
        named = [
            (f"{kind}.{_path(variable)}", variable)
            for kind, variables in self._variables().items()
            for variable in variables
            if not (kind == "optimizer" and variable.path.endswith("/learning_rate"))
        ]
        # The seed of dropout's draws is no part of the state: each worker gives its micro-batches their own.
        held = [(name, variable) for name, variable in named if not name.endswith(SEED_NAME)]
        # Keras numbers layers by how many a process has made, which may be more on one worker.
        return {f"{re.sub('_[0-9]+', '', name)}#{i}": variable for i, (name, variable) in enumerate(held)}

    def other_parts(self) -> Mapping[str, Any]:
        return {**super().other_parts(), **self.callbacks_parts()}

    def marks_of(self, arrays: Sequence[Any]) -> Marks:
        return array_marks([self.host_array(each) for each in arrays])

    def host_array(self, value: Any) -> Array:
        if isinstance(value, keras.Variable | tf.Variable | tf.Tensor):
            return np.asarray(_read(value).numpy())
        return value if isinstance(value, np.ndarray) else as_array(value)

    def _variables(self) -> dict[str, list[Any]]:
        return {
            "model": list(self.model.variables),
            "optimizer": list(self.optimizer.variables),
            "captured": self.train_step.captured,
        }


def _nothing(_: int) -> None:
    """Nobody is to be told."""


def _path(variable: Any) -> str:
    return str(variable.name if isinstance(variable, tf.Variable) else variable.path)


def _read(variable: Any) -> tf.Tensor:
    """Of Keras, or of TensorFlow."""
    return tf.convert_to_tensor(variable.value if isinstance(variable, keras.Variable) else variable)


def _require_same(name: str, variables: Sequence[Any], values: Sequence[Any]) -> None:
    if len(variables) != len(values):
        raise UserError(
            f"the state is of another {name}: it has {len(values)} variables, and this one has {len(variables)}"
        )
    for variable, value in zip(variables, values, strict=True):
        if tuple(variable.shape) != tuple(value.shape):
            path = getattr(variable, "path", variable.name)
            raise UserError(
                f"the state is of another {name}: {path} has shape {tuple(variable.shape)}, and there it has "
                f"{tuple(value.shape)}"
            )
