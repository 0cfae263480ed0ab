"""What is the same for both frameworks: steps and samples as arguments, and the ready-made optimizers."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, ClassVar

from elasticdl.common.errors import ArgumentError


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


class ReadyMade:
    """Before a wrapper among the base classes: makes the optimizer that it wraps."""

    wraps: ClassVar[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """``(steps, ...)`` or ``(..., steps=steps)``; the rest is as for the framework's class."""
        if "steps" in kwargs:
            args = (kwargs.pop("steps"), *args)
        if not args:
            raise ArgumentError(f"{type(self).__name__}(steps, ...) needs steps")
        steps = checked_steps(args[0])
        super().__init__(self.wraps(*args[1:], **kwargs), steps)  # type: ignore[call-arg]


def ready_made(wraps: type, *bases: type, place: str) -> type[Any]:
    """A subclass of the bases with the name of the optimizer that it makes. ``place``: the module that it is in."""
    return type(wraps.__name__, bases, {"wraps": wraps, "__module__": place})


def _shown(value: Any) -> str:
    """The value if it is short, else its type: parameters given in the place of ``steps`` would fill the screen."""
    if isinstance(value, bool | float | str | None):
        return repr(value)
    return f"a {type(value).__name__}"
