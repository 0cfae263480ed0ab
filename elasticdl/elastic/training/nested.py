"""Nested values: dicts, lists and tuples, and the leaves in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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
