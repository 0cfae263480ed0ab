"""How messages name what the user has given."""

from __future__ import annotations


def name_of(function: object) -> str:
    """Of a function or class its name; of any other object that can be called, that of its type."""
    return str(getattr(function, "__name__", type(function).__name__))
