"""What a callback of the script's own keeps outside of itself: in its class, in variables of the script or of a closure.

It can't be told what of this belongs to the callback, so nothing is sent to other workers. What changes is named in a warning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from elasticdl.elastic.training import plain_data
from elasticdl.elastic.training.attributes import is_scripts_own

MOST_BYTES = 2**20  # of a value that is looked at
COLLECTIONS = (list, dict, set)


class Outside:
    """What one callback keeps outside of itself, from now on."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._marks = dict(self._found())

    def changed(self) -> list[str]:
        """Titles of what has changed and was not named yet."""
        found = dict(self._found())
        titles = [title for title, mark in found.items() if self._marks.get(title, mark) != mark]
        for title in titles:
            del self._marks[title]
        return titles

    def _found(self) -> Iterator[tuple[str, int]]:
        for title, value in _outside(self._callback):
            if plain_data.is_plain(value) and plain_data.size_of(value, MOST_BYTES) <= MOST_BYTES:
                yield title, plain_data.checksum(value)


def _outside(callback: Any) -> Iterator[tuple[str, Any]]:
    given = vars(callback).values()
    functions = [each for each in given if isinstance(each, FunctionType)]
    for method in (each for each in given if isinstance(each, MethodType)):
        owner: Any = type(method.__self__)
        if method.__self__ is not callback and is_scripts_own(owner) and hasattr(method.__self__, "__dict__"):
            for name, value in vars(method.__self__).items():
                yield f"{name} of the {owner.__name__} whose {method.__name__}() it calls", value
    for kind in type(callback).__mro__:
        each_kind: Any = kind
        if is_scripts_own(each_kind):
            for name, value in vars(kind).items():
                if isinstance(value, FunctionType):
                    functions.append(value)
                elif not name.startswith("__"):
                    yield f"{kind.__name__}.{name}, an attribute of its class", value
    for function in functions:
        held: Any = function
        if is_scripts_own(held):
            yield from _of_function(function)


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            yield f"{name}, a variable of the function around {function.__name__}()", cell.cell_contents
    read = set(_names(function.__code__))
    for name, value in function.__globals__.items():
        if name in read and isinstance(value, (*COLLECTIONS, int, float, str)):
            yield f"{name}, a variable of the script", value


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
