"""Many files as one sequence of records; and data in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from elasticdl.common.errors import UserError
from elasticdl.data.storage import Storage

Batch = Any  # records as columns: an array, or a dict or tuple of arrays, with one row a record


@dataclass(frozen=True, slots=True)
class Metadata:
    """What is known of all records."""

    column_names: list[str] | None = None
    """names of the columns, in order; None where records have no columns"""


NO_COLUMNS = Metadata()


class RecordFile(Protocol):
    """A file, or something like it, whose records can be read by number."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def metadata(self) -> Metadata: ...

    def __len__(self) -> int: ...

    def read(self, rows: Sequence[int]) -> Batch:
        """The records of these numbers, in this order."""


@dataclass(frozen=True, slots=True)
class PieceFile:
    """Records are pieces of a file, as byte strings."""

    name: str
    storage: Storage
    spans: NDArray[np.int64]  # begin and end of each piece
    stripped: bytes = b""  # characters that are no part of a record at its end
    metadata: Metadata = NO_COLUMNS

    def __len__(self) -> int:
        return len(self.spans)

    def read(self, rows: Sequence[int]) -> Batch:
        records = np.empty(len(rows), object)
        records[:] = self.pieces(rows)
        return records

    def pieces(self, rows: Sequence[int]) -> list[bytes]:
        return [piece.rstrip(self.stripped) for piece in self.storage.read(self.name, self.spans[rows].tolist())]


class Records:
    """The records of all files, in the order of the files; empty files are skipped."""

    def __init__(self, files: Sequence[RecordFile]) -> None:
        """Put files one after another.

        Raises:
            UserError: there is no file, or their columns differ.
        """
        if not files:
            raise UserError("there are no record files; expected at least one")
        first = files[0]
        self.metadata = first.metadata
        for file in files[1:]:
            if file.metadata.column_names != first.metadata.column_names:
                raise UserError(
                    f"{file.name}: columns {file.metadata.column_names}, but {first.name} has {first.metadata.column_names}; "
                    "expected the same in all files"
                )
        self._files = [file for file in files if len(file)]
        self._ends = np.cumsum([len(file) for file in self._files], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._files else 0

    def read(self, indices: Sequence[int] | NDArray[np.integer[Any]]) -> Batch:
        """The records of these indices, in this order, as columns: an array, or a dict or tuple of arrays, one row a record.

        Raises:
            IndexError: an index is not below the number of records.
            UserError: a record can't be read, or records differ in shape.
        """
        asked = np.asarray(indices, np.int64)
        if not len(asked) or asked.min() < 0 or asked.max() >= len(self):
            raise IndexError(f"records {asked.tolist()[:3]}..., but there are {len(self)}")
        place = np.searchsorted(self._ends, asked, side="right")
        order = np.argsort(place, kind="stable")
        numbers, starts = np.unique(place[order], return_index=True)
        parts = []
        for number, chosen in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
            file = self._files[number]
            parts.append(file.read((asked[chosen] - (self._ends[number] - len(file))).tolist()))
        if len(parts) == 1:
            return parts[0]
        try:
            back = np.argsort(order, kind="stable")
            return by_column(lambda columns: np.concatenate(columns)[back], parts)
        except (ValueError, KeyError) as error:
            names = ", ".join(self._files[number].name for number in numbers.tolist()[:4])
            raise UserError(f"{names}: their records are of different shape or columns ({error})") from error

    def place(self, index: int) -> str:
        """Where a record is, for messages."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        file = self._files[number]
        return f"record {index - (int(self._ends[number]) - len(file)):,} of {file.name}"


def by_column(function: Callable[[list[Any]], Any], parts: list[Any]) -> Any:
    """What a function makes of each column of several batches, or of each field of several records."""
    match parts[0]:
        case dict() as first:
            return {key: by_column(function, [part[key] for part in parts]) for key in first}
        case tuple():
            return tuple(by_column(function, list(column)) for column in zip(*parts, strict=True))
    return function(parts)


class Arrays:
    """Inputs and labels in memory, for model-zoo modules; one row a sample.

    Args:
        inputs: an array, or a dict of arrays.
        labels: an array with as many rows.
        transform: ``transform(inputs)`` is applied to each batch of inputs that is fetched, for instance to augment images.

    Raises:
        ValueError: the numbers of rows differ.
    """

    def __init__(
        self,
        inputs: NDArray[Any] | dict[str, NDArray[Any]],
        labels: NDArray[Any],
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        columns = inputs if isinstance(inputs, dict) else {"": inputs}
        for name, column in columns.items():
            if len(column) != len(labels):
                raise ValueError(f"inputs {name}: {len(column)} rows, but there are {len(labels)} labels")
        self.inputs, self.labels, self.transform = inputs, labels, transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        inputs, labels = self.__getitems__([index])
        return by_column(lambda columns: columns[0][0], [inputs]), labels[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Any, NDArray[Any]]:
        """A whole batch, inputs and labels, in the order of the indices."""
        rows = np.asarray(indices)
        taken = by_column(lambda columns: columns[0][rows], [self.inputs])
        return self.transform(taken) if self.transform else taken, self.labels[rows]
