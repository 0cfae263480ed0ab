"""Whether what is computed of a batch is the mean over its samples, so that parts of the batch can be computed apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_ROUNDING = 1e-3
_ROWS = (slice(0, 2), slice(0, 1), slice(1, 2))


def why_no_mean(loss: Callable[[Any, Any], float], labels: Any, outputs: Any) -> str:
    """In words, why a loss of labels and outputs is not the mean over samples; empty if it is, as far as the first two tell.

    ``labels``, ``outputs``: nested, with one row for each of two samples or more.
    """
    both, first, second = (loss(rows_of(labels, rows), rows_of(outputs, rows)) for rows in _ROWS)
    scale = max(abs(both), abs(first), abs(second))
    if not abs(2 * both - first - second) > _ROUNDING * scale:  # nor if it is no number
        return ""
    return (
        f"the loss is no mean over samples: of the first two together it is {both:.4g}, of each alone {first:.4g} and {second:.4g}. "
        "Each worker computes it of its part of the batch, so the model depends on their number, and on the size of micro-batches"
    )


def rows_of(value: Any, rows: slice) -> Any:
    """These rows of all arrays in a nested value."""
    if isinstance(value, Mapping):
        return {key: rows_of(each, rows) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(rows_of(each, rows) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(rows_of(each, rows) for each in value)
    return value[rows] if getattr(value, "shape", None) else value
