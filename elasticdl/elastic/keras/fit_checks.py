"""What can be told to be wrong about the arguments of ``fit`` before anything is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import keras
import numpy as np

from elasticdl.common.errors import ArgumentError, UserError

NOT_NUMBERS = "OUSMm"  # NumPy's kinds: objects, texts, bytes, dates and times

Rule = tuple[Callable[[Any], bool], str]  # whether a value can be used, and which can


def check_values(given: Mapping[str, Any]) -> None:
    """``given``: arguments of ``fit`` by their names, as `RULES` has them.

    Raises:
        ArgumentError: one can't be right, whatever the others are.
    """
    for name, value in given.items():
        holds, right = RULES[name]
        if not holds(value):
            raise ArgumentError(f"fit({name}={_shown(value)}): must be {right}")


def require_arrays(call: str, given: Mapping[str, Any]) -> None:
    """As Keras has it, a list is no array but one for each of its items.

    Raises:
        UserError: one of the ``given`` is no array, and has something else than arrays in it.
    """
    for name, value in given.items():
        for leaf in keras.tree.flatten(value):
            if not np.ndim(leaf):
                raise UserError(
                    f"{call}: {name} has {_article(leaf)} where an array belongs; make arrays of lists by numpy.array()"
                )


def require_numbers(call: str, given: Mapping[str, Any]) -> None:
    """Raises:
    UserError: one of the ``given`` is no number, or array of such, or nested ones.
    """
    for name, value in given.items():
        for leaf in keras.tree.flatten(value):
            array = np.asarray(leaf)
            first = array.flat[0] if array.size else 0
            if array.dtype.kind in NOT_NUMBERS and not isinstance(first, Real):
                raise UserError(f"{call}: {name} must be numbers, not {_shown(first)}; classes are numbered from 0")


def check_weights(call: str, weights: Any, model: keras.Model) -> None:
    """``weights``: of one sample. Keras's own losses leave out the last axis of what the model gives; others are not
    known, so what they are multiplied by is not looked at.

    Raises:
        UserError: a loss can't be multiplied by them.
    """
    outputs = getattr(model, "outputs", None)
    if not outputs or not all(map(_is_kerass, keras.tree.flatten(model.loss))):
        return
    wanted = [tuple(output.shape[1:-1]) for output in outputs]
    for leaf in keras.tree.flatten(weights):
        shape = np.shape(leaf)
        core = shape[:-1] if shape[-1:] == (1,) else shape
        if not any(_broadcasts(core, each) for each in wanted):
            steps = " or ".join(f"(samples, {', '.join(map(str, each))})" for each in wanted if each)
            raise UserError(
                f"{call}: sample weights of shape (samples, {', '.join(map(str, shape))}) don't fit the loss; expected "
                f"(samples,){' or ' if steps else ''}{steps}"
            )


def _broadcasts(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) <= len(wanted) and all(
        size == 1 or other in (None, size) for size, other in zip(shape, wanted, strict=False)
    )


def _is_kerass(loss: Any) -> bool:
    return isinstance(loss, str) or str(getattr(loss, "__module__", "")).startswith("keras.")


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


def _is_frequency(value: Any) -> bool:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Container):
        return _whole(1)(value)
    return not isinstance(value, Iterable) or all(map(_whole(1), value))


def _is_class_weight(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, Mapping) and all(
        _is_number(key) and key == int(key) and _is_number(weight) for key, weight in value.items()
    )


def _article(value: Any) -> str:
    name = type(value).__name__
    return "nothing" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _shown(value: Any) -> str:
    """One line, and not a long one."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


RULES: Mapping[str, Rule] = {
    "epochs": (_whole(0), "a whole number of at least 0"),
    "initial_epoch": (_whole(0), "a whole number of at least 0"),
    "validation_freq": (_is_frequency, "a whole number of at least 1, or a list of epochs, counted from 1"),
    "validation_split": (_is_share, "a number of at least 0 and below 1, the share of the samples to validate on"),
    "class_weight": (_is_class_weight, "a dict of weights by the number of the class, as {0: 1.0, 1: 2.5}"),
}
