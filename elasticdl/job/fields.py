"""Fields of an entry as values that can be trusted: a journal may be of another version, damaged, or made up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from elasticdl.job.event_catalogue import standing
from elasticdl.job.journal import Entry

LONGEST_TEXT = 2000
MOST = 1e15  # seconds, steps, samples: a larger number is made up


def number(entry: Mapping[str, Any], name: str) -> float | None:
    """None if there is none, or it is infinite."""
    value = entry.get(name)
    if type(value) is not float and type(value) is not int:  # True is none
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def seconds(entry: Mapping[str, Any], name: str) -> float:
    """0 if it is not known."""
    value = number(entry, name) or 0.0
    return value if 0 < value < MOST else 0.0


def count(entry: Mapping[str, Any], name: str) -> int:
    """0 if it is not known."""
    return int(seconds(entry, name))


def whole(entry: Mapping[str, Any], name: str) -> int | None:
    """As the number of a worker, or an exit code; None if there is none."""
    return _whole(entry.get(name))


def _whole(value: Any) -> int | None:
    """None if it is none, or too large for a browser to count with."""
    return value if type(value) is int and abs(value) < MOST else None


def text(entry: Mapping[str, Any], name: str) -> str:
    """Empty if there is none."""
    value = entry.get(name, "")
    return ("" if value is None else str(value))[:LONGEST_TEXT]


def standing_of(entry: Entry) -> str:
    """Of a stuck worker."""
    return standing(entry)[:LONGEST_TEXT]


def members(entry: Mapping[str, Any]) -> tuple[int, ...]:
    value = entry.get("members")
    found = map(_whole, value) if isinstance(value, list) else ()
    return tuple(each for each in found if each is not None)


def numbers(entry: Mapping[str, Any], name: str) -> dict[str, float | None]:
    """What is no number becomes None."""
    value = entry.get(name)
    return {str(key): number(value, key) for key in value} if isinstance(value, dict) else {}
