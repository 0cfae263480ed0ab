"""Nested plain data with arrays in it, apart: an outline, which JSON can hold, and the arrays, by name.

`write` makes a file of these that holds no code, an npz archive. What is read has the kind that was written: an OrderedDict comes
back as one, a deque with its length.
"""

from __future__ import annotations

import contextlib
import json
import math
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticdl.parsing_threads import parsed_beside_threads

with contextlib.suppress(ImportError):  # it comes with TensorFlow
    import ml_dtypes  # noqa: F401 - makes NumPy know bfloat16 and its like by name

STRUCTURE = "outline"  # the name of its array
ARRAY, KIND, FOREIGN = "__array__", "__kind__", "__foreign__"
MARK = "__"  # with which no text key of a dict begins that is written as it is

Array = NDArray[Any]
IsForeign = Callable[[Any], bool]  # an array that is not NumPy's, such as a tensor: it stays what it is

AS_THEY_ARE = (type(None), bool, int, float, str)
# Of a defaultdict; others are functions.
FACTORIES: Mapping[str, Callable[[], Any] | None] = MappingProxyType(
    {
        "None": None,
        **{
            each.__name__: each for each in (list, dict, set, int, float, str, bool, tuple, deque, Counter, OrderedDict)
        },
    }
)


def _never(_: Any) -> bool:
    return False


class NotPlainError(TypeError):
    """A value is more than numbers, texts, arrays and collections of these, or has more of them than is asked for."""


def is_plain(value: object, is_foreign: IsForeign = _never) -> bool:
    """Whether `take_apart` can."""
    try:
        take_apart(value, is_foreign)
    except NotPlainError:
        return False
    return True


def take_apart(value: Any, is_foreign: IsForeign = _never, most: float = math.inf) -> tuple[Any, dict[str, Any]]:
    """Of a plain value the outline, which is a copy, and the arrays.

    Raises:
        NotPlainError: it is not plain, or has more than ``most`` numbers and texts.
    """
    arrays: dict[str, Any] = {}

    def named(array: Any) -> str:
        arrays[name := f"a{len(arrays)}"] = array
        return name

    def take(value: Any) -> Any:
        nonlocal most
        kind = type(value)
        if kind in AS_THEY_ARE:
            most -= 1
            if most < 0:
                raise NotPlainError("too much")
            return value
        if is_foreign(value):
            return {FOREIGN: named(value)}
        if isinstance(value, np.ndarray | np.generic):
            return _array_taken(value, named)
        name = _kind_of(value)
        if not name:
            raise NotPlainError(f"a {kind.__name__}")
        if kind is list:
            return [take(item) for item in value]
        if kind is dict and all(type(key) is str and not key.startswith(MARK) for key in value):
            return {key: take(item) for key, item in value.items()}
        return {KIND: name, "parts": take(KINDS[name].parts(value))}

    return take(value), arrays


def _array_taken(value: Any, named: Callable[[Any], str]) -> dict[str, Any]:
    array, is_scalar = np.asarray(value), isinstance(value, np.generic)
    if array.dtype.kind == "O" or array.dtype.names is not None or type(value) is np.ma.MaskedArray:
        raise NotPlainError(f"an array of {array.dtype}")
    if array.dtype.kind != "V":
        return {ARRAY: named(array), "scalar": is_scalar}
    # NumPy's format has no name for types that other packages have added.
    return {ARRAY: named(array.view(f"V{array.itemsize}")), "scalar": is_scalar, "dtype": array.dtype.name}


def put_together(outline: Any, arrays: Mapping[str, Any]) -> Any:
    """Raises:
    Exception: whatever a damaged outline makes of this.
    """
    match outline:
        case {"__foreign__": name}:
            return arrays[name]
        case {"__array__": name, **rest}:
            array = arrays[name]
            array = array.view(np.dtype(str(rest["dtype"]))) if "dtype" in rest else array
            return array[()] if rest["scalar"] else array
        case {"__kind__": name, "parts": parts}:
            return KINDS[str(name)].make(put_together(parts, arrays))
        case dict():
            if any(key.startswith(MARK) for key in outline):
                raise ValueError(f"an outline holds {', '.join(outline)}: another version of elasticdl wrote it")
            return {key: put_together(item, arrays) for key, item in outline.items()}
        case list():
            return [put_together(item, arrays) for item in outline]
    return outline


def checksum(value: Any, is_foreign: IsForeign = _never, to_array: Callable[[Any], Array] = np.asarray) -> int:
    """Of a plain value. ``to_array``: of what is foreign."""
    outline, arrays = take_apart(value, is_foreign)
    found = zlib.crc32(json.dumps(outline).encode())
    for each in arrays.values():
        array = each if isinstance(each, np.ndarray) else to_array(each)
        found = zlib.crc32(f"{array.dtype} {array.shape}".encode(), found)
        found = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, found)
    return found


def write(value: Any, file: IO[bytes]) -> None:
    outline, arrays = take_apart(value)
    structure = json.dumps(outline).encode()
    np.savez(file, allow_pickle=False, **{STRUCTURE: np.frombuffer(structure, np.uint8)}, **arrays)


def read(file: IO[bytes]) -> Any:
    """Raises:
    Exception: whatever a damaged file makes of NumPy, zipfile and json.
    """
    with np.load(file, allow_pickle=False) as archive:
        arrays = {name: parsed_beside_threads(partial(archive.__getitem__, name)) for name in archive.files}
    return put_together(json.loads(arrays[STRUCTURE].tobytes()), arrays)


# -- what is written as its parts, which are plain again --


class _Kind(NamedTuple):
    parts: Callable[[Any], Any]
    make: Callable[[Any], Any]


def _kind_of(value: Any) -> str:
    """The name of one of `KINDS`; empty if it is of none."""
    kind: Any = type(value)
    if kind is defaultdict and _factory(value) is None:
        return ""
    if isinstance(value, Path):
        return Path.__name__
    return str(kind.__name__) if kind is list or kind in _COLLECTIONS else ""


def _pairs(mapping: dict[Any, Any]) -> list[list[Any]]:
    return [[key, item] for key, item in mapping.items()]


def _factory(value: Any) -> str | None:
    found = [name for name, factory in FACTORIES.items() if factory is value.default_factory]
    return found[0] if found else None


_COLLECTIONS = (bytes, complex, tuple, set, frozenset, dict, OrderedDict, Counter, defaultdict, deque)
KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        "bytes": _Kind(lambda value: np.frombuffer(value, np.uint8), lambda array: array.tobytes()),
        "complex": _Kind(lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
        "Path": _Kind(str, Path),
        "tuple": _Kind(list, tuple),
        "set": _Kind(list, set),
        "frozenset": _Kind(list, frozenset),
        "dict": _Kind(_pairs, dict),
        "OrderedDict": _Kind(_pairs, OrderedDict),
        "Counter": _Kind(_pairs, lambda pairs: Counter(dict(pairs))),
        "defaultdict": _Kind(
            lambda value: [_factory(value), _pairs(value)],
            lambda parts: defaultdict(FACTORIES[parts[0]], parts[1]),
        ),
        "deque": _Kind(lambda value: [list(value), value.maxlen], lambda parts: deque(*parts)),
    }
)
