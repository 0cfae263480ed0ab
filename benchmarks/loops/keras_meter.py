"""The meter as a callback of `fit`, Keras's own and the elastic one."""

from __future__ import annotations

import functools
from typing import Any

from benchmarks.loops.meter import Meter
from elasticdl.tensorflow import keras


class BatchMeter(keras.callbacks.Callback):  # type: ignore[misc]
    """A step ends where the next begins: a hook at its end would make Keras fetch the loss of each."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        # What a callback keeps in attributes is compared with the other workers', and would be measured along.
        self._is_over = functools.partial(_is_over, meter)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._is_over():
            self.model.stop_training = True


def _is_over(meter: Meter) -> bool:
    """A step begins; whether enough were measured."""
    if not meter.begun:
        meter.begin()
        return False
    meter.lap("step")
    return meter.done()
