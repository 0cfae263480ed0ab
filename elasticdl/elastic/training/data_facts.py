"""What data a worker has, in a few numbers, so that no two workers train on different data in silence.

A worker that comes later reads its data anew: a file may have grown meanwhile, a folder may be listed in another order, a split
may be drawn without a seed. So rank 0 tells the master its facts, and whoever comes later and has other data refuses itself before it asks for a world.
In the first step of each world and of each epoch all members compare them.

A data set is not asked for samples: that may draw random numbers, count, or open a file before a fork. What it *holds* for
each sample (an array of inputs, a list of paths or labels) is looked at in a few places, anew in each epoch. Floating-point numbers
may differ by rounding, as hosts compute them differently.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Self

import numpy as np

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import BatchPolicy, SampleOrder, plain_text

Value = int | float | str
TRAINING, EVALUATION = "training data", "evaluation data"

_ROWS = 128  # of a column, evenly spaced
_CELLS = 4  # numbers of a row
_COLUMNS = 16
_DEPTH = 4  # of data sets within one another
_TEXT = 80  # characters
_REMEDY = "every worker must read the same data in the same order, whenever it starts"
_OTHER_MODEL = "every worker must make the same model"
_PARAMETER = "its model's parameter "
_ROUNDING = 1e-3  # part of a column's largest value


@dataclass(frozen=True, slots=True)
class Column:
    """What a data set holds for each of its samples."""

    name: str
    shape: str  # of a row; empty for what is no array
    rows: tuple[tuple[Value, ...], ...]  # of the samples `places` names

    def differs(self, job: Column, samples: int) -> str:
        """In words; empty if it does not. ``job``: the same column of another worker, of as many samples."""
        if self.shape != job.shape:
            return f"a sample is {self.shape or 'no array'} ({self.name}), the job's {job.shape or 'no array'}"
        scale = max((abs(cell) for row in job.rows for cell in row if isinstance(cell, float)), default=0.0)
        for place, mine, theirs in zip(_places(samples), self.rows, job.rows, strict=False):
            if not _are_near(mine, theirs, scale):
                return f"sample {place + 1} is {_shown(mine)} ({self.name}), the job's {_shown(theirs)}"
        return ""


@dataclass(frozen=True, slots=True)
class Source:
    """A data set of a worker's. ``samples``: -1 if it can't tell. ``batch``: samples of one; None if its loader does not say.
    ``data``: itself; none where it is told to others."""

    role: str
    samples: int
    columns: tuple[Column, ...] = ()
    batch: int | None = None
    data: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, role: str, data: Any) -> Self:
        """Of a data set, at its beginning."""
        try:
            samples = len(data)
        except (TypeError, NotImplementedError):
            return cls(role, -1)
        found = (_column(*each) for each in _held(data, samples, ""))
        return cls(role, samples, tuple(islice(filter(None, found), _COLUMNS)), data=data)

    def now(self) -> Self:
        """With what training has put into it in the place of something else: labels that a model has made, and not a cache that fills."""
        moved = {column.name: column for column in Source.of(self.role, self.data).columns}
        columns = (moved.get(each.name, each) if len(set(each.rows)) > 1 else each for each in self.columns)
        return replace(self, columns=tuple(columns), data=None)

    def differs(self, job: Source) -> str:
        """In words; empty if it does not, as far as these facts go. ``job``: of a worker that has trained, or of rank 0."""
        if self.samples != job.samples:
            return f"its {self.role} have {self.samples} samples, the job's {job.samples}"
        if self.batch != job.batch:
            return f"its loader of {self.role} has the batch size {self.batch}, the job's {job.batch}"
        theirs = {column.name: column for column in job.columns}
        pairs = ((column, theirs[column.name]) for column in self.columns if column.name in theirs)
        found = next(filter(None, (mine.differs(other, self.samples) for mine, other in pairs)), "")
        return f"in its {self.role} {found}" if found else ""


def named_sources(role: str, data: Any) -> list[Source]:
    """Of a data set, of several by their names, or of none."""
    named = data.items() if isinstance(data, dict) else [("", data)]
    return [Source.of(f"{role} {name}".rstrip(), each) for name, each in named if each is not None]


@dataclass(frozen=True, slots=True)
class DataFacts:
    """All that a worker tells of its data and its model. ``settings``: by which the order of samples is made, each by its name for people.
    ``shapes``: of parameters, by their names; they never change, whatever a script freezes or adds."""

    settings: Mapping[str, Any]
    sources: tuple[Source, ...]
    shapes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        policy: BatchPolicy,
        order: SampleOrder | None,
        sources: Iterable[Source],
        shapes: Mapping[str, str] | None = None,
    ) -> Self:
        """``order``: of the samples, if it is ours. Else batches are the script's, which it may not have made yet."""
        settings: dict[str, Any] = {}
        if order is not None:
            settings = {"global batch size": policy.global_batch, "batch size per worker": policy.worker_batch}
            settings |= {"seed": order.seed, "shuffle": order.shuffle, "drop_last": order.drop_last}
            settings |= {"steps_per_epoch": order.steps_per_epoch}
        return cls(settings, tuple(sources), shapes or {})

    def differs(self, job: DataFacts) -> str:
        """In words; empty if it does not, as far as these facts go."""
        theirs = {source.role: source for source in job.sources}
        pairs = ((source, theirs[source.role]) for source in self.sources if source.role in theirs)
        if found := next(filter(None, (mine.differs(other) for mine, other in pairs)), ""):
            return found
        settings = ((f"its {name} is", mine, job.settings.get(name)) for name, mine in self.settings.items())
        shapes = ((f"{_PARAMETER}{name} is", mine, job.shapes.get(name, mine)) for name, mine in self.shapes.items())
        other = (f"{what} {mine}, the job's {theirs}" for what, mine, theirs in (*settings, *shapes) if mine != theirs)
        return next(other, "")

    def now(self) -> Self:
        """With the data as they are at this time."""
        return replace(self, sources=tuple(source.now() for source in self.sources))

    def to_bytes(self) -> bytes:
        """As they were at the beginning, which is where a worker stands that comes later."""
        return pickle.dumps(replace(self, sources=tuple(replace(source, data=None) for source in self.sources)))

    def require_same(self, told: bytes) -> None:
        """Before this worker asks for a world. ``told``: `to_bytes` of the worker that was rank 0; empty if nobody has trained yet.

        Raises:
            UserError: it has other data, or another model.
        """
        if told and (found := self.differs(pickle.loads(told))):  # of another worker of the same job
            remedy = _OTHER_MODEL if found.startswith(_PARAMETER) else _REMEDY
            raise UserError(f"refused: {found}: {remedy}")


