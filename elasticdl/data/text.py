"""CSV and other text, read by line.

A CSV record is the list of its fields, as byte strings. Quoted fields may hold separators and line ends; a quote
within one is doubled. Blank lines are no records.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elasticdl.common.errors import UserError
from elasticdl.data.records import Batch, Metadata, PieceFile
from elasticdl.data.storage import Storage

_BOM = b"\xef\xbb\xbf"
_NEWLINE, _QUOTE = 10, 34


@dataclass(frozen=True, slots=True)
class CsvFile:
    """Records are the fields of the chosen columns."""

    text: PieceFile
    metadata: Metadata
    sep: str
    width: int  # fields in each line
    chosen: tuple[int, ...]
    skipped: int  # lines of header

    @property
    def name(self) -> str:
        return self.text.name

    def __len__(self) -> int:
        return len(self.text) - self.skipped

    def read(self, rows: Sequence[int]) -> Batch:
        records = np.empty((len(rows), len(self.chosen)), object)
        lines = self.text.pieces([row + self.skipped for row in rows])
        for position, (row, line) in enumerate(zip(rows, lines, strict=True)):
            fields = _fields(line, self.sep)
            if len(fields) != self.width:
                start = int(self.text.spans[row + self.skipped][0])
                raise UserError(
                    f"{self.name}: record {row:,} (at byte {start:,}) has {len(fields)} fields, expected {self.width}; "
                    f"is the file cut short, or the separator not {self.sep!r}?"
                )
            records[position] = [fields[column] for column in self.chosen]
        return records


def open_text(name: str, storage: Storage, *, quotes: bool = False) -> PieceFile:
    """Find all lines; with ``quotes`` a line end within them is none."""
    return PieceFile(name, storage, _lines(name, storage, quotes), stripped=b"\r\n")


def open_csv(name: str, storage: Storage, sep: str, columns: list[str] | None, *, header: bool) -> CsvFile:
    """Find all records and read the header.

    ``columns``: those to keep, in this order, or the names of all if there is no header; None: all there are.
    """
    text = open_text(name, storage, quotes=True)
    if not len(text):
        return CsvFile(text, Metadata(columns), sep, 0, (), 0)
    first = _fields(text.pieces([0])[0].removeprefix(_BOM), sep)
    names = [field.decode() for field in first] if header else columns or []
    if names and len(names) != len(first):
        raise UserError(f"{name}: {len(first)} fields in the first line, but there are {len(names)} names of columns")
    kept = _chosen(name, columns, names)
    chosen = tuple(names.index(column) for column in kept) or tuple(range(len(first)))
    file = CsvFile(text, Metadata(kept or None), sep, len(first), chosen, int(header))
    if len(file):
        file.read([len(file) - 1])  # where a file that was cut short shows
    return file


def _chosen(where: str, asked: Sequence[str] | None, there: Sequence[str]) -> list[str]:
    """Those that were asked for, in that order, or all there are.

    Raises:
        UserError: one is not there.
    """
    if missing := [column for column in asked or () if column not in there]:
        raise UserError(f"{where}: no column {missing[0]!r}; its columns are {', '.join(there)}")
    return list(asked or there)


def _fields(line: bytes, sep: str) -> list[bytes]:
    if b'"' not in line:
        return line.split(sep.encode())
    text = line.decode("utf-8", "surrogateescape")
    parsed = next(csv.reader([text], delimiter=sep, strict=False))
    return [field.encode("utf-8", "surrogateescape") for field in parsed]


def _lines(name: str, storage: Storage, quotes: bool) -> NDArray[np.int64]:
    """Begin and end of each line that is not blank."""
    ends: list[NDArray[np.int64]] = []
    offset, within = 0, 0
    for chunk in storage.chunks(name):
        content = np.frombuffer(chunk, np.uint8)
        breaks = np.flatnonzero(content == _NEWLINE)
        marks = np.flatnonzero(content == _QUOTE) if quotes else np.empty(0, np.int64)
        if within or len(marks):
            breaks = breaks[(np.searchsorted(marks, breaks) + within) % 2 == 0]
            within = (within + len(marks)) % 2
        ends.append(breaks.astype(np.int64) + offset + 1)
        offset += len(chunk)
    if within:
        raise UserError(f'{name}: ends within a quoted field; expected as many " as close: is the file cut short?')
    found = np.concatenate([*ends, np.array([offset], np.int64)])
    spans: NDArray[np.int64] = np.column_stack([np.concatenate([[0], found[:-1]]), found])
    sizes = spans[:, 1] - spans[:, 0]
    short = np.flatnonzero((sizes > 0) & (sizes <= 2))  # a line end, or one character
    pieces = [(start, end) for start, end in spans[short].tolist()]
    blank = [index for index, line in zip(short, storage.read(name, pieces), strict=True) if not line.strip(b"\r\n")]
    kept = sizes > 0
    kept[blank] = False
    return spans[kept]
