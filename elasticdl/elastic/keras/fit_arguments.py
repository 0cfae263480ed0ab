"""What ``compile`` and ``fit`` were given, made into what elastic training needs; what it can't do is refused in one line."""

from __future__ import annotations

import logging
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from elasticdl.common.errors import ArgumentError, UserError
from elasticdl.tensorflow import keras

log = logging.getLogger(__name__)


def require(name: str, value: Any, right: str, *, holds: bool) -> None:
    """Raises ArgumentError unless the value of this argument of ``fit`` is ``right``."""
    if not holds:
        raise ArgumentError(f"fit({name}={shown(value)}): must be {right}")


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _is_frequency(value: Any) -> bool:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Container):
        return _is_whole(value, 1)
    return not isinstance(value, Iterable) or all(_is_whole(each, 1) for each in value)


def shown(value: Any) -> str:
    """One line, and not a long one."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


# What to do instead of giving an argument that is refused.
INSTEAD = {
    "validation_steps": "validation is on all of validation_data; leave it out, or give fewer samples there",
}


@dataclass(frozen=True, slots=True)
class FitOptions:
    """What ``fit`` is told besides data and callbacks."""

    epochs: int
    initial_epoch: int
    verbose: int
    shuffle: bool
    validation_freq: int | Container[int]
    steps_per_epoch: int | None = None  # of a pass through the samples, or what is left of it

    def __post_init__(self) -> None:
        """Raises ArgumentError if there is no such epoch, or no such frequency."""
        least = "a whole number of at least 0"
        require("epochs", self.epochs, least, holds=_is_whole(self.epochs, 0))
        require("initial_epoch", self.initial_epoch, least, holds=_is_whole(self.initial_epoch, 0))
        often, steps = self.validation_freq, self.steps_per_epoch
        right = "a whole number of at least 1, or a list of epochs, counted from 1"
        require("validation_freq", often, right, holds=_is_frequency(often))
        right = "a whole number of at least 1, or None"
        require("steps_per_epoch", steps, right, holds=steps is None or _is_whole(steps, 1))

    def validates(self, epoch: int) -> bool:
        """Whether there is a validation at the end of this epoch, counted from 0."""
        if isinstance(self.validation_freq, Container):
            return epoch + 1 in self.validation_freq
        return (epoch + 1) % self.validation_freq == 0


def refuse(others: Mapping[str, Any]) -> None:
    """Raises UserError if some argument that means something was given."""
    for name, value in others.items():
        if value is not None:
            raise UserError(f"fit({name}=) is not supported: {INSTEAD.get(name, 'leave it out')}")


def bounded(number: Any, most: int | None) -> Any:
    """``number``, as `fit` was given it, or what Keras's configuration allows for a trial (``keras.config.set_max_epochs``)."""
    if most is None or not (number is None or _is_whole(number, 0)):  # what is no number is refused as such
        return number
    return most if number is None else min(number, most)


def verbosity(verbose: int | str, *, alone: bool) -> int:
    """Raises ArgumentError if Keras knows no such value."""
    if verbose == "auto":
        return 1 if alone else 2  # a line for each epoch in a log
    if verbose not in (0, 1, 2):
        raise ArgumentError(f'fit(verbose={verbose!r}): must be "auto", 0, 1 or 2')
    return int(verbose)


def complete(callbacks: Any, verbose: int) -> tuple[keras.callbacks.History, list[keras.callbacks.Callback]]:
    """The history, and all callbacks with it and what shows progress, in Keras's order."""
    given = [each for each in keras.tree.flatten(callbacks) if each is not None]
    for callback in given:
        if not isinstance(callback, keras.callbacks.Callback):
            raise UserError(f"fit(callbacks=): {type(callback).__name__} is not a keras.callbacks.Callback")
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise UserError("fit(callbacks=): BackupAndRestore is not supported; use ModelCheckpoint")
    histories = [each for each in given if isinstance(each, keras.callbacks.History)]
    history = histories[0] if histories else keras.callbacks.History()
    progress = [keras.callbacks.ProgbarLogger()] if verbose else []
    return history, [*progress, *given, *([] if histories else [history])]


# -- a compiled model whose batches are to be divided --

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
