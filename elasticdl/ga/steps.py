"""How many micro-batches make an optimizer step: the one argument that both frameworks take."""

from __future__ import annotations

from numbers import Integral
from typing import Any

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


def _shown(value: Any) -> str:
    """The value if it is short, else its type: parameters given in the place of ``steps`` would fill the screen."""
    if isinstance(value, bool | float | str | None):
        return repr(value)
    return f"a {type(value).__name__}"
