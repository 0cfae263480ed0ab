"""Copies of what is kept in attributes, made before each step: of what is small."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from elasticdl.elastic.training.attributes import Kinds, assigned
from elasticdl.elastic.training.copies import UNCHANGING

SMALL = 4096  # elements of an array
FEW = 1000  # items of a collection, with those within


class TooLargeError(Exception):
    """A value has more than `FEW` items, or an array of more than `SMALL` elements."""


def small_copy(value: Any) -> Any:
    """A copy, or the value itself if it is large or never changes."""
    try:
        return copy_of_small(value)
    except TooLargeError:
        return value


def copy_of_small(value: Any) -> Any:
    """Raises:
    TooLargeError: it is large.
    """
    if type(value) in UNCHANGING:  # most are: they are copied before each step
        return value
    left = FEW

    def copied(value: Any) -> Any:
        nonlocal left
        kind = type(value)
        if kind in UNCHANGING:
            return value
        if isinstance(value, torch.Tensor | np.ndarray):
            elements = value.numel() if isinstance(value, torch.Tensor) else value.size
            if elements > SMALL:
                raise TooLargeError
            return value.detach().clone() if isinstance(value, torch.Tensor) else value.copy()
        if not isinstance(value, dict | list | tuple | set | frozenset | deque):
            return copy.copy(value)
        left -= len(value)
        if left < 0:
            raise TooLargeError
        if isinstance(value, dict):
            made = copy.copy(value)
            made.update({key: copied(item) for key, item in value.items()})
            return made
        items = [copied(item) for item in value]
        if isinstance(value, deque):
            return deque(items, value.maxlen)
        return kind(*items) if hasattr(kind, "_fields") else kind(items)

    return copied(value)


class Slot(NamedTuple):
    """Where a value is kept. ``path``: within what the holder of this name keeps."""

    holder: str
    path: str
    owner: Any
    key: Any


@dataclass(slots=True)
class Noted:
    """What was kept at some moment, and the way back to it."""

    values: list[tuple[Slot, Any, Any]] = field(default_factory=list)  # what stood there, and its copy
    trained: list[tuple[torch.nn.Parameter, bool]] = field(default_factory=list)

    def put_back(self, kinds: Kinds, since: Noted | None) -> None:
        if since is not None:
            there = {(id(slot.owner), slot.key) for slot, _, _ in self.values}
            for slot, _, _ in since.values:
                if (id(slot.owner), slot.key) not in there and isinstance(slot.owner, dict):
                    slot.owner.pop(slot.key, None)
        for slot, value, kept in self.values:
            slot.owner[slot.key] = value if kept is value else assigned(value, small_copy(kept), kinds)
        for parameter, was_trained in self.trained:
            parameter.requires_grad_(was_trained)
