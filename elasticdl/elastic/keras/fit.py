"""``fit`` on workers that come and go; scripts call it through `elasticdl.elastic.keras.models.Model`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import Progress
from elasticdl.elastic.core.protocol import World
from elasticdl.elastic.keras.driver import KerasDriver
from elasticdl.elastic.keras.fit_data import FitData, Samples
from elasticdl.elastic.keras.fit_stages import Stages
from elasticdl.elastic.keras.keras_state import KerasState
from elasticdl.elastic.keras.loader import ElasticContext, ElasticDataLoader, fetch, load
from elasticdl.elastic.keras.step import (
    ForwardScope,
    Sums,
    TrainStep,
    has_losses_of_batches,
    share_left,
)
from elasticdl.elastic.training.cursor import StepBatch
from elasticdl.elastic.training.data_facts import EVALUATION, Source
from elasticdl.elastic.training.epochs import EpochDriver, EpochLedger
from elasticdl.elastic.training.evaluation import from_root, my_batches, sum_of_all
from elasticdl.tensorflow import keras, tf

Deltas = list[NDArray[np.float64]]

ROUNDING = 1e-3  # of numbers in single precision that were summed in another order

log = logging.getLogger(__name__)


@dataclass
class FitLedger(EpochLedger):
    """With the changes of the metrics' variables since the beginning of the epoch."""

    deltas: Deltas = field(default_factory=list)

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self.deltas = []

    def add_deltas(self, deltas: Deltas) -> None:
        self.deltas = _added(self.deltas, deltas) if self.deltas else deltas


