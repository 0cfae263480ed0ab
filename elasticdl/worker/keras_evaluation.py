"""Evaluating a Keras model over all members of the world, each sample once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.batch_plan import split
from elasticdl.elastic.keras.collective import KerasCollective
from elasticdl.elastic.keras.loader import fetch
from elasticdl.worker.learner import Evaluation

METRIC_ROWS = 4096  # that a Keras metric is given at once: some need hundreds of numbers for each

Metric = Any  # a function (labels, outputs), or a Keras metric


class BatchWatcher(Protocol):
    """Is told what Keras tells of the batches of an evaluation."""

    def on_test_batch_begin(self, batch: int) -> None: ...

    def on_test_batch_end(self, batch: int, logs: Mapping[str, float]) -> None:
        """``logs``: over this member's samples so far."""


@dataclass(frozen=True, slots=True)
class NamedMetric:
    """``output``: the one of several that it looks at; empty for all that the model puts out."""

    name: str
    output: str
    metric: Metric

    def value(self, labels: Any, outputs: Any) -> float:
        """Over all samples. A function may also return a value for each, of which this is the mean.

        Raises:
            UserError: there is no such output, or what comes out is no number.
        """
        if self.output:
            if not isinstance(outputs, Mapping) or self.output not in outputs:
                there = f"has {', '.join(outputs)}" if isinstance(outputs, Mapping) else "has outputs without names"
                raise UserError(f"eval_metrics_fn(): there is no output {self.output!r}; the model {there}")
            outputs = outputs[self.output]
            labels = labels.get(self.output, labels) if isinstance(labels, Mapping) else labels
        found = (
            self._of_keras(labels, outputs) if hasattr(self.metric, "update_state") else self.metric(labels, outputs)
        )
        try:
            return float(np.mean(np.asarray(found, np.float64)))
        except (TypeError, ValueError) as error:
            raise UserError(f"eval_metrics_fn(): {self.name} is no number but {type(found).__name__}") from error

    def _of_keras(self, labels: Any, outputs: Any) -> Any:
        self.metric.reset_state()
        rows = len(keras.tree.flatten(outputs)[0])
        for start in range(0, rows, METRIC_ROWS):
            cut = slice(start, start + METRIC_ROWS)
            self.metric.update_state(_cut(labels, cut), _cut(outputs, cut))
        return self.metric.result()


def name_metrics(metrics: Mapping[str, Any]) -> list[NamedMetric]:
    """From what ``eval_metrics_fn()`` returns: by name, or by output and name; Keras metrics or their classes."""
    named = []
    for name, found in metrics.items():
        inner = {f"{name}_{each}": (name, metric) for each, metric in found.items()} if isinstance(found, dict) else {}
        for title, (output, metric) in (inner or {name: ("", found)}).items():
            named.append(NamedMetric(title, output, metric() if isinstance(metric, type) else metric))
    return named


