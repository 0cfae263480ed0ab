"""``fit`` through as many worlds as it takes; `elasticdl.elastic.keras.models.Model` is what a script sees of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.batch_plan import worker_slices
from elasticdl.elastic.core.learning_rate import LearningRate
from elasticdl.elastic.core.world import World
from elasticdl.elastic.keras.callbacks import KerasCallbacks, KerasRate
from elasticdl.elastic.keras.context import ElasticContext
from elasticdl.elastic.keras.fit_arguments import FitOptions
from elasticdl.elastic.keras.fit_data import FitData, Samples
from elasticdl.elastic.keras.fit_stages import Stages
from elasticdl.elastic.keras.fit_step import FitLedger, FitStep
from elasticdl.elastic.keras.loader import ElasticDataLoader, fetch, load
from elasticdl.elastic.keras.state import KerasState
from elasticdl.elastic.training.context import Hooks
from elasticdl.elastic.training.epochs import EpochDriver
from elasticdl.elastic.training.sampler import StepBatch


@dataclass(frozen=True, slots=True)
class FitCall:
    """What ``fit`` was given; ``callbacks`` with the history among them."""

    data: FitData
    callbacks: Sequence[keras.callbacks.Callback]
    options: FitOptions


class Fit(EpochDriver[FitLedger]):
    """One call of ``fit``."""

    state: KerasState

    def __init__(self, context: ElasticContext, stages: Stages, model: keras.Model, given: FitCall) -> None:
        training, options = given.data.training, given.options
        self._stages = stages
        self._validation = given.data.validation
        self._options = options
        inputs, targets = load(training.dataset, np.arange(min(2, len(training))))
        self._step = FitStep(model, inputs, targets, weighted=training.weighted)
        self._step.warm_up(inputs, targets)
        loader = ElasticDataLoader(context, training.dataset, shuffle=options.shuffle)
        ledger = FitLedger()
        self._start = stages.progress
        state = KerasState(
            context,
            self._step,
            loader,
            {"ledger": ledger},
            start=replace(stages.progress, epoch=options.initial_epoch, position=0),
            has_state=stages.has_state,
        )
        super().__init__(context, loader, state, ledger, epochs=options.epochs)
        rate = KerasRate(model.optimizer)
        for callback in given.callbacks:
            if isinstance(callback, keras.callbacks.LearningRateScheduler):
                rate.follow(callback.schedule, may_take_rate=True)
        if rate.has_schedule:
            state.follow(LearningRate(rate))
        steps = loader.sampler.order.remaining_steps(0, context.size)
        params = {"verbose": options.verbose, "epochs": options.epochs, "steps": steps}
        self.callbacks = KerasCallbacks(given.callbacks, params, model, state, rate)
        self._asks_for_logs = any(_overrides(callback, "on_train_batch_end") for callback in given.callbacks)
        self.hooks = Hooks(self._enter, self._on_world)

    def _enter(self, world: World) -> None:
        self._stages.meet(self._context.collective)
        self.callbacks.enter(world, began=self.state.step > self._start.step)

    def _on_world(self, world: World) -> None:
        self._tell_totals()
        self._stopping = self.callbacks.agree(self._context.collective, entering=True)

    def _begin_epoch(self, epoch: int) -> None:
        self.callbacks.on_epoch_begin(epoch)

    def _make_step(self, batch: StepBatch) -> float:
        self.callbacks.before_step()
        return self.state.make_step(batch)

    def _after_step(self, loss: float) -> None:
        self._ledger.add_deltas(self._step.last_deltas)
        self.callbacks.after_step(self._logs() if self._asks_for_logs else {"loss": self._ledger.epoch_loss})

    def _end_epoch(self, epoch: int) -> None:
        logs = self._logs()
        if self._validation is not None and self._options.validates(epoch):
            with self.callbacks.testing() as found:
                found.update(self._validate(self._validation))
            logs.update({f"val_{name}": value for name, value in found.items()})
        self.callbacks.on_epoch_end(epoch, logs)
        self._stopping = self.callbacks.agree(self._context.collective, entering=False) or self._stopping
        self._context.post(p.ClockResumed())

    def _complete(self) -> None:
        self.callbacks.end()

    def _logs(self) -> dict[str, Any]:
        return self._step.logs(self._ledger.epoch_loss, self._ledger.deltas)

    def _validate(self, data: Samples) -> dict[str, Any]:
        """Over all members, each on a contiguous share, each sample once."""
        collective, policy = self._context.collective, self._context.policy
        world, most = collective.world, policy.max_micro_batch or policy.batch_size(1)
        cuts = worker_slices(len(data), world.rank, world.size, most)
        batches = [np.arange(cut.start, cut.stop) for cut in cuts]
        shapes = [(), *self._step.delta_shapes]
        sums = [np.zeros(shape) for shape in shapes]
        with closing(fetch(data.dataset, batches)) as loaded:
            for batch, (inputs, targets) in zip(batches, loaded, strict=True):
                self._context.advance(waiting=False)
                loss, *deltas = self._step.test(inputs, targets, weighted=data.weighted)
                sums = [total + delta for total, delta in zip(sums, (loss * len(batch), *deltas), strict=True)]
        self._context.advance(waiting=True)
        flat = np.asarray(collective.sum(np.concatenate([total.ravel() for total in sums]), "elasticdl.validation"))
        ends = np.cumsum([total.size for total in sums])[:-1]
        loss, *deltas = (part.reshape(shape) for part, shape in zip(np.split(flat, ends), shapes, strict=True))
        return self._step.logs(float(loss) / len(data), deltas)


def _overrides(callback: keras.callbacks.Callback, hook: str) -> bool:
    return getattr(type(callback), hook) is not getattr(keras.callbacks.Callback, hook)
