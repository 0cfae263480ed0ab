"""What a compiled model can't have if its batches are to be divided; told in one line before anything is trained."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from elasticdl.common.errors import UserError
from elasticdl.tensorflow import keras

log = logging.getLogger(__name__)

MEAN = '"sum_over_batch_size"'


def check_compiled(model: keras.Model, call: str) -> None:
    """``call``: by which the model was given. It may have been compiled before that, or loaded as it was compiled.

    Raises:
        UserError: the optimizer accumulates gradients, or a loss is no mean.
    """
    if any(map(_accumulates, _with_parts(model.optimizer))):
        raise UserError(f"{call}: Model accumulates gradients by itself; give it the optimizer without accumulation")
    if has_loss(model, "sum"):
        raise UserError(f'{call}: a loss with reduction="sum" depends on the batch; use {MEAN}')
    if has_loss(model, "none", None):
        raise UserError(
            f"{call}: a loss with reduction=None gives one value for each sample, and Keras sums them; use {MEAN}"
        )


def warn_of_eagerness(model: keras.Model) -> None:
    if model.run_eagerly:
        log.warning(
            "compile(run_eagerly=True) is not looked at: Python code of the model and the loss runs when they are traced, and "
            "not in each step"
        )


def has_loss(model: keras.Model, *reductions: str | None) -> bool:
    return any(
        isinstance(loss, keras.losses.Loss) and loss.reduction in reductions for loss in keras.tree.flatten(model.loss)
    )


def _accumulates(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "gradient_accumulation_steps", None)) or hasattr(optimizer, "accumulated")


def _with_parts(optimizer: Any) -> Iterator[Any]:
    """The optimizer, and those of which it is made."""
    yield optimizer
    inner = [getattr(optimizer, "inner_optimizer", None), *(getattr(optimizer, "optimizers", None) or ())]
    for part in inner:
        if part is not None:
            yield from _with_parts(part)
