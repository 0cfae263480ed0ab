"""Parquet files, read by row group.

A row can't be read without the group of rows that it was packed with. Groups that were read stay in memory, the latest
up to a bound; data that fits below it is read once, larger data that is shuffled over many groups again and again.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from elasticdl.common.errors import UserError
from elasticdl.data.records import Batch, Metadata, chosen_columns
from elasticdl.data.storage import Storage

log = logging.getLogger(__name__)

MOST_CACHED = 1 << 30  # bytes, per data set and process

Columns = dict[str, NDArray[Any]]


class GroupCache:
    """Row groups by file and number, the latest used, up to a number of bytes; for any number of threads."""

    def __init__(self, most: int = MOST_CACHED) -> None:
        self._most = most
        self._groups: OrderedDict[tuple[str, int], Columns] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._warned = False

    def __reduce__(self) -> tuple[type[GroupCache], tuple[int]]:
        return GroupCache, (self._most,)

    def get(self, key: tuple[str, int], read: Callable[[], Columns]) -> Columns:
        """The group, which is read if it is not here."""
        with self._lock:
            if key in self._groups:
                self._groups.move_to_end(key)
                return self._groups[key]
        group = read()
        with self._lock:
            if key in self._groups:  # two threads have read it at once
                return group
            self._groups[key] = group
            self._bytes += _size(group)
            while self._bytes > self._most and len(self._groups) > 1:
                self._bytes -= _size(self._groups.popitem(last=False)[1])
                if not self._warned:
                    self._warned = True
                    log.warning(
                        "Parquet data of more than %d MiB is read by row group again and again; it is faster as TFRecord, "
                        "or with fewer columns in --data_reader_params",
                        self._most >> 20,
                    )
        return group


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Records are dicts of the values of a row, by column."""

    file: str
    number: int
    rows: int
    columns: list[str]
    storage: Storage
    cache: GroupCache

    @property
    def name(self) -> str:
        return f"row group {self.number} of {self.file}"

    @property
    def metadata(self) -> Metadata:
        return Metadata(self.columns)

    def __len__(self) -> int:
        return self.rows

    def read(self, rows: Sequence[int]) -> Batch:
        columns = self.cache.get((self.file, self.number), self._load)
        return {name: values[rows] for name, values in columns.items()}

    def _load(self) -> Columns:
        try:
            with self.storage.open(self.file) as content, pq.ParquetFile(content) as opened:
                table = opened.read_row_group(self.number, columns=self.columns, use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{self.file}: row group {self.number} can't be read: {error}") from error
        return {name: _array(table[name], f"{self.file}: column {name}") for name in self.columns}


def open_parquet(name: str, storage: Storage, cache: GroupCache, columns: Sequence[str] | None) -> list[RowGroup]:
    try:
        with storage.open(name) as content:
            footer = pq.read_metadata(content)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{name}: not a whole Parquet file ({reason}); expected one that ends with its footer"
        ) from error
    kept = chosen_columns(name, columns, footer.schema.to_arrow_schema().names)
    sizes = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
    return [RowGroup(name, number, size, kept, storage, cache) for number, size in enumerate(sizes)]


def _array(column: pa.ChunkedArray, where: str) -> NDArray[Any]:
    """One row a value. Missing numbers are NaN, missing texts are empty."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        texts_array = np.empty(len(column), object)
        texts_array[:] = [value or b"" for value in column.cast(pa.large_binary()).to_pylist()]
        return texts_array
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _vectors(column, where)
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise UserError(f"{where} is of type {kind}; expected numbers, texts, or lists of numbers")
    if column.null_count and not pa.types.is_floating(kind):
        raise UserError(f"{where} has {column.null_count} missing values, which {kind} can't hold; expected none")
    return np.asarray(column.to_numpy())


def _vectors(column: pa.ChunkedArray, where: str) -> NDArray[Any]:
    whole = column.combine_chunks()
    sizes = (
        {column.type.list_size} if pa.types.is_fixed_size_list(column.type) else set(np.unique(whole.value_lengths()))
    )
    if column.null_count or len(sizes) > 1:
        raise UserError(f"{where} has lists of different length, or missing ones; expected the same length in all rows")
    return _array(pa.chunked_array([whole.flatten()]), where).reshape(len(column), -1)


def _size(group: Columns) -> int:
    """Roughly; texts are guessed at."""
    return sum(column.nbytes + (64 * column.size if column.dtype == object else 0) for column in group.values())
