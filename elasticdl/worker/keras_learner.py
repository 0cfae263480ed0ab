"""The Keras side of a training: optimizer, data and state for the model of a model-zoo module."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from elasticdl.callbacks import Callback, Logs
from elasticdl.common.errors import UserError
from elasticdl.common.reason import name_of, one_line, shown
from elasticdl.elastic.collectives.opening import require_collective
from elasticdl.elastic.core.plan import Progress
from elasticdl.elastic.keras.driver import KerasDriver, refuse_needless
from elasticdl.elastic.keras.keras_evaluator import KerasEvaluator, name_metrics
from elasticdl.elastic.keras.keras_state import KerasState
from elasticdl.elastic.keras.loader import ElasticContext, ElasticDataLoader, load
from elasticdl.elastic.keras.step import LossFunction, TrainStep, widen
from elasticdl.elastic.keras.tensorflow_adapter import TensorFlowTensors, require_backend
from elasticdl.elastic.training import plain_data
from elasticdl.elastic.training.cursor import StepBatch
from elasticdl.elastic.training.data_facts import EVALUATION, Source
from elasticdl.elastic.training.evaluation import Evaluation
from elasticdl.elastic.training.job import JobContext
from elasticdl.elastic.training.kept_state import aside
from elasticdl.job.spec import EVALUATE, JobSpec
from elasticdl.tensorflow import keras, tf
from elasticdl.worker.learner import (
    KERAS,
    Codec,
    Driver,
    Learner,
    kind_of,
    largest_micro_batch,
    make_optimizer,
    rate_rules,
)
from elasticdl.worker.zoo import (
    OWN_CALLBACKS,
    Datasets,
    ModelModule,
    make_callbacks,
    make_metrics,
    open_datasets,
    try_first,
)

log = logging.getLogger(__name__)

CALLBACKS = MappingProxyType({**OWN_CALLBACKS, "keras.callbacks.Callback": keras.callbacks.Callback})


SET_RATES = (keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau)
TWO_RATES = (
    "sets the learning rate, which goes by --learning_rate_scaling or by a schedule of elasticdl.callbacks: leave one of them out; that schedule and the "
    "scaling go together"
)


class ZooDriver(KerasDriver, Callback, Driver):
    """Keras's own callbacks where the trainer calls ours, which are beside them."""

    def on_train_batch_end(self, step: int, logs: Logs) -> None:
        self.after_step({"loss": self._ledger.epoch_loss})

    def tell(self, hook: str, *arguments: Any) -> None:
        before = self._state.learning_rate
        super().tell(hook, *arguments)
        if self._state.rate is not None and self._state.learning_rate != before:
            raise UserError(f"callbacks(): {hook}() of one of Keras's {TWO_RATES}")


class KerasLearner(Learner):
    """A Keras model being trained. Checkpoints hold arrays in the order of the variables."""

    codec = Codec(".npz", copy=copy.deepcopy, write=plain_data.write, read=plain_data.read)
    context_class = ElasticContext
    state: KerasState
    _context: ElasticContext

    @staticmethod
    def check(module: ModelModule, spec: JobSpec, model: keras.Model) -> None:
        require_backend()
        require_collective(spec.collective, TensorFlowTensors())
        if spec.data_workers:
            raise UserError(
                "--data_workers is for PyTorch: a Keras training loads samples ahead in a thread; leave it out"
            )
        for name in ("train_step", "compute_loss"):
            if getattr(type(model), name) is not getattr(keras.Model, name):
                raise UserError(
                    f"{shown(module.path)}: {name_of(module.custom_model)}() returned {type(model).__name__}, which has a {name}() of its own that is "
                    "not called: put it into the module's loss(), or write the loop with @elastic.run (docs/library.md)"
                )
        make_optimizer(module, KERAS, keras.optimizers.Optimizer)
        made = make_callbacks(module, CALLBACKS)
        refuse_needless(made)
        _require_directions(made)
        with module.blame("eval_metrics_fn()"):
            name_metrics(make_metrics(module, nested=True))
        training = one_feature(model, open_datasets(module, spec)).training
        loss = _checked_loss(module)
        with tf.device("CPU:0"):
            try_first(
                module,
                spec,
                training,
                lambda dataset, count: load(dataset, np.arange(count, dtype=np.int64)),
                functools.partial(model, training=True),
                lambda labels, outputs: loss(labels, keras.tree.map_structure(widen, outputs)),
            )

    def _make(self, module: ModelModule) -> None:
        spec, context, model = self._spec, self._context, self._model
        data = one_feature(model, open_datasets(module, spec))
        micro_batch = largest_micro_batch(spec, len(data.training))
        inputs, labels = load(data.training, np.arange(micro_batch, dtype=np.int64))
        if not model.built:
            model(keras.tree.map_structure(lambda leaf: leaf[:1], inputs))
        optimizer = _scaled(make_optimizer(module, KERAS, keras.optimizers.Optimizer), model)
        # What compile() was given, if it was called, is not used; callbacks look for the optimizer here.
        model.optimizer = optimizer
        loss = _checked_loss(module)
        step = TrainStep(model, loss, optimizer)
        context.warm_up(step, inputs, labels)
        if data.evaluation is not None:
            metrics = name_metrics(make_metrics(module, nested=True))
            evaluator = KerasEvaluator(model, data.evaluation, loss, metrics, micro_batch, context)
            evaluator.warm_up(inputs, labels)
            self.evaluator = evaluator
        self.loader = ElasticDataLoader(context, data.training, shuffle=spec.shuffle)
        self.state = KerasState(context, step, self.loader, {"ledger": self.ledger})
        if data.evaluation is not None:
            self.state.sources.append(Source.of(EVALUATION, data.evaluation))
        made = make_callbacks(module, CALLBACKS)
        self._ours = [each for each in made if isinstance(each, Callback)]
        self.driver: ZooDriver = ZooDriver(
            context,
            self.state,
            [each for each in made if isinstance(each, keras.callbacks.Callback)],
            epochs=spec.num_epochs,
            steps=self.loader.sampler.order.remaining_steps(Progress(), spec.num_workers.minimum),
        )
        self.callbacks = [*self._ours, self.driver]

    @classmethod
    def evaluator_of(
        cls, module: ModelModule, spec: JobSpec, context: JobContext, model: keras.Model, dataset: Any
    ) -> KerasEvaluator:
        assert isinstance(context, ElasticContext)
        data = one_feature(model, Datasets(dataset, None)).training
        micro_batch = context.policy.most_at_once
        inputs, labels = load(data, np.arange(min(micro_batch, len(data)), dtype=np.int64))
        if not model.built:
            model(keras.tree.map_structure(lambda leaf: leaf[:1], inputs))
        is_evaluation = spec.task == EVALUATE
        loss = _checked_loss(module) if is_evaluation else None
        metrics = name_metrics(make_metrics(module, nested=True)) if is_evaluation else {}
        evaluator = KerasEvaluator(model, data, loss, metrics, micro_batch, context)
        evaluator.warm_up(inputs, labels)
        return evaluator

    def follow_rules(self) -> None:
        rules = rate_rules(self._spec, self._ours)
        if rules.schedule is None and rules.scaling is None:  # else a callback of Keras's may set the rate
            return
        for callback in self.driver.callbacks:
            if isinstance(callback, SET_RATES):
                raise UserError(f"callbacks(): {type(callback).__name__} {TWO_RATES}")
        self.state.follow(rules)

    def make_step(self, batch: StepBatch) -> float:
        return self.driver.make_step(batch)

    def evaluate(self) -> Evaluation | None:
        if self.evaluator is None:
            return None
        with self.driver.testing() as logs:
            evaluation = self.evaluator.evaluate(self.driver.tell)
            logs.update(evaluation.metrics)
        return evaluation

    def save_model(self, folder: Path) -> Path:
        """``model.keras``, and beside it a SavedModel for serving. Not every model can be traced for that: a warning."""
        path = folder / "model.keras"
        with aside(path) as scratch:
            self._model.save(scratch)
        try:
            with aside(folder / "saved_model") as scratch:
                self._model.export(scratch, verbose=False)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - tracing runs the user's model, which may raise anything
            log.warning("%s has been written, but no SavedModel: %s", path, one_line(error))
        return path


