"""NumPy files: ``.npy``, one array, and ``.npz``, named arrays of equal length; a record is a row of each.

Arrays are mapped into memory and not read, unless an archive is compressed or not on this machine.
"""

from __future__ import annotations

import functools
import struct
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticdl.common.errors import UserError
from elasticdl.data.records import Batch, Metadata
from elasticdl.data.storage import Storage

Arrays = dict[str, NDArray[Any]]
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a member of a zip archive: lengths of its name and of its extra field


class NumpyFile:
    """Records are a row of the array, or a dict with a row of each array (or field) by name."""

    def __init__(self, name: str, storage: Storage, columns: Sequence[str] | None) -> None:
        self.name = name
        self._storage, self._columns = storage, tuple(columns) if columns else None
        arrays = self._arrays
        if self._columns and (missing := [column for column in self._columns if column not in arrays]):
            raise UserError(f"{name}: no array {missing[0]!r}; its arrays are {', '.join(arrays)}")
        lengths = {key: len(array) if array.ndim else -1 for key, array in self._chosen().items()}
        if not lengths or -1 in lengths.values() or len(set(lengths.values())) > 1:
            shown = ", ".join(f"{key} {array.shape}" for key, array in self._chosen().items()) or "none"
            raise UserError(f"{name}: arrays {shown}; expected arrays with equally many rows")
        self._length = next(iter(lengths.values()))
        names = list(self._chosen())
        self.metadata = Metadata(None if names == [""] else names)

    def __reduce__(self) -> tuple[Any, ...]:
        return NumpyFile, (self.name, self._storage, self._columns)

    def __len__(self) -> int:
        return self._length

    def read(self, rows: Sequence[int]) -> Batch:
        taken = {key: np.asarray(array[rows]) for key, array in self._chosen().items()}
        return taken.get("", taken)

    def _chosen(self) -> Arrays:
        return {key: self._arrays[key] for key in self._columns or self._arrays}

    @functools.cached_property
    def _arrays(self) -> Arrays:
        try:
            found = _open_npz(self.name, self._storage) if self.name.endswith(".npz") else {"": self._open_npy()}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, KeyError) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"{self.name}: not a whole NumPy file, or one of objects ({reason})") from error
        fields = found[""].dtype.names if "" in found else None
        return {field: found[""][field] for field in fields} if fields else found

    def _open_npy(self) -> NDArray[Any]:
        if "://" not in self.name:
            mapped: NDArray[Any] = np.load(self.name, mmap_mode="r", allow_pickle=False)
            return mapped
        with self._storage.open(self.name) as file:
            loaded: NDArray[Any] = np.load(file, allow_pickle=False)
            return loaded


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
