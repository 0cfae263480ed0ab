"""NumPy files: ``.npy``, one array, and ``.npz``, named arrays of equal length; a record is a row of each.

A ``.npy`` on this machine is mapped into memory and not read; an archive is read.
"""

from __future__ import annotations

import contextlib
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
    if name.endswith(".npz"):
        with storage.open(name) as content:
            archive = np.load(content, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("not an archive of arrays")
            found = {key: archive[key] for key in archive.files}
            if others := [key for key, value in found.items() if not isinstance(value, np.ndarray)]:
                raise ValueError(f"{others[0]} is no array")
            return found
    with contextlib.nullcontext(name) if "://" not in name else storage.open(name) as file:
        return {"": np.load(file, mmap_mode="r" if file is name else None, allow_pickle=False)}
