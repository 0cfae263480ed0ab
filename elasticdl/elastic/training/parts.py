"""What the parts of a pass over data have given, one file each, until all is put together piece by piece, in the order of the data.

A part is there whole or not at all, and is the same whoever has made it, and however often.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from elasticdl.common.errors import UserError, import_extra
from elasticdl.common.reason import one_line
from elasticdl.elastic.training import plain_data
from elasticdl.elastic.training.checkpoint_store import WholeFiles

Array = npt.NDArray[Any]
Columns = Mapping[str, Array]  # one row a sample
ALIKE = "expected the same shape and type for all"


CLAIM = "claimed"  # the name of a file


class Parts:
    """``samples``: of the data. ``size``: of a part, in samples; the last may be smaller. ``alive``: is called for each part that is read."""

    def __init__(self, files: WholeFiles, samples: int, size: int, alive: Callable[[], object]) -> None:
        self.samples = samples
        self.files = files
        self._count = -(-samples // size)
        self._alive = alive

    def begin(self) -> None:
        with put_away("the folder of its parts"):
            self.files.make_folder()
        self.files.remove(CLAIM)  # of an earlier job of this name

    def write(self, number: int, rows: Sequence[Columns]) -> None:
        """``rows``: of the part, in their order.

        Raises:
            UserError: it can't be written, or they can't be put together.
        """
        try:
            columns = {name: np.concatenate([each[name] for each in rows]) for name in rows[0]}
        except (KeyError, ValueError) as error:
            raise UserError(
                f"what the model puts out differs from sample to sample: {one_line(error)}; {ALIKE}"
            ) from error
        with put_away(f"part {number + 1} of {self._count}"):
            self.files.write(_name(number), partial(plain_data.write, columns), durably=False)

    def claim(self) -> bool:
        """Whether nobody has begun yet to put all together."""
        is_first = CLAIM not in self.files.names()
        self.files.write(CLAIM, lambda file: None, durably=False)
        return is_first

    def __iter__(self) -> Iterator[dict[str, Array]]:
        """Each part.

        Raises:
            UserError: one is not there, or has other columns than the first.
        """
        kinds: dict[str, tuple[Any, ...]] = {}
        for number in range(self._count):
            self._alive()
            try:
                with self.files.open(_name(number)) as file:
                    columns: dict[str, Array] = plain_data.read(file)
            except Exception as error:  # a damaged file raises anything
                why = one_line(error)
                raise UserError(f"part {number + 1} of {self._count} can't be read: {why}; begin anew") from error
            found = _kinds(columns)
            kinds = kinds or found
            if found != kinds:
                raise UserError(
                    f"what the model puts out differs from sample to sample: {_shown(kinds)} in the first part, and {_shown(found)} in "
                    f"part {number + 1}; {ALIKE}"
                )
            yield columns

    def mapped(self, folder: Path) -> dict[str, Array]:
        """All rows of each column, in files of this machine below the folder, and not in memory.

        Raises:
            UserError: as `__iter__`.
            OSError: the folder is full, say. (Where a file is mapped first and filled then, a full disk kills the process.)
        """
        paths = {name: folder / f"{number}.npy" for number, name in enumerate(next(iter(self)))}
        for name, path in paths.items():
            with path.open("wb") as file:
                self.write_array(name, file)
        return {name: np.load(path, mmap_mode="c") for name, path in paths.items()}

    def write_array(self, name: str, file: IO[bytes]) -> None:
        """All rows of a column, as a file of NumPy's."""
        for number, columns in enumerate(self):
            column = columns[name]
            if number == 0:
                header = {"descr": np.lib.format.dtype_to_descr(column.dtype), "fortran_order": False}
                np.lib.format.write_array_header_1_0(file, {**header, "shape": (self.samples, *column.shape[1:])})
            file.write(np.ascontiguousarray(column).tobytes())


def _name(number: int) -> str:
    return f"part-{number:010d}.npz"


def _kinds(columns: Columns) -> dict[str, tuple[Any, ...]]:
    return {name: (column.dtype, column.shape[1:]) for name, column in columns.items()}


def _shown(kinds: Mapping[str, tuple[Any, ...]]) -> str:
    return ", ".join(f"{name} {dtype} {shape}" for name, (dtype, shape) in kinds.items())


@contextlib.contextmanager
def put_away(what: str) -> Iterator[None]:
    """What the file system raises within becomes one line."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(
            f"--output: {what} can't be written, as its folder is not there: all workers must reach it, as on a volume that all pods have"
        ) from error
    except OSError as error:
        raise UserError(f"--output: {what} can't be written: {error.strerror or one_line(error)}") from error


# -- the file of all predictions --


def write_json(value: Any, file: IO[bytes]) -> None:
    file.write((json.dumps(value, indent=1) + "\n").encode())


def write_npz(parts: Parts, file: IO[bytes]) -> None:
    """An archive as of ``numpy.savez``: an array for each column, of shape (samples, ...)."""
    with zipfile.ZipFile(file, "w") as archive:
        for name in next(iter(parts)):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                parts.write_array(name, member)


def write_parquet(parts: Parts, file: IO[bytes]) -> None:
    """A row for each sample, and a row group for each part. What is no number is a list of fixed length, nested as the array is."""
    parquet = import_parquet()
    writer = None
    for columns in parts:
        table = arrow_table(columns)
        writer = writer or parquet.ParquetWriter(file, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()


def import_parquet() -> Any:
    """
    Raises:
        UserError: it is not installed.
    """
    return import_extra("pyarrow.parquet", "files of predictions that end in .parquet", "parquet")


def arrow_table(columns: Columns) -> Any:
    """
    Raises:
        UserError: Arrow has no type for one of them.
    """
    pyarrow = importlib.import_module("pyarrow")
    try:
        return pyarrow.table({name: _arrow(pyarrow, column) for name, column in columns.items()})
    except pyarrow.ArrowException as error:
        raise UserError(
            f"--output: a file that ends in .parquet can't hold {_shown(_kinds(columns))}: {one_line(error)}"
        ) from error


def _arrow(pyarrow: Any, column: Array) -> Any:
    found = pyarrow.array(np.ascontiguousarray(column).reshape(-1))
    for length in reversed(column.shape[1:]):
        found = pyarrow.FixedSizeListArray.from_arrays(found, length)
    return found


WRITERS: Mapping[str, Callable[[Parts, IO[bytes]], None]] = {".npz": write_npz, ".parquet": write_parquet}
