"""A module's own ``custom_data_reader``, read by index.

Best is a reader with ``__len__`` and ``__getitem__(index)``. One in the style of ElasticDL has ``create_shards()``,
which returns ``{name: (start, count)}``, and ``read_records(task)``, which yields the records from ``task.shard.start``
up to ``task.shard.end`` of the shard ``task.shard.name``. It is asked for just the records that are needed, so it has
to heed the range; a reader that can't read from the middle can't be used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticdl.common.errors import UserError
from elasticdl.common.reason import name_of
from elasticdl.data.records import NO_COLUMNS, Batch, Metadata, Records, by_column

Reader = Any
EXPECTED = "expected __len__ and __getitem__(index), or create_shards() and read_records(task)"


def _task(name: str, start: int, end: int, mode: str) -> SimpleNamespace:
    """What ``read_records`` is asked for, under the names of several versions of ElasticDL."""
    shard = SimpleNamespace(name=name, start=start, end=end, indices=[])
    return SimpleNamespace(shard=shard, type=mode, task_id=0, shard_name=name, start=start, end=end)


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
    shard: str
    start: int
    end: int
    reader: Reader
    mode: str
    metadata: Metadata

    def __len__(self) -> int:
        return self.end - self.start

    def read(self, rows: Sequence[int]) -> Batch:
        wanted = np.unique(rows)
        found: dict[int, Any] = {}
        for run in np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1):
            start, end = int(run[0]), int(run[-1]) + 1
            found.update(zip(range(start, end), self._range(start, end), strict=True))
        return stack([found[row] for row in rows], self.name)

    def _range(self, start: int, end: int) -> list[Any]:
        task = _task(self.shard, self.start + start, self.start + end, self.mode)
        prepare = getattr(self.reader, "preprocess_records", lambda records: records)
        records = list(islice(prepare(self.reader.read_records(task)), end - start + 1))
        if len(records) != end - start:
            shown = "more" if len(records) > end - start else str(len(records))
            raise UserError(
                f"{self.name}: read_records gave {shown} records for start={task.start}, end={task.end}; it has to "
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
        files.append(_ShardReader(f"{where}: shard {name}", str(name), start, start + count, reader, mode, metadata))
    for file in files[:1]:  # a reader that pays no heed to the range shows at once
        file.read([len(file) - 1])
    return Records(files)


def stack(records: list[Any], where: str) -> Batch:
    """Records as columns.

    Raises:
        UserError: they differ in shape or structure.
    """
    try:
        return by_column(_column, records)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{where}: records differ in shape or structure ({error}); expected equal ones") from error


def _column(values: list[Any]) -> NDArray[Any]:
    match values[0]:
        case bytes() | str():
            texts = np.empty(len(values), object)
            texts[:] = values
            return texts
        case [bytes() | str(), *_]:
            return np.stack([np.array(value, object) for value in values])
    return np.stack([np.asarray(value) for value in values])