def _held(data: Any, samples: int, name: str, depth: int = _DEPTH) -> Iterator[tuple[str, Any, int]]:
    """What is held for each sample, with its name and their number; also within other data sets, and in short tuples and dicts."""
    if _is_column(data) and _length(data) == samples:
        yield name or "row", data, samples
        return
    for key, each in _parts(data) if depth else ():
        is_data = hasattr(each, "__getitem__") and not isinstance(each, Mapping) and not _is_column(each)
        if is_data or isinstance(each, Mapping) or _is_column(each):
            size = _length(each) if is_data else samples  # a `Subset` holds a data set of another length
            yield from _held(each, size, f"{name}.{key}" if name else key, depth - 1)


def _parts(data: Any) -> list[tuple[str, Any]]:
    if isinstance(data, Mapping | tuple | list):
        keyed = data.items() if isinstance(data, Mapping) else enumerate(data)
        return [(str(key), each) for key, each in keyed] if len(data) <= _COLUMNS else []
    return [] if _is_column(data) else list(getattr(data, "__dict__", {}).items())


def _is_column(value: Any) -> bool:
    return isinstance(value, tuple | list | range) or (hasattr(value, "__getitem__") and hasattr(value, "shape"))


def _length(value: Any) -> int:
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return -1


def _column(name: str, held: Any, samples: int) -> Column | None:
    """None if it can't be compared."""
    if not samples:
        return None
    try:
        rows = _rows(held, _places(samples))
    except Exception:  # noqa: BLE001 - whatever a user's container raises
        return None
    prefix = _folder([row for row in rows if isinstance(row, str)])
    shape = f"{rows[0].dtype} {rows[0].shape}" if isinstance(rows[0], np.ndarray) else ""
    return Column(name, shape, tuple(_cells(row, prefix) for row in rows))


def _folder(paths: Sequence[str]) -> str:
    """In which all of them are: each host may have its own."""
    first, last = min(paths, default=""), max(paths, default="")
    same = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    return first[:same].rpartition("/")[0]


def _places(samples: int) -> list[int]:
    """Of so many samples, evenly spaced, the first and the last included."""
    count = min(samples, _ROWS)
    return [round(number * (samples - 1) / max(1, count - 1)) for number in range(count)]


def _rows(held: Any, places: Sequence[int]) -> list[Any]:
    if isinstance(held, tuple | list | range):
        found = [held[place] for place in places]
        return [_on_host(row) if hasattr(row, "shape") else row for row in found]
    return [np.asarray(row) for row in _on_host(held[places])]


def _on_host(row: Any) -> Any:
    """An array of NumPy's; ``row``: any framework's."""
    if hasattr(row, "detach"):  # of torch, perhaps on a device
        row = row.detach().cpu()
    return np.asarray(row)


def _cells(row: Any, prefix: str) -> tuple[Value, ...]:
    """Some of a row; of many numbers also their mean, as some may be the same in all rows."""
    if isinstance(row, np.ndarray):
        flat = row.reshape(-1)
        picked = flat[[round(each) for each in np.linspace(0, flat.size - 1, min(_CELLS, flat.size))]]
        if row.dtype.kind in "iubf":
            mean = [float(flat.mean(dtype=np.float64))] if flat.size > _CELLS else []
            return (*picked.tolist(), *mean)
        return tuple(plain_text(each)[:_TEXT] for each in picked.tolist()) if row.dtype.kind in "OUS" else ()
    if isinstance(row, str):
        return (row[len(prefix) :].lstrip("/")[-_TEXT:],)
    if isinstance(row, bool | int | float):
        return (row,)
    if isinstance(row, tuple | list):
        return tuple(cell for each in row[:_CELLS] for cell in _cells(each, prefix)[:1])
    return (plain_text(row)[:_TEXT],) if isinstance(row, bytes) or row is None else ()


def _are_near(mine: Sequence[Value], theirs: Sequence[Value], scale: float) -> bool:
    return len(mine) == len(theirs) and all(
        abs(a - b) <= _ROUNDING * scale or a == b or (math.isnan(a) and math.isnan(b))
        if isinstance(a, float) and isinstance(b, float)
        else a == b
        for a, b in zip(mine, theirs, strict=True)
    )


def _shown(row: Sequence[Value]) -> str:
    cells = [f"{cell:.4g}" if isinstance(cell, float) else repr(cell) for cell in row]
    return cells[0] if len(cells) == 1 else f"({', '.join(cells)})"
