"""The Keras side of a training: optimizer, data and state for the model of a model-zoo module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import keras
import numpy as np

from elasticdl.callbacks import Callback, LearningRateScheduler
from elasticdl.common.errors import UserError
from elasticdl.common.reason import name_of, shown
from elasticdl.common.spec import JobSpec
from elasticdl.elastic.core.learning_rate import LearningRate
from elasticdl.elastic.core.world import World
from elasticdl.elastic.keras.backend import require_backend
from elasticdl.elastic.keras.callback_rate import KerasRate
from elasticdl.elastic.keras.callbacks import refuse_needless
from elasticdl.elastic.keras.collective import KerasCollective
from elasticdl.elastic.keras.context import ElasticContext
from elasticdl.elastic.keras.context import connect as connect
from elasticdl.elastic.keras.loader import load
from elasticdl.elastic.keras.state import KerasState
from elasticdl.elastic.keras.step import TrainStep
from elasticdl.elastic.training.sampler import StepBatch
from elasticdl.worker.batches import largest_micro_batch
from elasticdl.worker.checkpoint import Checkpoint, open_store
from elasticdl.worker.datasets import open_datasets
from elasticdl.worker.first_samples import Blame, require_fit
from elasticdl.worker.frameworks import KERAS, kind_of, make_optimizer
from elasticdl.worker.keras_callbacks import KerasCallbacks
from elasticdl.worker.keras_checkpoint import KerasCodec
from elasticdl.worker.keras_evaluation import KerasEvaluator, name_metrics
from elasticdl.worker.keras_export import save_model
from elasticdl.worker.keras_features import one_feature, try_out
from elasticdl.worker.learner import Dump, Evaluation
from elasticdl.worker.ledger import Ledger
from elasticdl.worker.rate import rate_rules
from elasticdl.worker.resume import Origin, content, load_newest
from elasticdl.worker.user_code import blame
from elasticdl.worker.zoo import OWN_CALLBACKS, ModelModule, make_callbacks, make_metrics

CALLBACKS = MappingProxyType({**OWN_CALLBACKS, "keras.callbacks.Callback": keras.callbacks.Callback})


def make_learner(module: ModelModule, spec: JobSpec, context: ElasticContext, model: keras.Model) -> KerasLearner:
    return KerasLearner(module, spec, context, model)


def check(module: ModelModule, spec: JobSpec, model: keras.Model) -> None:
    require_backend()
    KerasCollective.require_horovod()
    if spec.data_workers:
        raise UserError("--data_workers is for PyTorch: a Keras training loads samples ahead in a thread; leave it out")
    with blame(f"{name_of(module.optimizer)}()", module.folder):
        make_optimizer(module, KERAS, keras.optimizers.Optimizer)
    with blame("callbacks()", module.folder):
        refuse_needless(make_callbacks(module, CALLBACKS))
    with blame("eval_metrics_fn()", module.folder):
        name_metrics(make_metrics(module, nested=True))
    training = one_feature(model, open_datasets(module, spec)).training
    require_fit(try_out(model, checked_loss(module), training, Blame(module, spec)), spec, len(training))


def checked_loss(module: ModelModule) -> Callable[[Any, Any], Any]:
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


def scaled(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> keras.optimizers.Optimizer:
    """As ``compile`` does it: a loss in half precision is scaled, so that small gradients are not lost."""
    if model.dtype_policy.name != "mixed_float16" or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer
    return keras.optimizers.LossScaleOptimizer(optimizer)


class KerasLearner:
    """A Keras model being trained; see `elasticdl.worker.learner.Learner`."""

    def __init__(self, module: ModelModule, spec: JobSpec, context: ElasticContext, model: keras.Model) -> None:
        self._spec = spec
        self._context = context
        self._model = model
        data = one_feature(model, open_datasets(module, spec))
        micro_batch = largest_micro_batch(spec, len(data.training))
        inputs, labels = load(data.training, np.arange(micro_batch, dtype=np.int64))
        if not model.built:
            model(keras.tree.map_structure(lambda leaf: leaf[:1], inputs))
        optimizer = scaled(make_optimizer(module, KERAS, keras.optimizers.Optimizer), model)
        # What compile() was given, if it was called, is not used; callbacks look for the optimizer here.
        model.optimizer = optimizer
        step = TrainStep(model, checked_loss(module), optimizer)
        step.warm_up(inputs, labels)
        self._evaluator = self._make_evaluator(module, data.evaluation, micro_batch)
        if self._evaluator:
            self._evaluator.warm_up(inputs, labels)
        self.loader = context.loader(data.training, shuffle=spec.shuffle)
        self.state: KerasState = context.state(step, self.loader, {"ledger": Ledger()})
        self._codec = KerasCodec()
        self.store = open_store(spec, self._codec.suffix)
        self._origin = Origin(samples=len(data.training), seed=spec.seed, shuffle=spec.shuffle)
        made = make_callbacks(module, CALLBACKS)
        theirs = [each for each in made if isinstance(each, keras.callbacks.Callback)]
        self._schedules = [each for each in theirs if isinstance(each, keras.callbacks.LearningRateScheduler)]
        self._rate = KerasRate(optimizer)
        self._keras_callbacks = KerasCallbacks(theirs, self._params(), model, self.state, self._rate)
        self.callbacks: list[Callback] = [each for each in made if isinstance(each, Callback)]
        self.callbacks.append(self._keras_callbacks)

    def follow(self, callbacks: Sequence[Callback]) -> None:
        """If there are several schedules, the last of Keras's own counts, else the last of ours."""
        ours = [each for each in callbacks if isinstance(each, LearningRateScheduler)]
        for scheduler in (*ours, *self._schedules):
            self._rate.follow(scheduler.schedule, may_take_rate=scheduler in self._schedules)
        rules = rate_rules(self._spec, (), self._rate)
        # Without any rule the rate is the optimizer's own affair, which may have a schedule itself.
        self.state.follow(rules if self._rate.has_schedule or rules.scaling else LearningRate())

    def make_step(self, batch: StepBatch) -> float:
        self._keras_callbacks.before_step()
        self.state.stopping = bool(self._model.stop_training)
        return self.state.make_step(batch)

    def evaluate(self) -> Evaluation | None:
        if self._evaluator is None:
            return None
        with self._keras_callbacks.testing() as logs:
            evaluation = self._evaluator.evaluate(self._keras_callbacks)
            logs.update(evaluation.metrics)
        return evaluation

    def enter(self, world: World) -> None:
        self._keras_callbacks.enter(world)

    def settle(self, *, entering: bool) -> bool:
        return self._keras_callbacks.settle(self._context.collective, entering=entering)

    def complete(self) -> None:
        self._keras_callbacks.end()

    def resume(self) -> Checkpoint | None:
        if self.store is None:
            return None
        found = load_newest(self.store, self.state, self._origin, self._codec)
        if found is None:
            return None
        self._keras_callbacks.unpack(found.extra["callbacks"])
        return found.checkpoint

    def copy(self) -> Dump:
        return content(self.state, self._origin, self._codec, {"callbacks": self._keras_callbacks.pack()})

    def save_model(self, folder: Path) -> Path:
        return save_model(self._model, folder)

    def _params(self) -> dict[str, Any]:
        """As Keras's own ``fit`` gives them to callbacks; steps as they are with the least number of workers."""
        steps = self.loader.sampler.order.remaining_steps(0, self._spec.num_workers.minimum)
        return {"verbose": 0, "epochs": self._spec.num_epochs, "steps": steps}

    def _make_evaluator(self, module: ModelModule, dataset: Any | None, batch_size: int) -> KerasEvaluator | None:
        if dataset is None:
            return None
        return KerasEvaluator(
            model=self._model,
            dataset=dataset,
            loss=checked_loss(module),
            metrics=name_metrics(make_metrics(module, nested=True)),
            batch_size=batch_size,
            collective=self._context.collective,
            advance=self._context.advance,
        )