def _checked_loss(module: ModelModule) -> LossFunction:
    """The module's loss, which fails with one line if it returns no tensor; that is looked at when it is traced."""

    def loss(labels: Any, predictions: Any) -> Any:
        value = module.loss(labels, predictions)
        if not keras.ops.is_tensor(value):
            raise UserError(
                f"{shown(module.path)}: {name_of(module.loss)}(labels, predictions) returned {kind_of(value)}; expected a "
                "tensor: the mean over the samples, or one value for each"
            )
        return value

    return loss


def _scaled(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> keras.optimizers.Optimizer:
    """As ``compile`` does it: a loss in half precision is scaled, so that small gradients are not lost."""
    if model.dtype_policy.name != "mixed_float16" or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer
    return keras.optimizers.LossScaleOptimizer(optimizer)


def _require_directions(callbacks: Sequence[Any]) -> None:
    """Keras knows only which metrics of ``compile`` are to grow, and asks for those at the end of the first epoch."""
    for each in callbacks:
        if getattr(each, "mode", "") == "auto" and each.monitor.removeprefix("val_") != "loss":
            raise UserError(
                f'{type(each).__name__}(monitor="{each.monitor}"): give mode="max" if this is to grow, or mode="min"'
            )


# -- samples whose features are a dict --


def one_feature(model: keras.Model, data: Datasets) -> Datasets:
    """Where a model has one input, and samples have their features as a dict of one, the model is to be given its value.

    Keras 2 accepted the dict, and modules of ElasticDL count on it; Keras 3 refuses it unless the names agree.
    """
    if not _takes_one(model):
        return data
    wrapped = (
        OneFeature(each) if each is not None and _is_one(each[0]) else each for each in (data.training, data.evaluation)
    )
    return Datasets(*wrapped)


@dataclass(frozen=True, slots=True)
class OneFeature:
    """A data set whose features are the value, where they were a dict of one."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return _bare(self.dataset[index])

    def __getitems__(self, indices: Sequence[int]) -> Any:
        get_many = getattr(self.dataset, "__getitems__", None)
        got = get_many(indices) if get_many else [self.dataset[index] for index in indices]
        return [_bare(sample) for sample in got] if isinstance(got, list) else _bare(got)


def _takes_one(model: keras.Model) -> bool:
    """A model whose call is Keras's own: Functional with one input that is not in a dict, or Sequential, built or not."""
    if type(model).call.__module__.partition(".")[0] != "keras":
        return False
    if isinstance(model, keras.Sequential):
        return True
    return len(getattr(model, "inputs", None) or ()) == 1 and not isinstance(model.input, Mapping)


def _is_one(sample: Any) -> bool:
    return isinstance(sample, tuple) and len(sample) == 2 and isinstance(sample[0], Mapping) and len(sample[0]) == 1


def _bare(sample: Any) -> Any:
    return (*sample[0].values(), sample[1]) if _is_one(sample) else sample
