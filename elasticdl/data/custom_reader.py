"""A module's own ``custom_data_reader``, read by index.

Best is a reader with ``__len__`` and ``__getitem__(index)``. One in the style of ElasticDL has ``create_shards()``,
which returns ``{name: (start, count)}``, and ``read_records(task)``, which yields the records from ``task.shard.start``
up to ``task.shard.end`` of the shard ``task.shard.name``. It is asked for just the records that are needed, so it has
to heed the range; a reader that can't read from the middle can't be used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
class _Part:
    """What a reader reads by index, or one of its shards."""

    name: str
    size: int
    take: Callable[[Sequence[int]], list[Any]]
    metadata: Metadata

    def __len__(self) -> int:
        return self.size

    def read(self, rows: Sequence[int]) -> Batch:
        return stack(self.take(rows), self.name)


def _by_index(reader: Reader, rows: Sequence[int]) -> list[Any]:
    return [reader[row] for row in rows]


def _of_shard(reader: Reader, where: str, shard: str, first: int, mode: str, rows: Sequence[int]) -> list[Any]:
    """Runs of neighbouring records are read at once. ``first``: the number of the shard's first record."""
    wanted = np.unique(rows)
    found: dict[int, Any] = {}
    prepare = getattr(reader, "preprocess_records", lambda records: records)
    for run in np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1):
        task = _task(shard, first + int(run[0]), first + int(run[-1]) + 1, mode)
        records = list(islice(prepare(reader.read_records(task)), len(run) + 1))
        if len(records) != len(run):
            shown = "more" if len(records) > len(run) else str(len(records))
            raise UserError(
                f"{where}: read_records gave {shown} records for start={task.start}, end={task.end}; it has to "
                "give exactly those of the task, or have __len__ and __getitem__(index)"
            )
        found.update(zip(run.tolist(), records, strict=True))
    return [found[row] for row in rows]


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
        return Records([_Part(where, len(reader), partial(_by_index, reader), metadata)])
    if not (hasattr(reader, "create_shards") and hasattr(reader, "read_records")):
        raise UserError(f"{where} returned {type(reader).__name__}; {EXPECTED}")
    shards = reader.create_shards()
    if not isinstance(shards, dict) or not shards:
        raise UserError(f"{where}: create_shards() returned {shards!r}; expected {{name: (start, count)}}")
    files = []
    for shard, (start, count) in shards.items():
        name = f"{where}: shard {shard}"
        files.append(_Part(name, count, partial(_of_shard, reader, name, str(shard), start, mode), metadata))
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
