"""Training a model-zoo module, whatever the framework: epochs, what is due when, callbacks, the learning rate.

`Trainer.train` is entered anew in each world. What it does at a step follows from the state alone (position and
ledger), which all members share; so it takes up wherever the last world ended, and does nothing twice.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elasticdl.callbacks import Callback
from elasticdl.common.spec import JobSpec
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.errors import Stopped, WorldChanged
from elasticdl.elastic.core.world import World
from elasticdl.elastic.training.loop import Hooks
from elasticdl.elastic.training.sampler import StepBatch
from elasticdl.worker.checkpoint_writer import CheckpointWriter
from elasticdl.worker.export import export
from elasticdl.worker.learner import Context, Learner
from elasticdl.worker.ledger import Ledger

log = logging.getLogger(__name__)

FINAL_CHECKPOINT_SECONDS = 240.0
STOP_SHARE = 0.8  # of --stop_grace: after it, the worker is killed


class Trainer:
    """Runs one worker's part of a training."""

    def __init__(
        self,
        spec: JobSpec,
        context: Context,
        learner: Learner[Any],
        callbacks: Sequence[Callback],
        checkpoints: CheckpointWriter | None,
    ) -> None:
        self._spec = spec
        self._context = context
        self._learner = learner
        self._state = learner.state
        self._ledger: Ledger = learner.state.values["ledger"]
        self._sampler = learner.loader.sampler
        self._callbacks = callbacks
        self._checkpoints = checkpoints
        learner.follow(callbacks)
        # Of this process, so that callbacks and reports come once however often `train` is entered.
        self._begun = False
        self._begun_epoch = self._ended_epoch = -1
        self._told_step = self._reported_step = 0
        self._left_together = False
        self._stopping = False  # the callbacks want training to end: agreed by all members
        if checkpoints is not None:
            context.handover = None

    def run(self) -> None:
        """Train to the end.

        Raises:
            Stopped: this worker was told to leave; a checkpoint has been written if that was its task.
        """
        try:
            self._context.run(self.train, self._state, Hooks(self._before_sync, self._on_world))
        except Stopped as stopped:
            seconds = STOP_SHARE * self._spec.stop_grace
            if self._state.has_state and self._keeps_last_state(stopped):
                self._finish_checkpoint(seconds)
            elif self._checkpoints:
                self._checkpoints.wait(time.monotonic() + seconds)  # for one that was begun in time
            raise
        ledger = self._ledger
        self._context.finish(step=self._state.step, epochs=ledger.finished_epochs, metrics=ledger.metrics)

    def _keeps_last_state(self, stopped: Stopped) -> bool:
        """Whether the last checkpoint is this worker's task. Of a world that broke, nobody knows if rank 0 is left."""
        world = self._context.world
        return world.size == 1 or (stopped.checkpoint and (world.rank == 0 or not self._left_together))

    # -- entering a world --

    def _before_sync(self, world: World) -> None:
        self._left_together = False
        self._learner.enter(world)
        # Also with --no_resume: the folder was empty at the start, so what is in it is this job's own.
        if not (world.is_first and world.rank == 0):
            return
        found = self._learner.resume()
        if found is None:
            return
        progress = self._state.progress
        epoch = progress.epoch + self._sampler.at_end
        log.info("resumed from %s: epoch %d, step %d", found.path, epoch, found.step)
        self._context.session.notify("resumed", step=found.step, epoch=epoch, samples=progress.samples, path=found.path)
        if self._total_steps(world.size) <= found.step:
            self._context.warn(
                f"the training in --checkpoint_dir is complete (epoch {epoch}, step {found.step}), nothing is left to do: "
                "give more --num_epochs or --max_step, or another --checkpoint_dir"
            )
        if self._checkpoints:
            self._checkpoints.written = found.step

    def _on_world(self, world: World) -> None:
        if not self._begun:
            self._begun = True
            self._reported_step = self._told_step = self._ledger.evaluated_step
            self._call("on_train_begin")
        self._call("on_world_change", world.size, world.rank)
        self._context.post(p.Totals(self._total_steps(world.size), self._spec.num_epochs))
        self._stopping = self._learner.settle(entering=True)

    def _total_steps(self, workers: int) -> int:
        """Of the whole job; with a fixed batch per worker, if the number of workers stays as it is."""
        order, progress = self._sampler.order, self._state.progress
        here = order.remaining_steps(progress.position, workers)
        epoch = order.remaining_steps(0, workers)
        total = progress.step + here + epoch * max(self._spec.num_epochs - progress.epoch - 1, 0)
        return min(total, self._spec.max_step) if self._spec.max_step else total

    # -- training --

    def train(self) -> None:
        """Train in the present world, to the end if it lasts.

        Raises:
            WorldChanged: the members leave this world together.
            WorldBroken: the world broke.
        """
        try:
            self._train()
        except WorldChanged:
            self._left_together = True
            raise

    def _train(self) -> None:
        for epoch in self._learner.loader.epochs(self._spec.num_epochs):
            self._begin_epoch(epoch)
            self._do_what_is_due()  # at the step after which the last world was left
            for batch in self._steps():
                self._make_step(batch)
                self._report_evaluation()
                self._state.commit()
                self._do_what_is_due()
            if self._sampler.at_end:
                self._finish_epoch(epoch)
            elif self._stopping:
                self._end_epoch(epoch)
            if self._reached_end:
                break
        self._complete()

    @property
    def _reached_end(self) -> bool:
        return self._stopping or 0 < self._spec.max_step <= self._state.step

    def _steps(self) -> Iterator[StepBatch]:
        if self._reached_end:
            return
        for batch in self._learner.loader:
            yield batch
            if self._reached_end:
                return

    def _begin_epoch(self, epoch: int) -> None:
        if self._sampler.progress.position == 0:  # the state follows at its next commit
            self._ledger.begin_epoch()
        if self._begun_epoch < epoch:
            self._begun_epoch = epoch
            self._call("on_epoch_begin", epoch)

    def _make_step(self, batch: StepBatch) -> None:
        loss = self._learner.make_step(batch)
        assert self._state.vote is not None  # cast in that step
        self._stopping = self._state.vote.stopping
        self._ledger.add_loss(loss, batch.plan.batch)
        self._call("on_train_batch_end", self._state.step, {"loss": loss, "learning_rate": self._state.learning_rate})

    def _do_what_is_due(self) -> None:
        step, spec = self._state.step, self._spec
        if spec.evaluation_steps and step % spec.evaluation_steps == 0:
            self._evaluate()
        if spec.checkpoint_steps and step % spec.checkpoint_steps == 0:
            self._checkpoint()

    def _finish_epoch(self, epoch: int) -> None:
        self._evaluate()
        ledger = self._ledger
        if ledger.finished_epochs <= epoch:
            ledger.finished_epochs = epoch + 1
            if self._context.rank == 0:
                log.info("epoch %d finished: step %d, mean loss %.4g", epoch, self._state.step, ledger.epoch_loss)
        if not self._spec.checkpoint_steps:
            self._checkpoint()
        self._end_epoch(epoch)

    def _end_epoch(self, epoch: int) -> None:
        """Its steps are over, though there may be more in the data."""
        self._evaluate()
        if self._ended_epoch < epoch:
            self._ended_epoch = epoch
            metrics = {f"val_{name}": value for name, value in self._ledger.metrics.items()}
            self._call("on_epoch_end", epoch, {"loss": self._ledger.epoch_loss, **metrics})
        self._stopping = self._learner.settle(entering=False) or self._stopping

    def _complete(self) -> None:
        self._evaluate()
        if self._context.rank == 0:
            self._finish_checkpoint(FINAL_CHECKPOINT_SECONDS)
        self._learner.complete()
        if self._context.rank == 0 and self._spec.output:
            path = export(Path(self._spec.output), self._learner.save_model)
            self._context.session.notify("exported", path=str(path))
        # If rank 0 dies at this, the others must still be there to do it.
        self._context.advance(waiting=True)
        self._context.collective.barrier("elasticdl.complete")
        self._report_evaluation()
        self._call("on_train_end")

    # -- what is done at most once a step --

    def _evaluate(self) -> None:
        step = self._state.step
        if self._ledger.evaluated_step >= step:
            return
        evaluation = self._learner.evaluate()
        self._context.post(p.On.CLOCK_RESUMED)
        if evaluation is None:
            return
        epoch = self._state.progress.epoch
        self._ledger.evaluation = {"step": step, "epoch": epoch, **asdict(evaluation)}
        if self._told_step < step:
            self._told_step = step
            self._call("on_evaluation_end", evaluation.metrics)

    def _report_evaluation(self) -> None:
        """Only now, as the step after it has shown that all members have got through it: none will repeat it."""
        evaluation = self._ledger.evaluation
        if self._reported_step >= self._ledger.evaluated_step:
            return
        self._reported_step = self._ledger.evaluated_step
        if self._context.rank == 0:
            numbers = ", ".join(f"{name} {value:.4f}" for name, value in evaluation["metrics"].items())
            log.info("evaluation at step %d on %d samples: %s", evaluation["step"], evaluation["samples"], numbers)
            self._context.session.notify("evaluation", **evaluation)

    def _checkpoint(self) -> None:
        ledger, step = self._ledger, self._state.step
        if self._checkpoints is None or ledger.checkpointed_step >= step:
            return
        ledger.checkpointed_step = step
        if self._context.rank == 0:
            self._checkpoints.begin(step, self._learner.copy)

    def _finish_checkpoint(self, seconds: float) -> None:
        if self._checkpoints is not None:
            self._ledger.checkpointed_step = self._state.step
            alive = functools.partial(self._context.advance, waiting=False)
            self._checkpoints.finish(self._state.step, self._learner.copy, time.monotonic() + seconds, alive)

    def _call(self, hook: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, hook)(*arguments)
        self._state.keep_settings()  # no hook is called twice for one step or epoch
