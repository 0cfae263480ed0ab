"""What is the same for both frameworks: steps and samples as arguments, and the ready-made optimizers."""

from __future__ import annotations

import math
from collections.abc import Container
from numbers import Integral, Real
from types import ModuleType
from typing import Any, TypeVar

from elasticdl.common.errors import ArgumentError

Made = TypeVar("Made")


def checked_steps(steps: Any) -> int:
    """``steps`` if it is a whole number of at least 1.

    Raises:
        ArgumentError: it is not.
    """
    if isinstance(steps, bool) or not isinstance(steps, Integral):
        raise ArgumentError(f"steps must be a whole number of at least 1, not {_shown(steps)}")
    if steps < 1:
        raise ArgumentError(
            f"steps must be at least 1, not {steps}: it is the number of micro-batches per optimizer step"
        )
    return int(steps)


def take_steps(call: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, tuple[Any, ...]]:
    """``steps``, which is the first argument or given by name, and the other positional arguments.

    Raises:
        ArgumentError: it is missing or wrong; ``call`` is what the message shows.
    """
    if "steps" in kwargs:
        return checked_steps(kwargs.pop("steps")), args
    if not args:
        raise ArgumentError(f"{call} needs steps")
    return checked_steps(args[0]), args[1:]


def check_samples(samples: Any) -> None:
    """Let pass None and numbers above 0.

    Raises:
        ArgumentError: it is neither.
    """
    if samples is None:
        return
    if isinstance(samples, bool) or not isinstance(samples, Real):
        raise ArgumentError(f"samples must be the size of the micro-batch, a number, not a {type(samples).__name__}")
    if not 0 < float(samples) < math.inf:
        raise ArgumentError(f"samples must be above 0, the size of the micro-batch, not {samples}")


def ready_made(base: type[Made], library: ModuleType, kind: type, without: Container[str]) -> dict[str, type[Made]]:
    """By its name a subclass of ``base`` for each optimizer (a subclass of ``kind``) that a library's module has."""
    return {
        name: type(name, (base,), {"wraps": wrapped, "__module__": base.__module__})
        for name, wrapped in vars(library).items()
        if isinstance(wrapped, type) and issubclass(wrapped, kind) and wrapped is not kind and name not in without
    }


def _shown(value: Any) -> str:
    """The value if it is short, else its type: parameters given in the place of ``steps`` would fill the screen."""
    if isinstance(value, bool | float | str | None):
        return repr(value)
    return f"a {type(value).__name__}"
