"""Nested values: dicts, lists and tuples, and the leaves in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The value with what ``function`` makes of each leaf in its place. Dicts of any kind become plain ones, named tuples stay such."""
    if isinstance(value, dict):
        return {key: mapped(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [mapped(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return function(value)


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves(item)
    else:
        yield value
