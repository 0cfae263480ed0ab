"""What of a model makes its samples depend on each other, so that a batch is not the same as its parts; a line for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from elasticdl.elastic.keras.masks import has_losses_of_batches
from elasticdl.elastic.training.divisible import rows_of, why_no_mean
from elasticdl.tensorflow import keras, tf


def couplings(model: keras.Model, inputs: Any, targets: Any, loss: Callable[[Any, Any, Any], Any]) -> list[str]:
    """``inputs`` and ``targets``: of two samples or more; ``loss(inputs, targets, outputs)``: as in training. Changes no variable."""
    return [text for text in (_of_loss(model, inputs, targets, loss), *_of_layers(model)) if text]


def with_added(model: keras.Model, loss: Any) -> Any:
    """A mean loss, and what layers add to it."""
    return tf.reduce_mean(loss) + sum(tf.cast(tf.reduce_sum(term), loss.dtype) for term in model.losses)


def _of_loss(model: keras.Model, inputs: Any, targets: Any, loss: Callable[[Any, Any, Any], Any]) -> str:
    leaves = keras.tree.flatten(inputs)
    if any(len(leaf) < 2 for leaf in leaves):
        return ""
    with _apart(model):
        outputs = model(inputs, training=False)
        adds = has_losses_of_batches(model)
    if any(getattr(leaf, "_keras_mask", None) is not None for leaf in keras.tree.flatten(outputs)):
        return ""  # the parts weigh by what is left of them

    def of(given: Any, predicted: Any) -> float:
        rows, wanted = given
        with _apart(model):
            return float(tf.reduce_mean(loss(rows, wanted, model(rows, training=False) if adds else predicted)))

    first_two = slice(0, 2)
    return why_no_mean(of, rows_of((inputs, targets), first_two), rows_of(outputs, first_two))


def _apart(model: keras.Model) -> keras.StatelessScope:
    """Within, no variable changes, and what layers add to the loss is collected."""
    return keras.StatelessScope([(each, each.value) for each in model.variables], collect_losses=True)


def _of_layers(model: keras.Model) -> Iterator[str]:
    for layer in _all_layers(model):
        if getattr(layer, "synchronized", False):
            yield (
                f"{layer.name} normalizes by each worker's part of the batch: synchronized=True has no effect, as workers are no replicas "
                "of TensorFlow's; its moving averages are those of all workers"
            )


def _all_layers(layer: Any) -> Iterator[Any]:
    for inner in getattr(layer, "layers", ()):
        yield inner
        yield from _all_layers(inner)
