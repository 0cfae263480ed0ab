"""Callbacks as in ElasticDL, for Keras models.

Its ``LearningRateScheduler`` counts batches, not epochs, unlike that of Keras and the one in `elasticdl.callbacks`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from elasticdl.tensorflow import keras

log = logging.getLogger(__name__)


class LearningRateScheduler(keras.callbacks.Callback):  # type: ignore[misc]
    """Before each batch, sets the learning rate to ``schedule(steps)``, of the optimizer steps made so far."""

    def __init__(self, schedule: Callable[[int], float]) -> None:
        super().__init__()
        self.schedule = schedule

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        optimizer = self.model.optimizer
        optimizer.learning_rate = self.schedule(int(optimizer.iterations))


class SavedModelExporter(keras.callbacks.Callback):  # type: ignore[misc]
    """Does nothing: the trained model is written to ``--output`` anyway."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()


class MaxStepsStopping(keras.callbacks.Callback):  # type: ignore[misc]
    """Not supported; says what is instead."""

    def __init__(self, max_steps: int) -> None:
        super().__init__()
        log.warning("MaxStepsStopping(%d) has no effect; give --max_step %d", max_steps, max_steps)
