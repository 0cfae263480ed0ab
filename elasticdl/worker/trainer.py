"""Training a model-zoo module, whatever the framework: what is due when, callbacks, checkpoints, the end."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elasticdl.callbacks import Callback
from elasticdl.common.errors import UserError
from elasticdl.common.reason import one_line
from elasticdl.elastic.core.protocol import Stopped, World
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.training.attributes import Arrays, Attributes, Holder
from elasticdl.elastic.training.epochs import EpochDriver
from elasticdl.elastic.training.evaluation import from_root
from elasticdl.elastic.training.job import JobContext
from elasticdl.job.spec import JobSpec
from elasticdl.worker.learner import CheckpointWriter, Learner, Ledger

log = logging.getLogger(__name__)

FINAL_CHECKPOINT_SECONDS = 240.0
STOP_SHARE = 0.8  # of --stop_grace: after it, the worker is killed


class Trainer(EpochDriver[Ledger]):
    """Runs one worker's part of a training."""

    def __init__(self, spec: JobSpec, context: JobContext, learner: Learner) -> None:
        epochs, max_step = spec.num_epochs, spec.max_step
        super().__init__(context, learner.loader, learner.state, learner.ledger, epochs=epochs, max_step=max_step)
        self._spec = spec
        self._learner = learner
        self._checkpoints = CheckpointWriter(learner.store, context.session) if learner.store else None
        learner.follow_rules()
        # Of this process, so that callbacks and reports come once however often `train` is entered.
        self._begun = False
        self._begun_epoch = self._ended_epoch = -1
        self._told_step = 0
        self._kept = kept_by(learner.callbacks, context.warn)
        if self._checkpoints is not None:
            context.kept = None

    def run(self) -> None:
        """Train to the end.

        Raises:
            Stopped: this worker was told to leave; a checkpoint has been written if that was its task.
        """
        try:
            self._context.run(self.train, self.state, self)
        except Stopped as stopped:
            seconds = STOP_SHARE * self._spec.stop_grace
            if self.state.has_state and self._context.is_to_keep(stopped):
                self._finish_checkpoint(seconds)
            elif self._checkpoints:
                self._checkpoints.wait(time.monotonic() + seconds)  # for one that was begun in time
            raise
        ledger = self._ledger
        self._context.finish(step=self.state.step, epochs=ledger.finished_epochs, metrics=ledger.metrics)

    # -- entering a world --

    def before_sync(self, world: World) -> None:
        self._learner.driver.enter(world)
        # Also with --no_resume: the folder was empty at the start, so what is in it is this job's own.
        if not (world.is_first and world.rank == 0):
            return
        found = self._learner.resume()
        if found is None:
            return
        progress = self.state.progress
        epoch = progress.epoch + self._sampler.at_end
        log.info("resumed from %s: epoch %d, step %d", found.path, epoch, found.step)
        where = {"step": found.step, "epoch": epoch, "samples": progress.samples, "path": found.path}
        self._context.session.notify("resumed", **where)
        if self._total_steps(world.size) <= found.step:
            self._context.warn(
                f"the training in --checkpoint_dir is complete (epoch {epoch}, step {found.step}), nothing is left to do: "
                "give more --num_epochs or --max_step, or another --checkpoint_dir"
            )
        if self._checkpoints:
            self._checkpoints.written = found.step

    def on_world(self, world: World) -> None:
        if not self._begun:
            self._begun = True
            self._told_step = self._ledger.evaluated_step
            self._call("on_train_begin")
            self._kept.begin()
        self._catch_up(world)
        self._call("on_world_change", world.size, world.rank)
        self._tell_totals()
        self._stopping = self._learner.driver.agree()

    def _catch_up(self, world: World) -> None:
        """A worker that has come later lets the epoch begin for its callbacks, and then lets them keep what those of rank 0 keep. What
        they have opened in ``on_train_begin`` is this worker's.

        Raises:
            WorldBroken: a member was lost meanwhile.
        """
        if world.is_first or world.size == 1 or not world.needs_sync:
            return
        mine = self._kept.dump() if world.rank == 0 else None
        kept = from_root(self._context.collective, mine, "elasticdl.own_callbacks")
        if not world.stands_with_root(world.rank):
            self._tell_epoch(self.state.progress.epoch)
            self._kept.load(kept)

    # -- training --

    def _begin_epoch(self, epoch: int) -> None:
        self._tell_epoch(epoch)
        self._after_commit()  # of the step after which the last world was left

    def _tell_epoch(self, epoch: int) -> None:
        if self._begun_epoch < epoch:
            self._begun_epoch = epoch
            self._call("on_epoch_begin", epoch)

    def _make_step(self, batch: Any) -> float:
        return self._learner.make_step(batch)

    def _after_step(self, loss: float) -> None:
        self._call("on_train_batch_end", self.state.step, {"loss": loss, "learning_rate": self.state.learning_rate})

    def _stops_after_step(self) -> bool:
        return self._learner.driver.stops_after_step()

    def _after_commit(self) -> None:
        step, spec = self.state.step, self._spec
        if spec.evaluation_steps and step % spec.evaluation_steps == 0:
            self._evaluate()
        if spec.checkpoint_steps and step % spec.checkpoint_steps == 0:
            self._checkpoint()

    def _end_epoch(self, epoch: int) -> None:
        """Its steps are over, though there may be more in the data."""
        complete, ledger = self._sampler.at_end, self._ledger
        if not complete and not self._stopping:
            return
        self._evaluate()
        if complete and ledger.finished_epochs <= epoch:
            ledger.finished_epochs = epoch + 1
            if self._context.rank == 0:
                log.info("epoch %d finished: step %d, mean loss %.4g", epoch, self.state.step, ledger.epoch_loss)
        if complete and not self._spec.checkpoint_steps:
            self._checkpoint()
        if self._ended_epoch < epoch:
            self._ended_epoch = epoch
            metrics = {f"val_{name}": value for name, value in ledger.metrics.items()}
            self._call("on_epoch_end", epoch, {"loss": ledger.epoch_loss, **metrics})
        self._stopping = self._learner.driver.agree() or self._stopping

    def _complete(self) -> None:
        self._evaluate()
        if self._context.rank == 0:
            self._finish_checkpoint(FINAL_CHECKPOINT_SECONDS)
        self._learner.driver.complete()
        if self._context.rank == 0 and self._spec.output:
            path = export(Path(self._spec.output), self._learner.save_model)
            self._context.session.notify("exported", path=str(path))
        # If rank 0 dies at this, the others must still be there to do it.
        with self._context.waiting():
            self._context.collective.barrier("elasticdl.complete")
        self._call("on_train_end")

    # -- what is done at most once a step --

    def _evaluate(self) -> None:
        step = self.state.step
        if self._ledger.evaluated_step >= step:
            return
        began = time.monotonic()
        evaluation = self._learner.evaluate()
        self._context.resume_clock()
        if evaluation is None:
            return
        epoch = self.state.progress.epoch
        self._ledger.evaluation = {"step": step, "epoch": epoch, **asdict(evaluation)}
        if self._told_step < step:
            self._told_step = step
            self._tell_evaluation(time.monotonic() - began)
            self._call("on_evaluation_end", evaluation.metrics)

    def _tell_evaluation(self, seconds: float) -> None:
        evaluation = self._ledger.evaluation
        if self._context.rank == 0:
            numbers = ", ".join(f"{name} {value:.4f}" for name, value in evaluation["metrics"].items())
            log.info("evaluation at step %d on %d samples: %s", evaluation["step"], evaluation["samples"], numbers)
            self._context.session.notify("evaluation", **evaluation, seconds=seconds)

    def _checkpoint(self) -> None:
        """Again where another worker has become rank 0 meanwhile: the one before may not have finished it."""
        if self._checkpoints is not None and self._context.rank == 0:
            self._checkpoints.begin(self.state.step, self._learner.copy)

    def _finish_checkpoint(self, seconds: float) -> None:
        if self._checkpoints is not None:
            alive = functools.partial(self._context.advance, Activity.ALIVE)
            self._checkpoints.finish(self.state.step, self._learner.copy, time.monotonic() + seconds, alive)

    def _call(self, hook: str, *arguments: Any) -> None:
        for callback in self._learner.callbacks:
            getattr(callback, hook)(*arguments)
        self.state.keep_settings()  # no hook is called twice for one step or epoch


def kept_by(callbacks: Iterable[Callback], warn: Callable[[str], None]) -> Attributes:
    """What those of the module's own keep; Keras's have a way of their own."""
    own = {f"callback {number}": each for number, each in enumerate(callbacks) if not _is_of_ours(type(each))}
    holders = [Holder(name, f"the callback {type(each).__name__}", each) for name, each in own.items()]
    return Attributes(lambda: holders, Arrays(), warn)


def _is_of_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "elasticdl"


def export(folder: Path, save: Callable[[Path], Path]) -> Path:
    """Make the folder and let ``save`` write the model into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = save(folder)
    except (OSError, RuntimeError) as error:  # torch makes a RuntimeError of some
        raise UserError(f"--output {folder}: the model could not be written: {one_line(error)}") from error
    log.info("model written to %s", path)
    return path
