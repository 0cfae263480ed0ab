"""Why training on the parts of a batch would differ from training on the whole batch: one line for each reason in the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from elasticdl.common.errors import UserError
from elasticdl.elastic.keras.step import SEED_NAME, TrainStep, has_losses_of_batches
from elasticdl.elastic.training.divisible import (
    MOST_PROBED,
    Passes,
    rows_of,
    why_no_mean,
    why_no_sum,
    why_not_averaged,
    why_not_counted,
)
from elasticdl.tensorflow import keras, tf


def couplings(model: keras.Model, inputs: Any, targets: Any, loss: Callable[[Any, Any, Any], Any]) -> list[str]:
    """``inputs`` and ``targets``: of two samples or more; ``loss(inputs, targets, outputs)``: as in training. Changes no variable."""
    found = (_of_loss(model, inputs, targets, loss), *_of_layers(model), *_of_variables(model, inputs))
    return [text for text in found if text]


def couplings_of_step(step: TrainStep, inputs: Any, labels: Any) -> list[str]:
    """As `couplings`, where the loss is the step's own and layers may add to it."""

    def loss_of(_: Any, wanted: Any, given: Any) -> Any:
        loss = step.loss(wanted, given)
        return tf.reduce_mean(loss) + sum(tf.cast(tf.reduce_sum(term), loss.dtype) for term in step.model.losses)

    return couplings(step.model, inputs, labels, loss_of)


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


# -- variables that a layer of the user's own sets in a pass --


def _of_variables(model: keras.Model, inputs: Any) -> Iterator[str]:
    known = {id(each) for layer in _all_layers(model) if _is_kerass(layer) for each in layer.variables}
    probed = [each for each in model.non_trainable_variables if id(each) not in known and not _is_seed(each)]
    half, other = halves(inputs)
    if not probed or half is None:
        return
    batches = ((half, 0), (half, 1), (other, 0), (joined(half, half), 0), (joined(half, other), 0))
    try:
        passes = [_after(model, probed, rows, draw) for rows, draw in batches]
    except Exception:  # noqa: BLE001 - what raises in training as well is told there
        return
    for variable, *after in zip(probed, *passes, strict=True):
        kind = tf.as_dtype(variable.dtype)
        judge = why_not_averaged if kind.is_floating else why_not_counted if kind.is_integer else None
        if judge is not None:
            yield judge(variable.path, Passes(np.asarray(variable.numpy()), *after))


def _after(model: keras.Model, variables: Sequence[Any], inputs: Any, draw: int) -> list[Any]:
    begun = [(one, one.value + tf.cast(draw, one.dtype) if _is_seed(one) else one.value) for one in model.variables]
    with keras.StatelessScope(begun, collect_losses=True) as scope:
        model(inputs, training=True)
    return [np.asarray(scope.get_current_value(each)) for each in variables]


def _is_seed(variable: Any) -> bool:
    return bool(variable.path.rpartition("/")[2] == SEED_NAME)


def _is_kerass(layer: Any) -> bool:
    is_container = hasattr(layer, "layers") or hasattr(layer, "layer")
    return str(type(layer).__module__).partition(".")[0] == "keras" and not is_container


# -- metrics --


def couplings_of_metrics(metrics: Sequence[Any], update: Callable[[Any], object], batch: Any) -> list[str]:
    """``batch``: some samples with whatever ``update``, which has all metrics see them, is to be given.

    Raises:
        UserError: a metric has variables that can't be put together even from whole batches.
    """
    half, other = halves(batch)
    single = [inner for metric in metrics for inner in (getattr(metric, "metrics", None) or [metric])]
    variables = [(metric, each) for metric in single for each in metric.variables]
    if half is None or not variables:
        return []

    def after(rows: Any, begun: Sequence[Any]) -> list[Any]:
        with keras.StatelessScope(list(zip([each for _, each in variables], begun, strict=True))) as scope:
            update(rows)
        return [scope.get_current_value(each) for _, each in variables]

    first = [each.value for _, each in variables]
    passes = [after(half, first), after(other, first), after(joined(half, other), first)]
    passes.append(after(other, passes[0]))
    found: dict[str, str] = {}
    for (metric, variable), begun, *values in zip(variables, first, *passes, strict=True):
        problem, is_of_batches = why_no_sum(f"its variable {variable.name}", begun, *values)
        if is_of_batches:
            raise UserError(
                f"the metric {metric.name} ({type(metric).__name__}) can't be put together from steps and workers: {problem}; keep sums in it, or "
                "compute it in a callback"
            )
        if problem:
            line = f"the metric {metric.name} depends on the number of workers and the size of micro-batches: {problem}; have it give a "
            found.setdefault(metric.name, line + "value for each sample")
    return list(found.values())


# -- parts of a batch --


def most_probed(samples: int, batch: int) -> int:
    """``batch``: the most samples that may be computed at once."""
    return min(samples, max(2, min(MOST_PROBED, batch)))


def halves(batch: Any) -> tuple[Any, Any]:
    """Of an even number of rows; none if there are not two."""
    lengths = {len(leaf) for leaf in keras.tree.flatten(batch) if leaf is not None}
    size = min(lengths, default=0) // 2
    if not size or len(lengths) > 1:
        return None, None
    return rows_of(batch, slice(0, size)), rows_of(batch, slice(size, 2 * size))


def joined(one: Any, other: Any) -> Any:
    """The rows of both."""
    return keras.tree.map_structure(
        lambda left, right: left if left is None else tf.concat([left, right], 0), one, other
    )
