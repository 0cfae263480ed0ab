"""The meter as a callback of `fit`, Keras's own and the elastic one."""

from __future__ import annotations

from typing import Any

from benchmarks.loops.meter import Meter
from elasticdl.tensorflow import keras


class BatchMeter(keras.callbacks.Callback):  # type: ignore[misc]
    """A step ends where the next begins: a hook at its end would make Keras fetch the loss of each."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not self._meter.begun:
            self._meter.begin()
            return
        self._meter.lap("step")
        if self._meter.done():
            self.model.stop_training = True
