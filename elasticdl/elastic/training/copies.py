"""Copies of nested values, made anew in the memory of earlier ones."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

UNCHANGING = (type(None), bool, int, float, complex, str, bytes)

# Copies a tensor of the framework's, into an earlier copy where that fits; None if it is no such tensor.
CopyTensor = Callable[[Any, Any], Any]


def copied(value: Any, before: Any, copy_tensor: CopyTensor) -> Any:
    """A copy of a nested value, in the memory of ``before``, an earlier copy of it, where that has the same shape.

    Two places of one object are two places of one copy.
    """
    return _Copier(copy_tensor).copy(value, before)


class _Copier:
    def __init__(self, copy_tensor: CopyTensor) -> None:
        self._copy_tensor = copy_tensor
        self._memo: dict[int, Any] = {}  # as of `copy.deepcopy`
        self._used: set[int] = set()  # ids of the memory that holds a part of the new copy

    def copy(self, value: Any, before: Any) -> Any:
        kind = type(value)
        if kind in UNCHANGING:
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        if kind is dict or kind is OrderedDict:
            return self._copy_dict(value, before)
        if kind is list or kind is tuple:
            return self._copy_sequence(value, before)
        made = self._copy_leaf(value, None if id(before) in self._used else before)
        self._used.add(id(made))
        self._memo[id(value)] = made
        return made

    def _copy_dict(self, value: dict[Any, Any], before: Any) -> Any:
        old = before if type(before) is type(value) else {}
        made = self._memo[id(value)] = type(value)()
        for key, item in value.items():
            made[key] = self.copy(item, old.get(key))
        if isinstance(value, OrderedDict):  # a module's of torch, which notes the versions of its parts there
            vars(made).update(copy.deepcopy(vars(value), self._memo))
        return made

    def _copy_sequence(self, value: Any, before: Any) -> Any:
        old = before if type(before) is type(value) and len(before) == len(value) else [None] * len(value)
        items: list[Any] = []
        if type(value) is list:
            self._memo[id(value)] = items
        items += [self.copy(item, each) for item, each in zip(value, old, strict=True)]
        return items if type(value) is list else self._memo.setdefault(id(value), tuple(items))

    def _copy_leaf(self, value: Any, before: Any) -> Any:
        if type(value) is np.ndarray and not value.dtype.hasobject:
            fits = type(before) is np.ndarray and (before.shape, before.dtype) == (value.shape, value.dtype)
            made = before if fits else np.empty_like(value)
            np.copyto(made, value)
            return made
        made = self._copy_tensor(value, before)
        return copy.deepcopy(value, self._memo) if made is None else made
