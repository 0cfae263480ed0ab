"""Taking the tensors out of a nested state, so that they can be sent in bulk, and putting them in again."""

from __future__ import annotations

from typing import Any


class _Slot:
    """Stands for a tensor that is sent outside the pickle."""

    def __init__(self, index: int) -> None:
        self.index = index


def take_tensors(value: Any, kind: type | tuple[type, ...], tensors: list[Any]) -> Any:
    """A copy of the nested value with slots for the tensors (instances of ``kind``), which are appended to the list."""
    if isinstance(value, kind):
        tensors.append(value)
        return _Slot(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: take_tensors(item, kind, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(take_tensors(item, kind, tensors) for item in value)
    return value


def put_tensors(value: Any, tensors: list[Any]) -> Any:
    """The inverse of `take_tensors`."""
    if isinstance(value, _Slot):
        return tensors[value.index]
    if isinstance(value, dict):
        return {key: put_tensors(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(put_tensors(item, tensors) for item in value)
    return value
