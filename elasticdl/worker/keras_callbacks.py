"""Keras's own callbacks where the trainer calls ours."""

from __future__ import annotations

from elasticdl.callbacks import Callback, Logs
from elasticdl.elastic.keras import callbacks
from elasticdl.worker.ledger import Ledger


class KerasCallbacks(callbacks.KerasCallbacks, Callback):
    """See `elasticdl.elastic.keras.callbacks.KerasCallbacks`."""

    _ledger: Ledger

    def on_train_batch_end(self, step: int, logs: Logs) -> None:
        self.after_step({"loss": self._ledger.epoch_loss})

    def on_test_batch_begin(self, batch: int) -> None:
        self._tell("on_test_batch_begin", batch, {})

    def on_test_batch_end(self, batch: int, logs: Logs) -> None:
        self._tell("on_test_batch_end", batch, dict(logs))
