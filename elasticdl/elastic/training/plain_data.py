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
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from elasticdl.common.errors import UserError
from elasticdl.parsing_threads import parsed_beside_threads

with contextlib.suppress(ImportError):  # it comes with TensorFlow
    import ml_dtypes  # noqa: F401 - makes NumPy know bfloat16 and its like by name

STRUCTURE = "outline"  # the name of its array
ARRAY, KIND, FOREIGN = "__array__", "__kind__", "__foreign__"
MARK = "__"  # with which no text key of a dict begins that is written as it is
PER_ITEM = 64  # bytes that an item of a collection takes, about

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


def is_plain(value: object, is_foreign: IsForeign = _never) -> bool:
    """Whether `take_apart` can: numbers, texts, arrays, enums, and collections and dataclasses of these."""
    kind = type(value)
    if kind in AS_THEY_ARE or is_foreign(value):
        return True
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind != "O" and value.dtype.names is None and kind is not np.ma.MaskedArray
    if isinstance(value, list) and kind is list:
        return all(is_plain(item, is_foreign) for item in value)
    name = _kind_of(value)
    if name and isinstance(value, dict):
        return all(is_plain(key) and is_plain(item, is_foreign) for key, item in value.items())
    return bool(name) and is_plain(KINDS[name].parts(value), is_foreign)


def take_apart(value: Any, is_foreign: IsForeign = _never) -> tuple[Any, dict[str, Any]]:
    """Of a plain value the outline and the arrays."""
    arrays: dict[str, Any] = {}

    def named(array: Any) -> str:
        arrays[name := f"a{len(arrays)}"] = array
        return name

    def take(value: Any) -> Any:
        kind = type(value)
        if kind in AS_THEY_ARE:
            return value
        if is_foreign(value):
            return {FOREIGN: named(value)}
        if isinstance(value, np.ndarray | np.generic):
            array = np.asarray(value)
            is_scalar = isinstance(value, np.generic)
            if array.dtype.kind != "V":
                return {ARRAY: named(array), "scalar": is_scalar}
            # NumPy's format has no name for types that other packages have added.
            return {ARRAY: named(array.view(f"V{array.itemsize}")), "scalar": is_scalar, "dtype": array.dtype.name}
        if kind is list:
            return [take(item) for item in value]
        if kind is dict and all(isinstance(key, str) and not key.startswith(MARK) for key in value):
            return {key: take(item) for key, item in value.items()}
        name = _kind_of(value)
        return {KIND: name, "parts": take(KINDS[name].parts(value))}

    return take(value), arrays


def put_together(outline: Any, arrays: Mapping[str, Any]) -> Any:
    """Raises:
    UserError: a class that is named is not here.
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
        arrays = {name: parsed_beside_threads(partial(archive.__getitem__, name)) for name in archive.files}
    return put_together(json.loads(arrays[STRUCTURE].tobytes()), arrays)


def dumps(value: Any) -> bytes:
    file = io.BytesIO()
    write(value, file)
    return file.getvalue()


def loads(data: bytes) -> Any:
    return read(io.BytesIO(data))


# -- what is written as its parts, which are plain again --


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    parts: Callable[[Any], Any]
    make: Callable[[Any], Any]


def _kind_of(value: Any) -> str:
    """The name of one of `KINDS`; empty if it is of none."""
    kind = type(value)
    if kind is defaultdict and _factory(value) is None:
        return ""
    if kind in _COLLECTIONS:
        return str(kind.__name__)
    if isinstance(value, Path):
        return "path"
    if _find(_title(kind)) is not kind:  # a function has made it
        return ""
    if isinstance(value, enum.Enum):
        return "flag" if isinstance(value, enum.Flag) else "enum"  # several flags together have no name
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return "namedtuple"
    if dataclasses.is_dataclass(kind) and set(getattr(value, "__dict__", ())) <= _fields(kind):
        return "dataclass"
    return ""


def _pairs(mapping: dict[Any, Any]) -> list[list[Any]]:
    return [[key, item] for key, item in mapping.items()]


def _factory(value: Any) -> str | None:
    found = [name for name, factory in FACTORIES.items() if factory is value.default_factory]
    return found[0] if found else None


def _fields(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _dumped(value: Any) -> dict[str, Any]:
    """Of a dataclass; one field deep, so that what is in it is written as what it is."""
    return {name: getattr(value, name) for name in _fields(type(value)) if hasattr(value, name)}


def _made(kind: Any, fields: dict[str, Any]) -> Any:
    made = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(made, name, value)  # also of a frozen one
    return made


def _title(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _find(title: str) -> Any:
    module, _, names = title.partition(":")
    found: Any = sys.modules.get(module)
    for name in names.split("."):
        found = getattr(found, name, None)
    return found


def _of_class(parts: Callable[[Any], Any], make: Callable[[Any, Any], Any], holds: Callable[[Any], bool]) -> _Kind:
    """The name of the class is the first part."""

    def remake(titled: list[Any]) -> Any:
        found = _find(titled[0])
        if not isinstance(found, type) or not holds(found):
            name = titled[0].replace(":", ".")
            raise UserError(f"the state holds an object of {name}, and there is no such class here")
        return make(found, titled[1])

    return _Kind(lambda value: [_title(type(value)), parts(value)], remake)


_COLLECTIONS = (bytes, complex, tuple, set, frozenset, dict, OrderedDict, Counter, defaultdict, deque)
KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        "bytes": _Kind(lambda value: np.frombuffer(value, np.uint8), lambda array: array.tobytes()),
        "complex": _Kind(lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
        "path": _Kind(str, Path),
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
        "enum": _of_class(
            lambda value: value.name, lambda kind, name: kind[name], lambda kind: issubclass(kind, enum.Enum)
        ),
        "flag": _of_class(
            lambda value: value.value, lambda kind, bits: kind(bits), lambda kind: issubclass(kind, enum.Flag)
        ),
        "namedtuple": _of_class(list, tuple.__new__, lambda kind: issubclass(kind, tuple) and hasattr(kind, "_fields")),
        "dataclass": _of_class(_dumped, _made, dataclasses.is_dataclass),
    }
)
