"""NumPy files: ``.npy``, one array, and ``.npz``, named arrays of equal length; a record is a row of each.

Arrays are mapped into memory and not read, unless an archive is compressed or not on this machine.
"""

from __future__ import annotations

import contextlib
import struct
import zipfile
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticdl.common.errors import UserError
from elasticdl.data.records import Batch, Metadata, chosen_columns
from elasticdl.data.storage import Storage
from elasticdl.parsing_threads import parsed_beside_threads

Arrays = dict[str, NDArray[Any]]
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a member of a zip archive: lengths of its name and of its extra field


class NumpyFile:
    """Records are a row of the array, or a dict with a row of each array (or field) by name."""

    def __init__(self, name: str, storage: Storage, columns: Sequence[str] | None) -> None:
        self.name, self._storage, self._columns = name, storage, columns
        try:
            found = parsed_beside_threads(partial(_open, name, storage))
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, KeyError) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"{name}: not a whole NumPy file, or one of objects ({reason})") from error
        if "" in found and (fields := found[""].dtype.names):
            found = {field: found[""][field] for field in fields}
        self._arrays = {key: found[key] for key in chosen_columns(name, columns, list(found))}
        lengths = {len(array) if array.ndim else -1 for array in self._arrays.values()}
        if len(lengths) != 1 or -1 in lengths:
            shown = ", ".join(f"{key} {array.shape}" for key, array in self._arrays.items()) or "none"
            raise UserError(f"{name}: arrays {shown}; expected arrays with equally many rows")
        (self._length,) = lengths
        self.metadata = Metadata(None if "" in self._arrays else list(self._arrays))

    def __reduce__(self) -> tuple[Any, ...]:
        return NumpyFile, (self.name, self._storage, self._columns)

    def __len__(self) -> int:
        return self._length

    def read(self, rows: Sequence[int]) -> Batch:
        taken = {key: np.asarray(array[rows]) for key, array in self._arrays.items()}
        return taken.get("", taken)


def _open(name: str, storage: Storage) -> Arrays:
    return _open_npz(name, storage) if name.endswith(".npz") else {"": _open_npy(name, storage)}


def _open_npy(name: str, storage: Storage) -> NDArray[Any]:
    with contextlib.nullcontext(name) if "://" not in name else storage.open(name) as file:
        found: NDArray[Any] = np.load(file, mmap_mode="r" if file is name else None, allow_pickle=False)
        return found


def _open_npz(name: str, storage: Storage) -> Arrays:
    with storage.open(name) as file, zipfile.ZipFile(file) as archive:
        arrays: Arrays = {}
        for info in archive.infolist():
            mapped = _mapped(name, info) if "://" not in name and not info.compress_type else None
            if mapped is None:
                with archive.open(info) as member:
                    mapped = np.lib.format.read_array(member, allow_pickle=False)
            arrays[info.filename.removesuffix(".npy")] = mapped
        return arrays


def _mapped(archive: str, info: zipfile.ZipInfo) -> NDArray[Any] | None:
    """The array of an uncompressed member, mapped; None where that can't be done."""
    with open(archive, "rb") as file:
        file.seek(info.header_offset)
        file.seek(sum(_LOCAL_HEADER.unpack(file.read(30))), 1)
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            return None
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if dtype.hasobject or not all(shape):
            return None
        order = "F" if fortran else "C"
        return np.memmap(archive, dtype, "r", file.tell(), shape, order)  # type: ignore[call-overload, no-any-return]
