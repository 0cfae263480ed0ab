"""The step of a compiled model: its loss, and its metrics as further sums over all workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from elasticdl.elastic.keras.layout import Layout
from elasticdl.elastic.keras.step import Sums, TrainStep

Moves = list[NDArray[np.float64]]


@dataclass(slots=True)
class EpochLedger:
    """The present epoch so far, over all workers: part of the training state."""

    epoch_steps: int = 0
    samples: int = 0
    loss_sum: float = 0.0
    moves: Moves = field(default_factory=list)  # of the metrics' variables since the beginning of the epoch

    def begin_epoch(self) -> None:
        self.epoch_steps, self.samples, self.loss_sum, self.moves = 0, 0, 0.0, []

    def add(self, loss: float, samples: int, moves: Moves) -> None:
        self.epoch_steps += 1
        self.samples += samples
        self.loss_sum += loss * samples
        before = self.moves or [np.zeros_like(move) for move in moves]
        self.moves = [total + move for total, move in zip(before, moves, strict=True)]

    @property
    def loss(self) -> float:
        return self.loss_sum / self.samples if self.samples else float("nan")

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class FitStep(TrainStep):
    """As `TrainStep`; the moves of the metrics' variables stand among the sums, before the loss.

    So metrics are over all samples of all workers, for all whose variables are sums over samples, as nearly all of Keras's.
    """

    def __init__(self, model: keras.Model, inputs: Any, labels: Any) -> None:
        """``model`` is built and compiled; ``inputs`` and ``labels`` are some samples."""
        model._symbolic_build(data_batch=(inputs, labels))  # no public function builds loss and metrics
        self._metrics = model._compile_metrics
        self._seen: tuple[Any, Any] | None = None
        self.last_moves: Moves = []
        if self._metrics is not None:
            self._metrics.reset_state()
        self._variables = list(self._metrics.variables) if self._metrics is not None else []
        self._first = [np.array(variable) for variable in self._variables]
        super().__init__(model, self._compiled_loss, model.optimizer)
        shapes, dtypes = list(self.layout.shapes), list(self.layout.dtypes)
        shapes[-1:-1] = [value.shape for value in self._first]
        dtypes[-1:-1] = ["float32"] * len(self._first)
        self.layout = Layout(tuple(shapes), tuple(dtypes), self.layout.vote)
        self._test = tf.function(self._trace_test, reduce_retracing=True, autograph=False)

    def apply(self, sums: Sums) -> None:
        end = len(sums) - 1
        start = end - len(self._first)
        self.last_moves = [np.asarray(move, np.float64) for move in sums[start:end]]
        super().apply([*sums[:start], sums[end]])

    def test(self, inputs: Any, labels: Any) -> Moves:
        """The mean loss over a batch that is not trained on, and the moves of the metrics."""
        return [np.asarray(value, np.float64) for value in self._test(inputs, labels)]

    @property
    def move_shapes(self) -> list[tuple[int, ...]]:
        return [value.shape for value in self._first]

    def logs(self, loss: float, moves: Sequence[Any]) -> dict[str, Any]:
        """As ``fit`` reports them: the loss, and each metric by its name."""
        if self._metrics is None or not moves:
            return {"loss": loss}
        for variable, first, move in zip(self._variables, self._first, moves, strict=True):
            variable.assign(first + move)
        found = {name: _plain(value) for name, value in self._metrics.result().items()}
        self._metrics.reset_state()
        return {"loss": loss, **found}

    def _compiled_loss(self, labels: Any, outputs: Any) -> Any:
        self._seen = labels, outputs
        with keras.StatelessScope():  # it would count the losses of several outputs in variables of its own
            return self.model._compile_loss(labels, outputs)

    def _trace_micro(self, inputs: Any, labels: Any, weight: tf.Tensor, lead: tf.Tensor, draw: tf.Tensor) -> Sums:
        *sums, part = super()._trace_micro(inputs, labels, weight, lead, draw)
        assert self._seen is not None
        moves, self._seen = self._moves(*self._seen), None
        return [*sums, *moves, part]

    def _trace_test(self, inputs: Any, labels: Any) -> Sums:
        self.traces["test"] += 1
        outputs = self.model(inputs, training=False)
        loss = self._compiled_loss(labels, outputs)
        for term in self.model.losses:
            loss += tf.cast(term, loss.dtype)
        return [loss, *self._moves(labels, outputs)]

    def _moves(self, labels: Any, outputs: Any) -> Sums:
        if not self._first:
            return []
        after = self._metrics.stateless_update_state([tf.constant(value) for value in self._first], labels, outputs)
        return [tf.cast(new - value, tf.float32) for new, value in zip(after, self._first, strict=True)]


def _plain(value: Any) -> Any:
    array = np.asarray(value)
    return array.tolist() if array.ndim else float(array)
