"""What a mean loss was divided by where a mask leaves elements out: the parts of a batch weigh by what is left of them.

Keras divides the loss of a batch by the number of its elements that are not masked. So a micro-batch contributes its loss
times the share of its elements that are left, and what is summed is divided by the share over the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elasticdl.tensorflow import keras, tf

LEAST = 1e-12  # share, of a batch of which nothing is left: regularizers count there, too


@dataclass(frozen=True, slots=True)
class Share:
    """``left``: of a batch's elements, those that are not masked; None if nothing is masked. ``problem``: why it can't be
    divided, if so."""

    left: Any = None
    problem: str = ""


NOTHING_MASKED = Share()


def share_of(outputs: Any, loss: tf.Tensor, *, more_losses: bool) -> Share:
    """While a function is traced. ``loss``: of ``outputs``; ``more_losses``: others, of the batch, were added to it."""
    leaves = keras.tree.flatten(outputs)
    masks = [getattr(leaf, "_keras_mask", None) for leaf in leaves]
    there = [mask for mask in masks if mask is not None]
    if not there or not reads(loss, there, leaves):
        return NOTHING_MASKED
    if any(mask is not masks[0] for mask in masks):
        return Share(problem="its outputs have different masks, and each loss is a mean over what its mask leaves")
    if more_losses:
        return Share(
            problem="a mask leaves elements out of the loss, but not of what add_loss or a regularizer of outputs adds"
        )
    return Share(tf.maximum(tf.reduce_mean(tf.cast(there[0], tf.float32)), LEAST))


def has_losses_of_batches(model: keras.Model) -> bool:
    """Within the scope of a call: whether it had losses besides those of regularized weights."""
    return len(model.losses) > sum(variable.regularizer is not None for variable in model.trainable_variables)


def is_scalar(loss: Any, labels: Any, outputs: Any) -> bool:
    """Whether a loss of the user's own gives one number, which Keras divides by nothing."""
    function = loss.call if isinstance(loss, keras.losses.Loss) else loss
    if not callable(function) or str(getattr(function, "__module__", "")).startswith("keras."):
        return False
    return len(tf.convert_to_tensor(function(labels, outputs)).shape) == 0


def reads(value: tf.Tensor, wanted: Sequence[tf.Tensor], ends: Sequence[tf.Tensor] = ()) -> bool:
    """Whether a tensor was computed from one of the ``wanted`` other than by way of the ``ends``."""
    targets, passed, open_ = {id(each) for each in wanted}, {id(each) for each in ends}, [value]
    while open_:
        tensor = open_.pop()
        if id(tensor) in targets:
            return True
        if id(tensor) not in passed:
            passed.add(id(tensor))
            open_ += tensor.op.inputs
    return False
