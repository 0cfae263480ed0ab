"""Whether what is computed of a batch is the mean over its samples, so that parts of the batch can be computed apart.

And how values within nested ones are reached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

# Nested values: dicts, lists and tuples, and the leaves in them.


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The value with what ``function`` makes of each leaf in its place. Dicts of any kind become plain ones, named tuples stay such."""
    if isinstance(value, dict):
        return {key: mapped(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [mapped(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return function(value)


def leaves(value: Any) -> list[Any]:
    """In order; None is one."""
    if not isinstance(value, dict | list | tuple):
        return [value]
    found: list[Any] = []
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            pending += [*each.values()][::-1]
        elif isinstance(each, list | tuple):
            pending += each[::-1]
        else:
            found.append(each)
    return found


MOST_PROBED = 8  # samples
_ROUNDING = 1e-3
_MORE = 0.2  # of a move, that makes another one
_NOTHING = 1e-6  # is zero but for rounding, as is a mean of what batch norm gives
_DIVIDED = (
    "Each worker does so for its part of the batch, so it depends on their number, and on the size of micro-batches"
)
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


@dataclass(frozen=True, slots=True)
class Passes:
    """What a forward pass has made of a variable, which was ``begun`` before each: on one half of some samples, the same ``again``
    with other random draws, the ``other`` half, the first half ``twice``, and on ``both`` halves."""

    begun: Any
    half: Any
    again: Any
    other: Any
    twice: Any
    both: Any


def why_not_averaged(name: str, passes: Passes) -> str:
    """In words, why the value after a batch is not the mean of those after its parts; empty if nothing tells so. ``name``: of the variable.

    Of batch norm's statistics, which are no such means to the last digit, nothing is told.
    """
    begun, half, again, other, twice, both = _arrays(passes)
    if _differ(half, again) or not np.isfinite(twice).all():
        return ""  # it is drawn
    moves = np.maximum(abs(half - begun), abs(twice - begun))
    if (abs(twice - half) > np.maximum(_MORE * moves, _ROUNDING * abs(begun) + _NOTHING)).any():
        return (
            f"{name} moves by more for more samples, as a sum does: in a step it becomes the mean over the workers. {_DIVIDED}: make it a mean "
            "over samples"
        )
    return _of_extremes(name, "it becomes the mean over the workers", half, other, both, (half + other) / 2)


def why_not_counted(name: str, passes: Passes) -> str:
    """As `why_not_averaged`, of whole numbers: these count either passes or samples."""
    begun, half, again, other, _, both = _arrays(passes)
    if _differ(half, again) or not _differ(half, other):
        return ""
    return _of_extremes(name, "its moves are added up or the first one counts", half, other, both, half + other - begun)


def _of_extremes(name: str, instead: str, half: Any, other: Any, both: Any, made: Any) -> str:
    for found, extreme in ((np.maximum, "largest"), (np.minimum, "smallest")):
        if _differ(half, other) and _differ(both, made) and not _differ(both, found(half, other)):
            return f"{name} keeps the {extreme} value of a batch: in a step {instead}. {_DIVIDED}: compute it in a callback"
    return ""


def why_no_sum(name: str, begun: Any, half: Any, other: Any, both: Any, chained: Any) -> tuple[str, bool]:
    """Of a metric's variable: in words, why what parts of a batch move it by does not add up; and whether not even batches do.

    ``half``, ``other``: after each half of a batch; ``both``: after the whole; ``chained``: after one half and then the other.
    """
    begun, half, other, both, chained = (np.asarray(each, np.float64) for each in (begun, half, other, both, chained))
    added = half + other - begun
    if _differ(chained, added):
        return (
            f"{name} is no sum over batches: after two batches it is {_shown(chained)}, and what each adds is {_shown(added)}",
            True,
        )
    if _differ(both, added):
        return (
            f"{name} is no sum over samples: after a batch it is {_shown(both)}, and of its two halves {_shown(added)}",
            False,
        )
    return "", False


def _arrays(passes: Passes) -> list[Any]:
    each = (passes.begun, passes.half, passes.again, passes.other, passes.twice, passes.both)
    return [np.asarray(value, np.float64) for value in each]


def _differ(one: Any, other: Any) -> bool:
    """By more than rounding; what is no number is not judged."""
    scale = max(float(np.max(np.abs(one), initial=0.0)), float(np.max(np.abs(other), initial=0.0)))
    return bool(np.max(np.abs(one - other), initial=0.0) > _ROUNDING * scale)


def _shown(value: Any) -> str:
    flat = value.reshape(-1)
    return f"{flat[0]:.4g}" if flat.size == 1 else f"[{flat[0]:.4g}, ...]"


def rows_of(value: Any, rows: slice | list[int]) -> Any:
    """These rows of all arrays in a nested value."""
    return mapped(lambda leaf: leaf[rows] if getattr(leaf, "shape", None) else leaf, value)
