"""``fit`` through as many worlds as it takes; `elasticdl.elastic.keras.models.Model` is what a script sees of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.batch_plan import split
from elasticdl.elastic.core.learning_rate import LearningRate
from elasticdl.elastic.core.world import World
from elasticdl.elastic.keras.callback_rate import KerasRate
from elasticdl.elastic.keras.callbacks import KerasCallbacks
from elasticdl.elastic.keras.context import ElasticContext
from elasticdl.elastic.keras.fit_arguments import FitData, FitOptions
from elasticdl.elastic.keras.fit_data import Samples
from elasticdl.elastic.keras.fit_stages import Outcome, Stages
from elasticdl.elastic.keras.fit_step import EpochLedger, FitStep
from elasticdl.elastic.keras.loader import fetch, load
from elasticdl.elastic.training.loop import Hooks
from elasticdl.elastic.training.sampler import StepBatch


@dataclass(frozen=True, slots=True)
class FitCall:
    """What ``fit`` was given; ``callbacks`` with the history among them."""

    data: FitData
    callbacks: Sequence[keras.callbacks.Callback]
    options: FitOptions


class Fit:
    """One call of ``fit``. `train` is entered anew in each world, and takes up from the state alone."""

    def __init__(
        self,
        context: ElasticContext,
        stages: Stages,
        model: keras.Model,
        given: FitCall,
    ) -> None:
        training, callbacks, options = given.data.training, given.callbacks, given.options
        self._context = context
        self._stages = stages
        self._model = model
        self._validation = given.data.validation
        self._options = options
        inputs, targets = load(training.dataset, np.arange(min(2, len(training))))
        self._step = FitStep(model, inputs, targets, weighted=training.weighted)
        self._step.warm_up(inputs, targets)
        self._loader = context.loader(training.dataset, shuffle=options.shuffle)
        self._ledger = EpochLedger()
        self._start = stages.progress
        self.state = context.state(
            self._step,
            self._loader,
            {"ledger": self._ledger},
            start=replace(stages.progress, epoch=options.initial_epoch, position=0),
            has_state=stages.has_state,
        )
        rate = KerasRate(model.optimizer)
        for callback in callbacks:
            if isinstance(callback, keras.callbacks.LearningRateScheduler):
                rate.follow(callback.schedule, may_take_rate=True)
        if rate.has_schedule:
            self.state.follow(LearningRate(rate))
        steps = self._loader.sampler.order.remaining_steps(0, context.size)
        params = {"verbose": options.verbose, "epochs": options.epochs, "steps": steps}
        self._callbacks = KerasCallbacks(callbacks, params, model, self.state, rate)
        self._asks_for_logs = any(_overrides(callback, "on_train_batch_end") for callback in callbacks)
        self._stopping = False
        self.hooks = Hooks(self._enter, self._on_world)

    def _enter(self, world: World) -> None:
        self._stages.meet(self._context.collective)
        self._callbacks.enter(world, began=self.state.step > self._start.step)

    def _on_world(self, world: World) -> None:
        order, progress = self._loader.sampler.order, self.state.progress
        here = order.remaining_steps(progress.position, world.size)
        later = order.remaining_steps(0, world.size)
        epochs = self._options.epochs
        total = progress.step + here + later * max(epochs - progress.epoch - 1, 0)
        self._context.post(p.Totals(total, epochs))
        self._stopping = self._callbacks.settle(self._context.collective, entering=True)

    def train(self) -> None:
        """Train in the present world, to the end if it lasts.

        Raises:
            WorldChanged: the members leave this world together.
            WorldBroken: the world broke.
        """
        for epoch in self._loader.epochs(self._options.epochs):
            if self._loader.sampler.progress.position == 0:  # the state follows at its next commit
                self._ledger.begin_epoch()
            self._callbacks.on_epoch_begin(epoch)
            if not self._stopping:
                self._make_steps()
            self._end_epoch(epoch)
            if self._stopping:
                break
        self._callbacks.end()
        # If rank 0 dies before its callbacks are done, the others must still be there.
        self._context.advance(waiting=True)
        self._context.collective.barrier("elasticdl.complete")

    def outcome(self) -> Outcome:
        return Outcome(self._model, self._callbacks, self.state.progress)

    def _make_steps(self) -> None:
        for batch in self._loader:
            self._make_step(batch)
            self.state.commit()
            if self._stopping:
                break

    def _make_step(self, batch: StepBatch) -> None:
        self._callbacks.before_step()
        self.state.stopping = bool(self._model.stop_training)
        loss = self.state.make_step(batch)
        assert self.state.vote is not None  # cast in that step
        self._stopping = self.state.vote.stopping
        self._ledger.add(loss, batch.plan.batch, self._step.last_moves)
        self._callbacks.after_step(self._logs() if self._asks_for_logs else {"loss": self._ledger.loss})

    def _end_epoch(self, epoch: int) -> None:
        logs = self._logs()
        if self._validation is not None and self._options.validates(epoch):
            with self._callbacks.testing() as found:
                found.update(self._validate(self._validation))
            logs.update({f"val_{name}": value for name, value in found.items()})
        self._callbacks.on_epoch_end(epoch, logs)
        self._stopping = self._callbacks.settle(self._context.collective, entering=False) or self._stopping
        self._context.post(p.On.CLOCK_RESUMED)

    def _logs(self) -> dict[str, Any]:
        return self._step.logs(self._ledger.loss, self._ledger.moves)

    def _validate(self, data: Samples) -> dict[str, Any]:
        """Over all members, each on a contiguous share, each sample once."""
        collective, policy = self._context.collective, self._context.policy
        ends = list(itertools.accumulate(split(len(data), collective.world.size), initial=0))
        share = np.arange(ends[collective.world.rank], ends[collective.world.rank + 1])
        size = policy.max_micro_batch or policy.batch_size(1)
        batches = [share[start : start + size] for start in range(0, len(share), size)]
        shapes = [(), *self._step.move_shapes]
        sums = [np.zeros(shape) for shape in shapes]
        with closing(fetch(data.dataset, batches)) as loaded:
            for batch, (inputs, targets) in zip(batches, loaded, strict=True):
                self._context.advance(waiting=False)
                loss, *moves = self._step.test(inputs, targets, weighted=data.weighted)
                sums = [total + move for total, move in zip(sums, (loss * len(batch), *moves), strict=True)]
        self._context.advance(waiting=True)
        flat = np.asarray(collective.sum(np.concatenate([total.ravel() for total in sums]), "elasticdl.validation"))
        cuts = np.cumsum([total.size for total in sums])[:-1]
        loss, *moves = (part.reshape(shape) for part, shape in zip(np.split(flat, cuts), shapes, strict=True))
        return self._step.logs(float(loss) / len(data), moves)


def _overrides(callback: keras.callbacks.Callback, hook: str) -> bool:
    return getattr(type(callback), hook) is not getattr(keras.callbacks.Callback, hook)
