"""Nested plain data with arrays in it, apart: an outline, which JSON can hold, and the arrays, by name.

`write` makes a file of these that holds no code, an npz archive. What is read has the kind that was written: an OrderedDict comes
back as one, a deque with its length. Of dataclasses, named tuples and enums the name of the class is written; it is looked up among
the modules that are loaded, and none of its functions is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import io
import json
import sys
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from elasticdl.common.errors import UserError

with contextlib.suppress(ImportError):  # it comes with TensorFlow
    import ml_dtypes  # noqa: F401 - makes NumPy know bfloat16 and its like by name

STRUCTURE = "outline"  # the name of its array
ARRAY, TUPLE, ITEMS, KIND, FOREIGN = "__array__", "__tuple__", "__items__", "__kind__", "__foreign__"
PER_ITEM = 64  # bytes that an item of a collection takes, about
MARK = "__"  # with which no text key of a dict begins that is written as it is

Array = NDArray[Any]
IsForeign = Callable[[Any], bool]  # an array that is not NumPy's, such as a tensor: it stays what it is

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


def _never(_: Any) -> bool:
    return False


def is_plain(value: object, is_foreign: IsForeign = _never) -> bool:
    """Whether `take_apart` can: numbers, texts, arrays, enums, and collections and dataclasses of these."""
    kind = type(value)
    if kind in AS_THEY_ARE or kind in (bytes, complex) or isinstance(value, Path) or is_foreign(value):
        return True
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind != "O" and value.dtype.names is None and kind is not np.ma.MaskedArray
    if isinstance(value, enum.Enum):
        return _is_known(kind)
    if isinstance(value, dict):
        whole = kind is dict or (kind in DICTS.values() and (kind is not defaultdict or _factory(value) is not None))
        return whole and all(is_plain(key) and is_plain(item, is_foreign) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset | deque):
        known = kind in (list, tuple, *SEQUENCES.values()) or (hasattr(kind, "_fields") and _is_known(kind))
        return known and all(is_plain(item, is_foreign) for item in value)
    if dataclasses.is_dataclass(kind) and _is_known(kind):
        return set(getattr(value, "__dict__", ())) <= _fields(kind) and is_plain(_dumped(value), is_foreign)
    return False


def take_apart(value: Any, is_foreign: IsForeign = _never) -> tuple[Any, dict[str, Any]]:
    """Of a plain value the outline and the arrays."""
    arrays: dict[str, Any] = {}
    return _Taker(arrays, is_foreign).take(value), arrays


def put_together(outline: Any, arrays: Mapping[str, Any]) -> Any:
    """Raises:
    UserError: a class that is named is not here.
    Exception: whatever a damaged outline makes of this.
    """
    return _Putter(arrays).put(outline)


def is_same(one: Any, other: Any) -> bool:
    """Whether both plain values would be written alike."""
    if type(one) in AS_THEY_ARE:
        return type(other) is type(one) and repr(one) == repr(other)
    outlines, arrays = zip(*map(take_apart, (one, other)), strict=True)
    if json.dumps(outlines[0]) != json.dumps(outlines[1]):
        return False
    return all(
        (array.dtype, array.shape, array.tobytes()) == (twin.dtype, twin.shape, twin.tobytes())
        for array, twin in zip(arrays[0].values(), arrays[1].values(), strict=True)
    )


def size_of(value: Any, most: int) -> int:
    """Bytes of a plain value, about; no more is counted than somewhat above ``most``."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, str | bytes):
        return len(value)
    if dataclasses.is_dataclass(value):
        return size_of(_dumped(value), most)
    items: Any = value.values() if isinstance(value, Mapping) else value if isinstance(value, Iterable) else ()
    size = PER_ITEM * (1 + len(items))
    for item in items:
        if size > most:
            break
        size += size_of(item, most) if isinstance(item, np.ndarray | Iterable) or dataclasses.is_dataclass(item) else 0
    return size


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
        return put_together(json.loads(archive[STRUCTURE].tobytes()), archive)


def dumps(value: Any) -> bytes:
    file = io.BytesIO()
    write(value, file)
    return file.getvalue()


def loads(data: bytes) -> Any:
    return read(io.BytesIO(data))


# -- taking apart --