class FitStep(TrainStep):
    """As `TrainStep`; the changes of the metrics' variables stand in the report, before the loss.

    So metrics are over all samples of all workers, for all whose variables are sums over samples, as nearly all of
    Keras's. Loss and metrics are computed by the model's own public functions.
    """

    def __init__(self, model: keras.Model, inputs: Any, targets: Any, *, weighted: bool) -> None:
        """``model`` is built and compiled. ``inputs`` and ``targets`` are some samples: ``targets`` are the labels, or,
        if they are weighted, labels and weights."""
        self._weighted = weighted
        self._build(model, inputs, targets)
        self.last_deltas: Deltas = []
        variables = [variable for metric in model.metrics for variable in metric.variables]
        counted = [(variable, np.array(variable)) for variable in variables]
        super().__init__(model, model.compute_loss, model.optimizer, counted)
        self._test = tf.function(self._trace_test, reduce_retracing=True, autograph=False)

    def test(self, inputs: Any, targets: Any, *, weighted: bool) -> Deltas:
        """Of a batch that is not trained on: the loss times the share of elements that it is a mean over, that share, and
        the changes of the metrics."""
        return [np.asarray(value, np.float64) for value in self._test(inputs, *_split(targets, weighted))]

    def logs(self, loss: float, deltas: Sequence[Any]) -> dict[str, Any]:
        """As ``fit`` reports them: the loss, and each metric by its name."""
        if not deltas:
            return {"loss": loss}
        for (variable, first), delta in zip(self.counted, deltas, strict=True):
            variable.assign(first + delta)
        found = {name: _plain(value) for name, value in self.model.get_metrics_result().items()}
        self.model.reset_metrics()
        return {**found, "loss": loss}

    def _build(self, model: keras.Model, inputs: Any, targets: Any) -> None:
        """Loss and metrics make their variables when they are first called."""
        labels, weights = _split(targets, self._weighted)
        with keras.StatelessScope():
            outputs = model(inputs, training=False)
        model.compute_loss(inputs, labels, outputs, weights)
        model.compute_metrics(inputs, labels, outputs, weights)
        model.reset_metrics()
        require_sums(model.metrics, lambda: model.compute_metrics(inputs, labels, outputs, weights))

    def _forward(self, scope: ForwardScope, inputs: Any, labels: Any) -> tuple[tf.Tensor, tf.Tensor | None]:
        return self._compute(scope, (inputs, *_split(labels, self._weighted)), training=True)

    def _compute(
        self, scope: ForwardScope, batch: tuple[Any, Any, Any], *, training: bool
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """As `_forward`, on inputs, labels and weights."""
        model, (inputs, labels, weights) = self.model, batch
        with scope:
            outputs = model(inputs, **dict.fromkeys(self._training, training))
            loss = tf.reduce_mean(model.compute_loss(inputs, labels, outputs, weights))
            share = share_left(outputs, loss, more_losses=has_losses_of_batches(model))
            model.compute_metrics(inputs, labels, outputs, weights)
        return loss, share

    def _trace_test(self, inputs: Any, labels: Any, weights: Any) -> Sums:
        self.traces["test"] += 1
        trainable = [tf.convert_to_tensor(variable.value) for variable in self.model.trainable_variables]
        others = [tf.convert_to_tensor(variable.value) for variable in self.model.non_trainable_variables]
        scope = self._scope(trainable, others)
        loss, share = self._compute(scope, (inputs, labels, weights), training=False)
        left = tf.ones_like(loss) if share is None else tf.cast(share, loss.dtype)
        return [loss * left, left, *self._changes(scope)]

    def _read(self, report: Any) -> Any:
        report = super()._read(report)
        firsts = [first for _, first in self.counted]
        cuts = np.split(report.astype(np.float64), np.cumsum([first.size for first in firsts]))
        self.last_deltas = [part.reshape(first.shape) for part, first in zip(cuts, firsts, strict=False)]
        return report


def require_sums(metrics: Sequence[Any], update: Callable[[], object]) -> None:
    """Raises UserError if a metric is no sum over batches: what steps and workers make of it can't be put together.

    ``update`` has all metrics see the same batch.
    """
    single = [inner for metric in metrics for inner in (getattr(metric, "metrics", None) or [metric])]
    variables = [(metric, each) for metric in single for each in metric.variables]
    with keras.StatelessScope([(each, each.value) for _, each in variables]) as scope:
        seen = []
        for _ in range(3):
            seen.append([np.asarray(scope.get_current_value(each), np.float64) for _, each in variables])
            update()
    for (metric, variable), begun, once, twice in zip(variables, *seen, strict=True):
        if not np.allclose(twice - begun, 2 * (once - begun), rtol=ROUNDING, atol=0, equal_nan=True):
            raise UserError(
                f"the metric {metric.name} ({type(metric).__name__}) can't be put together from steps and workers: its variable "
                f"{variable.name} is no sum over batches; keep sums in it, or compute it in a callback"
            )


def _split(targets: Any, weighted: bool) -> tuple[Any, Any]:
    return targets if weighted else (targets, None)


def _plain(value: Any) -> Any:
    array = np.asarray(value)
    return array.tolist() if array.ndim else float(array)


def _added(totals: Deltas, more: Sequence[Any]) -> Deltas:
    return [total + each for total, each in zip(totals, more, strict=True)]


@dataclass(frozen=True, slots=True)
class FitCall:
    """What ``fit`` was given; ``callbacks`` with the history among them."""

    data: FitData
    callbacks: Sequence[keras.callbacks.Callback]
    epochs: int
    initial_epoch: int
    verbose: int
    shuffle: bool
    validation_freq: int | Container[int]
    steps_per_epoch: int | None = None  # of a pass through the samples, or what is left of it

    def validates(self, epoch: int) -> bool:
        """Whether there is a validation at the end of this epoch, counted from 0."""
        if isinstance(self.validation_freq, Container):
            return epoch + 1 in self.validation_freq
        return (epoch + 1) % self.validation_freq == 0


class FitState(KerasState):
    """Of one call of ``fit``."""

    def require_jobs_facts(self) -> None:
        """In which of the script's calls of `fit` the job is, and which epochs it makes, is known in a world only."""


class Fit(EpochDriver[FitLedger]):
    """One call of ``fit``."""

    state: FitState

    def __init__(self, context: ElasticContext, stages: Stages, model: keras.Model, given: FitCall) -> None:
        training, validation = given.data.training, given.data.validation
        self._stages, self._start, self._given = stages, stages.progress, given
        self._first_epoch = given.initial_epoch
        inputs, targets = load(training.dataset, np.arange(min(2, len(training))))
        self._step = FitStep(model, inputs, targets, weighted=training.weighted)
        context.warm_up(self._step, inputs, targets)
        loader = ElasticDataLoader(
            context,
            training.dataset,
            shuffle=given.shuffle,
            steps_per_epoch=given.steps_per_epoch or 0,
        )
        ledger = FitLedger()
        start = replace(stages.progress, epoch=given.initial_epoch, position=0)
        state = FitState(context, self._step, loader, {"ledger": ledger}, start=start, has_state=stages.has_state)
        if validation is not None:
            state.sources.append(Source.of(EVALUATION, validation.dataset))
        super().__init__(context, loader, state, ledger, epochs=given.epochs)
        steps = loader.sampler.order.remaining_steps(Progress(given.initial_epoch), context.size)
        self.driver = KerasDriver(
            context, state, given.callbacks, epochs=given.epochs, steps=steps, verbose=given.verbose
        )
        if stages.present > 1:
            state.cannot_be_kept = f"a script that begins anew does not come to fit() number {stages.present} by itself"

    def before_sync(self, world: World) -> None:
        self._stages.meet(self._context.collective)
        # Rank 0's: a script may begin where a checkpoint says, and the job has written one since.
        mine = [self._first_epoch, self._epochs]
        self._first_epoch, self._epochs = from_root(self._context.collective, mine, "elasticdl.epochs")
        self.driver.params["epochs"] = self._epochs
        self.driver.enter(world, began=self.state.step > self._start.step)

    def on_world(self, world: World) -> None:
        self._tell_totals()
        self._stopping = self.driver.agree()

    def _begin_epoch(self, epoch: int) -> None:
        self.driver.on_epoch_begin(epoch)
        self._tell(2 * (epoch - self._first_epoch) + 2)

    def _make_step(self, batch: StepBatch) -> float:
        return self.driver.make_step(batch) if self.driver.sees_steps else self.state.make_step(batch)

    def _after_step(self, loss: float) -> None:
        self._ledger.add_deltas(self._step.last_deltas)
        if self.driver.sees_steps:
            self.driver.after_step(self._logs())

    def _stops_after_step(self) -> bool:
        return self.driver.may_stop_after_step and self.driver.stops_after_step()

    def _end_epoch(self, epoch: int) -> None:
        logs = self._logs()
        if not self._stopping:  # else it was left before its end
            self._tell(2 * (epoch - self._first_epoch) + 3)
        validation = self._given.data.validation
        if validation is not None and self._given.validates(epoch):
            with self.driver.testing() as found:
                began = time.monotonic()
                found.update(self._validate(validation))
                self._tell_validation(epoch, len(validation), found, time.monotonic() - began)
            logs.update({f"val_{name}": value for name, value in found.items()})
        self.driver.on_epoch_end(epoch, logs)
        self._stopping = self.driver.agree() or self._stopping
        self._context.resume_clock()

    def _complete(self) -> None:
        self.driver.complete()

    def _tell(self, count: int) -> None:
        """Let the data set that is trained on have heard of so many hooks."""
        self.state.loader.close()
        self._given.data.training.tell(count, self._context.seed)

    # -- logs --

    def _logs(self) -> dict[str, Any]:
        return self._step.logs(self._ledger.epoch_loss, self._ledger.deltas)

    def _validate(self, data: Samples) -> dict[str, Any]:
        """Over all members, each on a contiguous share, each sample once."""
        context = self._context
        sums: Deltas = [np.zeros(shape) for shape in ((), (), *(first.shape for _, first in self._step.counted))]
        share = my_batches(
            context, len(data), context.policy.most_at_once, lambda batches: fetch(data.dataset, batches)
        )
        with closing(share):
            for rows, inputs, targets in share:
                loss, left, *deltas = self._step.test(inputs, targets, weighted=data.weighted)
                sums = _added(sums, (loss * rows, left * rows, *deltas))
        loss, left, *deltas = sum_of_all(context, sums, "elasticdl.validation")
        return self._step.logs(float(loss) / (float(left) or 1.0), deltas)

    def _tell_validation(self, epoch: int, samples: int, found: dict[str, Any], seconds: float) -> None:
        if self._context.rank == 0:
            numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
            about = {"step": self.state.step, "epoch": epoch, "samples": samples}
            self._context.tell_work("evaluation", **about, metrics=numbers, seconds=seconds)
