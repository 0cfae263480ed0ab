"""Which objects of a script hold something that elasticdl was given, and were not given along themselves."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any, TypeVar

Kind = TypeVar("Kind")
MOST_DICTS = 3  # from a parameter over a module's `_parameters` and its attributes to the module


def owners(values: Iterable[Any], kind: type[Kind]) -> list[Kind]:
    """Those of this kind that hold one of the values in an attribute, or in a dict that is one.

    Only what refers to a value is looked at. `gc.get_objects` would take hold of tuples that another thread is making, which breaks that.
    """
    found: dict[int, Kind] = {}
    inner, seen = list(values), set[int]()
    for _ in range(1 + MOST_DICTS):
        holders = gc.get_referrers(*inner) if inner else []
        found.update((id(each), each) for each in holders if issubclass(type(each), kind))
        inner = [each for each in holders if type(each) is dict and id(each) not in seen]
        seen.update(map(id, inner))
    return list(found.values())
