"""Nested plain data with NumPy arrays in it as a file that holds no code: an npz archive whose structure is in JSON."""

from __future__ import annotations

import io
import json
from typing import IO, Any

import ml_dtypes  # noqa: F401 - makes NumPy know bfloat16 and its like by name
import numpy as np
from numpy.typing import NDArray

STRUCTURE = "outline"  # the name of its array
ARRAY, TUPLE, ITEMS = "__array__", "__tuple__", "__items__"

Array = NDArray[Any]


def is_plain(value: object) -> bool:
    """Whether `write` can write it: numbers, texts, arrays, and lists, tuples and dicts of these."""
    if isinstance(value, np.ndarray):
        return bool(value.dtype.kind != "O")
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str | np.generic)


def write(value: Any, file: IO[bytes]) -> None:
    arrays: dict[str, Array] = {}
    structure = json.dumps(_take(value, arrays)).encode()
    np.savez(file, allow_pickle=False, **{STRUCTURE: np.frombuffer(structure, np.uint8)}, **arrays)


def read(file: IO[bytes]) -> Any:
    """Raises:
    Exception: whatever a damaged file makes of NumPy, zipfile and json.
    """
    with np.load(file, allow_pickle=False) as archive:
        return _put(json.loads(archive[STRUCTURE].tobytes()), archive)


def dumps(value: Any) -> bytes:
    file = io.BytesIO()
    write(value, file)
    return file.getvalue()


def loads(data: bytes) -> Any:
    return read(io.BytesIO(data))


def _take(value: Any, arrays: dict[str, Array]) -> Any:
    match value:
        case np.ndarray() | np.generic():
            name = f"a{len(arrays)}"
            array = np.asarray(value)
            # NumPy's format has no name for types that other packages have added.
            added = array.dtype.kind == "V"
            arrays[name] = array.view(f"V{array.itemsize}") if added else array
            dtype = {"dtype": array.dtype.name} if added else {}
            return {ARRAY: name, **dtype, "scalar": isinstance(value, np.generic)}
        case tuple():
            return {TUPLE: [_take(item, arrays) for item in value]}
        case list():
            return [_take(item, arrays) for item in value]
        case dict() if all(isinstance(key, str) for key in value):
            return {key: _take(item, arrays) for key, item in value.items()}
        case dict():
            return {ITEMS: [[_take(key, arrays), _take(item, arrays)] for key, item in value.items()]}
    return value


def _put(structure: Any, archive: Any) -> Any:
    match structure:
        case {"__array__": name, **rest}:
            array = archive[name]
            array = array.view(np.dtype(str(rest["dtype"]))) if "dtype" in rest else array
            return array[()] if rest["scalar"] else array
        case {"__tuple__": items}:
            return tuple(_put(item, archive) for item in items)
        case {"__items__": items}:
            return {_put(key, archive): _put(item, archive) for key, item in items}
        case dict():
            return {key: _put(item, archive) for key, item in structure.items()}
        case list():
            return [_put(item, archive) for item in structure]
    return structure
