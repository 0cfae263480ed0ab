"""Evaluating a Keras model."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticdl.common.errors import UserError
from elasticdl.elastic.keras.loader import fetch
from elasticdl.elastic.keras.step import any_batch, widen
from elasticdl.worker.evaluation import Array, Evaluator, Metrics, require_rows

METRIC_ROWS = 4096  # that a Keras metric is given at once: some need hundreds of numbers for each

Metric = Any  # a function (labels, outputs), or a Keras metric


@dataclass(frozen=True, slots=True)
class NamedMetric:
    """Called for its value. ``output``: the one of several that it looks at; empty for all that the model puts out."""

    name: str
    output: str
    metric: Metric

    def __call__(self, labels: Any, outputs: Any) -> float:
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


def name_metrics(metrics: Mapping[str, Any]) -> Metrics:
    """From what ``eval_metrics_fn()`` returns: by name, or by output and name; Keras metrics or their classes."""
    named = {}
    for name, found in metrics.items():
        inner = {f"{name}_{each}": (name, metric) for each, metric in found.items()} if isinstance(found, dict) else {}
        for title, (output, metric) in (inner or {name: ("", found)}).items():
            named[title] = NamedMetric(title, output, metric() if isinstance(metric, type) else metric)
    return named


@dataclass(slots=True)
class KerasEvaluator(Evaluator):
    """Outputs and labels may be nested; metrics are given tensors of TensorFlow's."""

    _traced: Any = field(init=False)

    def __post_init__(self) -> None:
        self._traced = tf.function(self._forward, reduce_retracing=True, autograph=False)

    def warm_up(self, inputs: Any, labels: Any) -> None:
        """Trace for any number of samples, and run once."""
        self._traced.get_concrete_function(*any_batch(inputs, labels))
        self._traced(inputs, labels)

    def _forward(self, inputs: Any, labels: Any) -> tuple[Any, tf.Tensor]:
        outputs = self.model(inputs, training=False)
        wide = keras.tree.map_structure(widen, outputs)  # as in training
        loss = tf.reduce_mean(tf.cast(self.loss(labels, wide), tf.float32))
        return outputs, tf.add_n([loss, *(tf.cast(term, tf.float32) for term in self.model.losses)])

    def _fetch(self, batches: Sequence[Array]) -> Generator[tuple[Any, Any], None, None]:
        return fetch(self.dataset, batches)

    def _test(self, inputs: Any, labels: Any, rows: int) -> tuple[Any, float]:
        outputs, loss = self._traced(inputs, labels)
        for what, value in (("the model's output", outputs), ("the labels", labels)):
            for leaf in keras.tree.flatten(value):
                if leaf.dtype == tf.string:
                    raise UserError(f"evaluation: {what} holds texts; expected numbers")
                require_rows(what, leaf, rows)
        return (outputs, labels), float(loss)

    def _flatten(self, value: Any) -> list[Array]:
        return [np.asarray(widen(leaf)) for leaf in keras.tree.flatten(value)]

    def _join(self, columns: list[Array], like: Any) -> tuple[Any, Any]:
        with tf.device("CPU:0"):
            outputs, labels = keras.tree.pack_sequence_as(like, [tf.convert_to_tensor(column) for column in columns])
        return outputs, labels


def _cut(value: Any, cut: slice) -> Any:
    return keras.tree.map_structure(lambda leaf: leaf[cut], value)
