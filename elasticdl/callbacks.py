"""Callbacks for model-zoo modules: ``callbacks()`` returns a list of these.

Every worker calls every hook, each in its own process: what should happen once per job (writing a file) belongs to the
worker whose rank, as told to `Callback.on_world_change`, is 0. Numbers in ``logs`` are of the whole job and the same on
all workers. The names are those of Keras.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

Logs = Mapping[str, float]


class Callback:
    """Does nothing at each point of training; override what you need. What a hook raises ends the job."""

    def on_train_begin(self) -> None:
        """Once in each worker, in its first world, before its first step."""

    def on_world_change(self, size: int, rank: int) -> None:
        """In each world that this worker enters, the first included, before anything is trained in it."""

    def on_epoch_begin(self, epoch: int) -> None:
        """Epochs count from 0. A worker that joins within an epoch calls it on joining."""

    def on_train_batch_end(self, step: int, logs: Logs) -> None:
        """After each optimizer step; steps count from 1. ``logs``: loss, learning_rate."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """``logs``: loss (the mean over the epoch) and, if the model was evaluated, its metrics as val_NAME."""

    def on_evaluation_end(self, logs: Logs) -> None:
        """``logs``: loss and each metric by its name, over the whole evaluation set."""

    def on_train_end(self) -> None:
        """Once in each worker that sees the end of training; not in one that was told to leave before."""


class LearningRateScheduler(Callback):
    """Sets the learning rate from a function of the epoch.

    The function is called at the beginning of each epoch and again whenever the number of workers has changed, so that
    it may use ``hvd.size()``. With several parameter groups its value is that of the first, and the others keep their
    ratio to it.
    """

    def __init__(self, schedule: Callable[[int], float]) -> None:
        self.schedule = schedule