@dataclasses.dataclass(frozen=True, slots=True)
class _Taker:
    arrays: dict[str, Any]
    is_foreign: IsForeign

    def take(self, value: Any) -> Any:
        kind = type(value)
        if kind in AS_THEY_ARE:
            return value
        if self.is_foreign(value):
            return {FOREIGN: self._name(value)}
        match value:
            case np.ndarray() | np.generic():
                array = np.asarray(value)
                # NumPy's format has no name for types that other packages have added.
                added = array.dtype.kind == "V"
                dtype = {"dtype": array.dtype.name} if added else {}
                name = self._name(array.view(f"V{array.itemsize}") if added else array)
                return {ARRAY: name, **dtype, "scalar": isinstance(value, np.generic)}
            case enum.Flag():  # several together have no name
                return {KIND: "flag", "class": _title(kind), "value": value.value}
            case enum.Enum():
                return {KIND: "enum", "class": _title(kind), "name": value.name}
            case bytes():
                return {KIND: "bytes", "bytes": self.take(np.frombuffer(value, np.uint8))}
            case Path():
                return {KIND: "path", "path": str(value)}
            case complex():
                return {KIND: "complex", "parts": [value.real, value.imag]}
            case tuple() if hasattr(kind, "_fields"):
                return {KIND: "namedtuple", "class": _title(kind), "items": self._every(value)}
            case tuple():
                return {TUPLE: self._every(value)}
            case list():
                return self._every(value)
            case set() | frozenset() | deque():
                length = {"maxlen": value.maxlen} if isinstance(value, deque) else {}
                return {KIND: kind.__name__, **length, "items": self._every(value)}
            case dict() if kind is dict and all(isinstance(key, str) and not key.startswith(MARK) for key in value):
                return {key: self.take(item) for key, item in value.items()}
            case dict():
                pairs = [[self.take(key), self.take(item)] for key, item in value.items()]
                if kind not in DICTS.values():
                    return {ITEMS: pairs}
                factory = {"factory": _factory(value)} if kind is defaultdict else {}
                return {KIND: kind.__name__, **factory, "items": pairs}
            case _ if dataclasses.is_dataclass(kind):
                return {KIND: "dataclass", "class": _title(kind), "fields": self.take(_dumped(value))}
        return value

    def _every(self, items: Any) -> list[Any]:
        return [self.take(item) for item in items]

    def _name(self, array: Any) -> str:
        name = f"a{len(self.arrays)}"
        self.arrays[name] = array
        return name


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


# -- putting together --


@dataclasses.dataclass(frozen=True, slots=True)
class _Putter:
    arrays: Mapping[str, Any]

    def put(self, outline: Any) -> Any:
        match outline:
            case {"__foreign__": name}:
                return self.arrays[name]
            case {"__array__": name, **rest}:
                array = self.arrays[name]
                array = array.view(np.dtype(str(rest["dtype"]))) if "dtype" in rest else array
                return array[()] if rest["scalar"] else array
            case {"__tuple__": items}:
                return tuple(self._every(items))
            case {"__items__": items}:
                return dict(self._pairs(items))
            case {"__kind__": kind, **rest}:
                return self._kind(str(kind), {str(name): part for name, part in rest.items()})
            case dict():
                return {key: self.put(item) for key, item in outline.items()}
            case list():
                return self._every(outline)
        return outline

    def _kind(self, kind: str, rest: dict[str, Any]) -> Any:
        match kind:
            case "bytes":
                return self.put(rest["bytes"]).tobytes()
            case "path":
                return Path(rest["path"])
            case "complex":
                return complex(*rest["parts"])
            case "enum":
                return _class(rest["class"], lambda found: issubclass(found, enum.Enum))[rest["name"]]
            case "flag":
                return _class(rest["class"], lambda found: issubclass(found, enum.Flag))(rest["value"])
            case "namedtuple":
                found = _class(rest["class"], lambda found: issubclass(found, tuple) and hasattr(found, "_fields"))
                return tuple.__new__(found, self._every(rest["items"]))
            case "dataclass":
                found = _class(rest["class"], dataclasses.is_dataclass)
                made = object.__new__(found)
                for name, value in self.put(rest["fields"]).items():
                    object.__setattr__(made, name, value)  # also of a frozen one
                return made
            case "deque":
                return deque(self._every(rest["items"]), rest["maxlen"])
            case "defaultdict":
                return defaultdict(FACTORIES[rest["factory"]], self._pairs(rest["items"]))
            case "Counter" | "OrderedDict":
                return DICTS[kind](dict(self._pairs(rest["items"])))
        return SEQUENCES[kind](self._every(rest["items"]))

    def _every(self, items: list[Any]) -> list[Any]:
        return [self.put(item) for item in items]

    def _pairs(self, items: list[Any]) -> list[tuple[Any, Any]]:
        return [(self.put(key), self.put(item)) for key, item in items]


def _class(title: str, holds: Callable[[type], bool]) -> Any:
    found = _find(title)
    if not isinstance(found, type) or not holds(found):
        raise UserError(f"the state holds an object of {title.replace(':', '.')}, and there is no such class here")
    return found
