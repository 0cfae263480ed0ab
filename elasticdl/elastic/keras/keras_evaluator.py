"""Evaluating a Keras model over all members of a world; see `elasticdl.elastic.training.evaluation`."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elasticdl.common.errors import UserError
from elasticdl.elastic.keras.keras_state import LayerAttributes, Variables, tensors_of
from elasticdl.elastic.keras.loader import ElasticContext, fetch
from elasticdl.elastic.keras.step import any_batch, widen
from elasticdl.elastic.training.evaluation import Array, Evaluator, Metrics, require_rows
from elasticdl.elastic.training.inference_state import InferenceState
from elasticdl.tensorflow import keras, tf

METRIC_ROWS = 4096  # that a Keras metric is given at once: some need hundreds of numbers for each


@dataclass(frozen=True, slots=True)
class NamedMetric:
    """Called for its value. ``output``: the one of several that it looks at; empty for all that the model puts out."""

    name: str
    output: str
    metric: Any  # a function (labels, outputs), or a Keras metric

    def __call__(self, labels: Any, outputs: Any) -> float:
        """Over all samples. A function may also return a value for each, of which this is the mean."""
        if self.output:
            if not isinstance(outputs, Mapping) or self.output not in outputs:
                there = f"has {', '.join(outputs)}" if isinstance(outputs, Mapping) else "has outputs without names"
                raise UserError(f"eval_metrics_fn(): there is no output {self.output!r}; the model {there}")
            outputs = outputs[self.output]
            labels = labels.get(self.output, labels) if isinstance(labels, Mapping) else labels
        if hasattr(self.metric, "update_state"):
            found = self._of_keras(labels, outputs)
        else:
            with tf.device("CPU:0"):
                given = keras.tree.map_structure(tf.convert_to_tensor, (labels, outputs))
            found = self.metric(*given)
        try:
            return float(np.mean(np.asarray(found, np.float64)))
        except (TypeError, ValueError) as error:
            raise UserError(f"eval_metrics_fn(): {self.name} is no number but {type(found).__name__}") from error

    def _of_keras(self, labels: Any, outputs: Any) -> Any:
        self.metric.reset_state()
        for start in range(0, len(keras.tree.flatten(outputs)[0]), METRIC_ROWS):
            rows = slice(start, start + METRIC_ROWS)
            self.metric.update_state(*keras.tree.map_structure(lambda leaf, rows=rows: leaf[rows], (labels, outputs)))
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
    """Outputs and labels may be nested."""

    context: ElasticContext
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
        if self.loss is None:
            return outputs, tf.zeros(())
        loss = tf.reduce_mean(tf.cast(self.loss(labels, wide), tf.float32))
        return outputs, tf.add_n([loss, *(tf.cast(term, tf.float32) for term in self.model.losses)])

    def fetch(self, batches: Iterable[Array]) -> Generator[tuple[Any, Any], None, None]:
        return fetch(self.dataset, batches)

    def test(self, inputs: Any, labels: Any, rows: int) -> tuple[Any, float]:
        outputs, loss = self._traced(inputs, labels)
        return (outputs, labels), float(loss)

    def flatten(self, value: Any, rows: int) -> list[Array]:
        for what, each in zip(("the model's output", "the labels"), value, strict=True):
            for leaf in keras.tree.flatten(each):
                if leaf.dtype == tf.string:
                    raise UserError(f"evaluation: {what} holds texts; expected numbers")
                require_rows(f"evaluation: {what}", leaf, rows)
        return [np.asarray(widen(leaf)) for leaf in keras.tree.flatten(value)]

    def state(self, role: str, values: dict[str, Any]) -> InferenceState:
        model = Variables("model", lambda: self.model.variables), LayerAttributes(self.model)
        return InferenceState(self.context, tensors_of(self.context), role, self.dataset, model, values)

    def join(self, columns: list[Array], like: Any) -> tuple[Any, Any]:
        outputs, labels = keras.tree.pack_sequence_as(like, columns)
        return outputs, labels
