"""Nested plain data with NumPy arrays in it as a file that holds no code: an npz archive whose structure is in JSON.

What is read has the kind that was written: an OrderedDict comes back as one, a deque with its length. Of dataclasses,
named tuples and enums the name of the class is written; it is looked up among the modules that are loaded, and none of its
functions is called.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import ml_dtypes  # noqa: F401 - makes NumPy know bfloat16 and its like by name
import numpy as np
from numpy.typing import NDArray

from elasticdl.common.errors import UserError

STRUCTURE = "outline"  # the name of its array
ARRAY, TUPLE, ITEMS, KIND = "__array__", "__tuple__", "__items__", "__kind__"
MARK = "__"  # with which no text key of a dict begins that is written as it is

Array = NDArray[Any]

AS_THEY_ARE = (type(None), bool, int, float, str)
SEQUENCES: Mapping[str, Any] = MappingProxyType({"set": set, "frozenset": frozenset, "deque": deque})
DICTS: Mapping[str, Any] = MappingProxyType(
    {"OrderedDict": OrderedDict, "Counter": Counter, "defaultdict": defaultdict}
)
# Of a defaultdict; others are functions.
FACTORIES: Mapping[str, Callable[[], Any] | None] = MappingProxyType(
    {
        "None": None,
        **{
            each.__name__: each for each in (list, dict, set, int, float, str, bool, tuple, deque, Counter, OrderedDict)
        },
    }
)


def is_plain(value: object) -> bool:
    """Whether `write` can write it: numbers, texts, arrays, enums, and collections and dataclasses of these."""
    kind = type(value)
    if kind in AS_THEY_ARE or kind in (bytes, complex) or isinstance(value, Path):
        return True
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind != "O" and value.dtype.names is None and kind is not np.ma.MaskedArray
    if isinstance(value, enum.Enum):
        return _is_known(kind)
    if isinstance(value, dict):
        whole = kind is dict or (kind in DICTS.values() and (kind is not defaultdict or _factory(value) is not None))
        return whole and all(is_plain(key) and is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset | deque):
        known = kind in (list, tuple, *SEQUENCES.values()) or (hasattr(kind, "_fields") and _is_known(kind))
        return known and all(is_plain(item) for item in value)
    if dataclasses.is_dataclass(kind) and _is_known(kind):
        return set(getattr(value, "__dict__", ())) <= _fields(kind) and is_plain(_dumped(value))
    return False


def is_same(one: Any, other: Any) -> bool:
    """Whether both plain values would be written alike."""
    if type(one) in AS_THEY_ARE:
        return type(other) is type(one) and repr(one) == repr(other)
    arrays: tuple[dict[str, Array], dict[str, Array]] = {}, {}
    texts = [json.dumps(_take(value, found)) for value, found in zip((one, other), arrays, strict=True)]
    if texts[0] != texts[1]:
        return False
    return all(
        (array.dtype, array.shape, array.tobytes()) == (twin.dtype, twin.shape, twin.tobytes())
        for array, twin in zip(arrays[0].values(), arrays[1].values(), strict=True)
    )


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


# -- writing --


def _take(value: Any, arrays: dict[str, Array]) -> Any:
    kind = type(value)
    match value:
        case np.ndarray() | np.generic():
            name = f"a{len(arrays)}"
            array = np.asarray(value)
            # NumPy's format has no name for types that other packages have added.
            added = array.dtype.kind == "V"
            arrays[name] = array.view(f"V{array.itemsize}") if added else array
            dtype = {"dtype": array.dtype.name} if added else {}
            return {ARRAY: name, **dtype, "scalar": isinstance(value, np.generic)}
        case enum.Enum():
            return {KIND: "enum", "class": _title(kind), "name": value.name}
        case bytes():
            return {KIND: "bytes", "bytes": _take(np.frombuffer(value, np.uint8), arrays)}
        case Path():
            return {KIND: "path", "path": str(value)}
        case complex():
            return {KIND: "complex", "parts": [value.real, value.imag]}
        case tuple() if hasattr(kind, "_fields"):
            return {KIND: "namedtuple", "class": _title(kind), "items": [_take(item, arrays) for item in value]}
        case tuple():
            return {TUPLE: [_take(item, arrays) for item in value]}
        case list():
            return [_take(item, arrays) for item in value]
        case set() | frozenset() | deque():
            length = {"maxlen": value.maxlen} if isinstance(value, deque) else {}
            return {KIND: kind.__name__, **length, "items": [_take(item, arrays) for item in value]}
        case dict() if kind is dict and all(isinstance(key, str) and not key.startswith(MARK) for key in value):
            return {key: _take(item, arrays) for key, item in value.items()}
        case dict():
            pairs = [[_take(key, arrays), _take(item, arrays)] for key, item in value.items()]
            if kind not in DICTS.values():
                return {ITEMS: pairs}
            factory = {"factory": _factory(value)} if kind is defaultdict else {}
            return {KIND: kind.__name__, **factory, "items": pairs}
        case _ if dataclasses.is_dataclass(kind):
            return {KIND: "dataclass", "class": _title(kind), "fields": _take(_dumped(value), arrays)}
    return value


def _dumped(value: Any) -> dict[str, Any]:
    """Of a dataclass; one field deep, so that what is in it is written as what it is."""
    return {name: getattr(value, name) for name in _fields(type(value)) if hasattr(value, name)}


def _fields(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _factory(value: Any) -> str | None:
    found = [name for name, factory in FACTORIES.items() if factory is value.default_factory]
    return found[0] if found else None


def _title(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _is_known(kind: type) -> bool:
    """Whether a class is found by its name; one that a function has made is not."""
    return _find(_title(kind)) is kind


def _find(title: str) -> Any:
    module, _, names = title.partition(":")
    found: Any = sys.modules.get(module)
    for name in names.split("."):
        found = getattr(found, name, None)
    return found


# -- reading --


def _put(structure: Any, archive: Any) -> Any:
    match structure:
        case {"__array__": name, **rest}:
            array = archive[name]
            array = array.view(np.dtype(str(rest["dtype"]))) if "dtype" in rest else array
            return array[()] if rest["scalar"] else array
        case {"__tuple__": items}:
            return tuple(_put(item, archive) for item in items)
        case {"__items__": items}:
            return dict(_put_pairs(items, archive))
        case {"__kind__": kind, **rest}:
            return _put_kind(str(kind), {str(name): part for name, part in rest.items()}, archive)
        case dict():
            return {key: _put(item, archive) for key, item in structure.items()}
        case list():
            return [_put(item, archive) for item in structure]
    return structure


def _put_kind(kind: str, rest: dict[str, Any], archive: Any) -> Any:
    match kind:
        case "bytes":
            return _put(rest["bytes"], archive).tobytes()
        case "path":
            return Path(rest["path"])
        case "complex":
            return complex(*rest["parts"])
        case "enum":
            return _class(rest["class"], lambda found: issubclass(found, enum.Enum))[rest["name"]]
        case "namedtuple":
            found = _class(rest["class"], lambda found: issubclass(found, tuple) and hasattr(found, "_fields"))
            return tuple.__new__(found, [_put(item, archive) for item in rest["items"]])
        case "dataclass":
            found = _class(rest["class"], dataclasses.is_dataclass)
            made = object.__new__(found)
            for name, value in _put(rest["fields"], archive).items():
                object.__setattr__(made, name, value)  # also of a frozen one
            return made
        case "deque":
            return deque((_put(item, archive) for item in rest["items"]), rest["maxlen"])
        case "defaultdict":
            return defaultdict(FACTORIES[rest["factory"]], _put_pairs(rest["items"], archive))
        case "Counter" | "OrderedDict":
            return DICTS[kind](dict(_put_pairs(rest["items"], archive)))
    return SEQUENCES[kind](_put(item, archive) for item in rest["items"])


def _put_pairs(items: list[Any], archive: Any) -> list[tuple[Any, Any]]:
    return [(_put(key, archive), _put(item, archive)) for key, item in items]


def _class(title: str, holds: Callable[[type], bool]) -> Any:
    found = _find(title)
    if not isinstance(found, type) or not holds(found):
        raise UserError(f"the state holds an object of {title.replace(':', '.')}, and there is no such class here")
    return found
