"""A module's own ``custom_data_reader``, read by index.

Best is a reader with ``__len__`` and ``__getitem__(index)``. One in the style of ElasticDL has ``create_shards()``,
which returns ``{name: (start, count)}``, and ``read_records(task)``, which yields the records from ``task.shard.start``
up to ``task.shard.end`` of the shard ``task.shard.name``. It is asked for just the records that are needed, so it has
to heed the range; a reader that can't read from the middle can't be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from elasticdl.common.errors import UserError
from elasticdl.common.reason import name_of
from elasticdl.data.records import NO_COLUMNS, Batch, Metadata, Records

Reader = Any
EXPECTED = "expected __len__ and __getitem__(index), or create_shards() and read_records(task)"


@dataclass(frozen=True, slots=True)
class Shard:
    """Records ``start`` up to ``end`` of what has this name."""

    name: str
    start: int
    end: int
    indices: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Task:
    """What ``read_records`` is asked for, under the names of several versions of ElasticDL."""

    shard: Shard
    type: str
    task_id: int = 0

    @property
    def shard_name(self) -> str:
        return self.shard.name

    @property
    def start(self) -> int:
        return self.shard.start

    @property
    def end(self) -> int:
        return self.shard.end


@dataclass(frozen=True, slots=True)
class _IndexedReader:
    name: str
    reader: Reader
    metadata: Metadata

    def __len__(self) -> int:
        return len(self.reader)

    def read(self, rows: Sequence[int]) -> Batch:
        return stack([self.reader[row] for row in rows], self.name)


@dataclass(frozen=True, slots=True)
class _ShardReader:
    """One shard; runs of neighbouring records are read at once."""

    name: str
    shard: Shard
    reader: Reader
    mode: str
    metadata: Metadata

    def __len__(self) -> int:
        return self.shard.end - self.shard.start

    def read(self, rows: Sequence[int]) -> Batch:
        wanted = sorted(set(rows))
        found: dict[int, Any] = {}
        for first, last in _runs(wanted):
            found.update(zip(range(first, last + 1), self._range(first, last + 1), strict=True))
        return stack([found[row] for row in rows], self.name)

    def _range(self, start: int, end: int) -> list[Any]:
        part = Shard(self.shard.name, self.shard.start + start, self.shard.start + end)
        prepare = getattr(self.reader, "preprocess_records", lambda records: records)
        records = list(islice(prepare(self.reader.read_records(Task(part, self.mode))), end - start + 1))
        if len(records) != end - start:
            shown = "more" if len(records) > end - start else str(len(records))
            raise UserError(
                f"{self.name}: read_records gave {shown} records for start={part.start}, end={part.end}; it has to "
                "give exactly those of the task, or have __len__ and __getitem__(index)"
            )
        return records


def open_custom(make: Callable[..., Reader], origin: str, mode: str, params: dict[str, object]) -> Records:
    """Make the reader and find its records.

    Raises:
        UserError: it can't be read by index.
        Exception: whatever the user's code raises.
    """
    where = f"{name_of(make)}({origin!r})"
    reader = make(data_origin=origin, records_per_task=1, **params)
    metadata = getattr(reader, "metadata", None) or NO_COLUMNS
    if hasattr(reader, "__len__") and hasattr(reader, "__getitem__"):
        return Records([_IndexedReader(where, reader, metadata)])
    if not (hasattr(reader, "create_shards") and hasattr(reader, "read_records")):
        raise UserError(f"{where} returned {type(reader).__name__}; {EXPECTED}")
    shards = reader.create_shards()
    if not isinstance(shards, dict) or not shards:
        raise UserError(f"{where}: create_shards() returned {shards!r}; expected {{name: (start, count)}}")
    files = []
    for name, (start, count) in shards.items():
        shard = Shard(str(name), start, start + count)
        files.append(_ShardReader(f"{where}: shard {name}", shard, reader, mode, metadata))
    for file in files[:1]:  # a reader that pays no heed to the range shows at once
        file.read([len(file) - 1])
    return Records(files)


def stack(records: list[Any], where: str) -> Batch:
    """Records as columns.

    Raises:
        UserError: they differ in shape or structure.
    """
    try:
        match records[0]:
            case dict() as first:
                return {key: stack([record[key] for record in records], where) for key in first}
            case tuple():
                return tuple(stack(list(column), where) for column in zip(*records, strict=True))
            case bytes() | str():
                texts = np.empty(len(records), object)
                texts[:] = records
                return texts
            case [bytes() | str(), *_]:
                return np.stack([np.array(record, object) for record in records])
        return np.stack([np.asarray(record) for record in records])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{where}: records differ in shape or structure ({error}); expected equal ones") from error


def _runs(sorted_rows: list[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of neighbours."""
    first = last = sorted_rows[0]
    for row in sorted_rows[1:]:
        if row != last + 1:
            yield first, last
            first = row
        last = row
    yield first, last
