"""Fingerprints of a training state: everything that it holds by name, and for each value a number that stands for its bits."""

from __future__ import annotations

import dataclasses
import enum
import marshal
import random
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticdl.elastic.core.agreement import plain_text
from elasticdl.elastic.training.copies import UNCHANGING as PLAIN

Array = npt.NDArray[Any]
Marks = Callable[[], list[int]]  # waits for them, if a device is at work on them

# A plain sum of words says nothing of their order, so the words of each column have a weight. That the columns are a prime number
# keeps the rows of a matrix from being taken for one another.
COLUMNS = 1021
WEIGHTS: Array = (np.random.PCG64(0).random_raw(COLUMNS) | np.uint64(1)).view(np.int64)
WORD = 8  # bytes
MOST_NESTED = 12
MOST_SHOWN = 60  # characters of a value
_MASK = (1 << 64) - 1


# -- values by name --


def leaves(value: Any) -> dict[str, Any]:
    """All that a nested value holds, each by a name; a list of plain values is one."""
    found: dict[str, Any] = {}
    _collect("", value, found, MOST_NESTED)
    return found


def _collect(name: str, value: Any, found: dict[str, Any], depth: int) -> None:
    if type(value) not in PLAIN and not is_array(value) and depth:
        value = _opened(value)
        if isinstance(value, Mapping):
            for key, each in value.items():
                word = key if type(key) is str else plain_text(key)
                _collect(f"{name}.{word}" if name else word, each, found, depth - 1)
            return
        if isinstance(value, list | tuple) and not _is_flat(value):
            for number, each in enumerate(value):
                _collect(f"{name}.{number}", each, found, depth - 1)
            return
    found[name] = value.item() if isinstance(value, np.generic) else value


def _opened(value: Any) -> Any:
    """What is compared in the place of a value."""
    if type(value) is dict:
        return value
    match value:
        case set() | frozenset():
            return sorted(map(plain_text, value))
        case deque():
            return list(value)
        case np.random.Generator():
            return value.bit_generator.state
        case np.random.RandomState():
            return value.get_state()
        case random.Random():
            return value.getstate()
        case enum.Enum():
            return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)}
    return value


def _is_flat(values: Sequence[Any]) -> bool:
    return all(type(each) in PLAIN for each in values)


def is_array(value: Any) -> bool:
    """An array of NumPy's or of a framework's."""
    kind = type(value)  # an object of a framework's would make its shape first
    return kind not in PLAIN and hasattr(kind, "shape") and hasattr(kind, "dtype")


def plain_mark(value: Any) -> int:
    """Of what is no array."""
    if isinstance(value, list | tuple) and _is_flat(value):
        return zlib.crc32(marshal.dumps(list(value), 2))  # of a hundred thousand losses in a millisecond
    return zlib.crc32(plain_text(value).encode())


def as_array(value: Any) -> Array:
    """What is no array, such as a setting of an optimizer: numbers as they are, anything else as text."""
    numbers = value if isinstance(value, list | tuple) else [value]
    if numbers and all(isinstance(each, int | float) for each in numbers):
        found = np.asarray(value)
        if found.dtype != object:
            return found
    return np.frombuffer(plain_text(value).encode(), np.uint8)


def shown(value: Any) -> str:
    """A piece's value, if it is short; else nothing."""
    if is_array(value):
        return _number(value.item()) if tuple(value.shape) == () and hasattr(value, "item") else ""
    if type(value) is float:
        return _number(value)
    is_long = isinstance(value, list | tuple | str | bytes) and len(value) > MOST_SHOWN
    text = "" if is_long else plain_text(value)
    return text if len(text) <= MOST_SHOWN else ""


def _number(value: Any) -> str:
    return f"{value:.7g}" if isinstance(value, float) else repr(value)


# -- marks --


def mark(array: Array) -> int:
    """A sum of its words with weights, by 2**64: the same in whatever order a device adds."""
    if array.dtype.hasobject:
        return zlib.crc32(plain_text(array).encode())
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = raw.size // WORD * WORD
    words = raw[:whole].view(np.int64)
    square = words.size // COLUMNS * COLUMNS
    total = raw.size
    if square:
        total += int(words[:square].reshape(-1, COLUMNS).sum(0) @ WEIGHTS)
    if square < words.size:
        total += int(words[square:] @ WEIGHTS[: words.size - square])
    if whole < raw.size:
        total += int(raw[whole:].astype(np.int64) @ WEIGHTS[-(raw.size - whole) :])
    return total & _MASK


def array_marks(arrays: Sequence[Array]) -> Marks:
    made = [mark(each) for each in arrays]
    return lambda: made


@dataclass(slots=True)
class Survey:
    """The values of one moment, between two steps."""

    step: int
    model: Mapping[str, Any]
    others: Mapping[str, Any]
    _arrays: Marks

    def marks(self) -> dict[str, int]:
        """By name."""
        found: dict[str, int] = {}
        arrays = iter(self._arrays())
        for name, value in (*self.model.items(), *self.others.items()):
            found[name] = next(arrays) if is_array(value) else plain_mark(value)
        return found

    def checksum(self) -> int:
        """Of all, in whatever order."""
        marks = self.marks()
        names = sorted(marks)
        return zlib.crc32(
            np.array([marks[name] for name in names], np.uint64).tobytes(), zlib.crc32("\n".join(names).encode())
        )


# -- how far two are apart --


def distance(root: Array | None, mine: Array | None) -> float:
    """Part of rank 0's largest value; infinite for what is no number, or of another shape."""
    if root is None or mine is None or root.shape != mine.shape:
        return float("inf")
    if root.dtype.kind not in "fc" or mine.dtype != root.dtype:
        return 0.0 if np.array_equal(root, mine) else float("inf")
    wide = np.float64 if root.dtype.kind == "f" else np.complex128
    apart = np.abs(root.astype(wide) - mine.astype(wide))
    same = (root == mine) | (np.isnan(root) & np.isnan(mine))
    largest = float(np.max(apart, where=~same, initial=0.0))
    scale = float(np.max(np.abs(root), where=np.isfinite(root), initial=0.0))
    return largest / scale if scale and np.isfinite(largest) else (0.0 if largest == 0.0 else float("inf"))
