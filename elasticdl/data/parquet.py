"""Parquet files. A row can't be read without the group of rows that it was packed with, so a file is read whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from elasticdl.common.errors import UserError
from elasticdl.data.records import Batch, Metadata, chosen_columns
from elasticdl.data.storage import Storage

Columns = dict[str, NDArray[Any]]


class ParquetFile:
    """Records are dicts of the values of a row, by column. All are in memory from the first that is asked for on."""

    def __init__(self, name: str, storage: Storage, columns: Sequence[str] | None) -> None:
        self.name, self._storage, self._asked = name, storage, columns
        try:
            with storage.open(name) as content:
                footer = pq.read_metadata(content)
        except (OSError, pa.ArrowException) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"{name}: not a whole Parquet file ({reason}); expected one that ends with its footer"
            ) from error
        self._kept = chosen_columns(name, columns, footer.schema.to_arrow_schema().names)
        self._length = int(footer.num_rows)
        self.metadata = Metadata(self._kept)

    def __reduce__(self) -> tuple[Any, ...]:
        return ParquetFile, (self.name, self._storage, self._asked)

    def __len__(self) -> int:
        return self._length

    def read(self, rows: Sequence[int]) -> Batch:
        return {name: values[rows] for name, values in self._columns.items()}

    @cached_property
    def _columns(self) -> Columns:
        try:
            with self._storage.open(self.name) as content:
                table = pq.read_table(content, columns=self._kept, use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{self.name}: can't be read: {error}") from error
        return {column: _array(table[column], f"{self.name}: column {column}") for column in self._kept}


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