@dataclass(slots=True)
class KerasEvaluator:
    """What is evaluated, and how; `evaluate` does it. ``advance`` is called for each batch."""

    model: keras.Model
    dataset: Any
    loss: Callable[[Any, Any], Any]
    metrics: list[NamedMetric]
    batch_size: int
    collective: KerasCollective
    advance: Callable[[], None]
    _traced: Any = field(init=False)

    def __post_init__(self) -> None:
        self._traced = tf.function(self._forward, reduce_retracing=True, autograph=False)

    def warm_up(self, inputs: Any, labels: Any) -> None:
        """Trace for any number of samples, and run once."""
        specs = keras.tree.map_structure(
            lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), (inputs, labels)
        )
        self._traced.get_concrete_function(*specs)
        self._traced(inputs, labels)

    def evaluate(self, watcher: BatchWatcher) -> Evaluation:
        """Each member runs a contiguous share; outputs are gathered, so that metrics are exact and equal everywhere.

        ``watcher``: is told of this member's batches.

        Raises:
            UserError: the model's outputs or the labels are not tensors with one row a sample.
            WorldBroken: a member was lost meanwhile.
        """
        world = self.collective.world
        samples = len(self.dataset)
        ends = [0, *accumulate(split(samples, world.size))]
        outputs, labels, loss_sum = self._run(range(ends[world.rank], ends[world.rank + 1]), watcher)
        total = self.collective.sum(np.array([loss_sum]), "elasticdl.evaluation.loss")
        outputs = self._gather(outputs, "outputs")
        labels = self._gather(labels, "labels")
        metrics = {metric.name: metric.value(labels, outputs) for metric in self.metrics}
        return Evaluation(samples, {"loss": float(total[0]) / samples, **metrics})

    def _forward(self, inputs: Any, labels: Any) -> tuple[Any, tf.Tensor]:
        outputs = self.model(inputs, training=False)
        wide = keras.tree.map_structure(_portable, outputs)  # as in training
        loss = tf.reduce_mean(tf.cast(self.loss(labels, wide), tf.float32))
        return outputs, tf.add_n([loss, *(tf.cast(term, tf.float32) for term in self.model.losses)])

    def _run(self, share: range, watcher: BatchWatcher) -> tuple[Any, Any, float]:
        """Outputs and labels of the given samples, one row each, and the sum of their losses."""
        rows: list[tuple[Any, Any]] = []
        loss_sum, seen = 0.0, 0
        for inputs, labels, count in self._batches(share):
            self.advance()
            if len(share):
                watcher.on_test_batch_begin(len(rows))
            outputs, loss = self._traced(inputs, labels)
            _require_rows("the model's output", outputs, count)
            _require_rows("the labels", labels, count)
            loss_sum, seen = loss_sum + float(loss) * count, seen + count
            if len(share):
                watcher.on_test_batch_end(len(rows), {"loss": loss_sum / seen})
            rows.append(keras.tree.map_structure(_portable, (outputs, labels)))
        columns = [
            keras.tree.map_structure(lambda *leaves: tf.concat(leaves, 0), *column)
            for column in zip(*rows, strict=True)
        ]
        outputs, labels = (_cut(column, slice(len(share))) for column in columns)
        return outputs, labels, loss_sum if len(share) else 0.0

    def _batches(self, share: range) -> Iterator[tuple[Any, Any, int]]:
        # A member without samples runs one all the same, to know shape and type of the rows that it has none of.
        indices = np.asarray(list(share) or [0], np.int64)
        batches = [indices[start : start + self.batch_size] for start in range(0, len(indices), self.batch_size)]
        with closing(fetch(self.dataset, batches)) as loaded:
            for batch, (inputs, labels) in zip(batches, loaded, strict=True):
                yield inputs, labels, len(batch)

    def _gather(self, value: Any, name: str) -> Any:
        leaves = keras.tree.flatten(value)
        gathered = [
            self.collective.gather_rows(leaf, f"elasticdl.evaluation.{name}.{number}")
            for number, leaf in enumerate(leaves)
        ]
        return keras.tree.pack_sequence_as(value, gathered)


def _require_rows(what: str, value: Any, rows: int) -> None:
    for leaf in keras.tree.flatten(value):
        if leaf.dtype == tf.string:
            raise UserError(f"evaluation: {what} holds texts; expected numbers")
        if leaf.shape.rank == 0 or leaf.shape[0] != rows:
            raise UserError(
                f"evaluation: {what} must have one row a sample: {rows}, but its shape is {tuple(leaf.shape)}"
            )


def _portable(rows: tf.Tensor) -> tf.Tensor:
    """In a type that every collective can carry, and that no loss overflows."""
    return tf.cast(rows, tf.float32) if rows.dtype in (tf.float16, tf.bfloat16) else rows


def _cut(value: Any, cut: slice) -> Any:
    return keras.tree.map_structure(lambda leaf: leaf[cut], value)
