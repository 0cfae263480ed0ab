"""The journal of a job: what happened, one JSON object a line, appended and never changed.

Each entry has ``number``, ``time`` (seconds since the epoch) and ``event``; `elasticdl.job.event_catalogue` says what else. An entry
that a worker has told also has ``worker``, the worker in whose session it came. Numbers grow, but not by one: a master that takes over
begins beyond all that the last one may have told and not saved. Before format 1.2 there were none.

Status pages, plots, summaries and benchmarks are all made from the journal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

Entry = dict[str, Any]

STEPS = "steps"
_DIGITS = 6  # of a number of `Steps`: a person reads no more, and there are many entries
LATEST = 2.5e11  # seconds since the epoch: the year 9892


def dump_entry(entry: Entry) -> str:
    return json.dumps(plain(entry), separators=(", ", ": "), allow_nan=False)


def plain(value: Any) -> Any:
    """The value as JSON can say it: a number that is none (NaN, infinity) becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def parse_entry(line: str) -> Entry | None:
    """None if the line is no entry: a disk may have been full, or somebody else may have written there."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("event"), str):
        return None
    time = entry.get("time")
    if not isinstance(time, int | float) or isinstance(time, bool):
        return None
    return entry if 0 <= time < LATEST else None


def number_of(line: str) -> int:
    """0 if the line is no entry, or of a format without numbers."""
    number = (parse_entry(line) or {}).get("number")
    return number if type(number) is int else 0


def read_journal(path: Path) -> Iterator[Entry]:
    """Every whole entry of a journal file; a last line that is still being written is left out, and so are damaged ones."""
    with path.open(errors="replace") as lines:
        for line in lines:
            if line.endswith("\n") and (entry := parse_entry(line)) is not None:
                yield entry


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of one world, one after the other: an entry ``steps``. Loss and learning rate are None where they are not known."""

    step: int  # the last of them
    world: int
    steps: int
    samples: int
    loss: float | None
    learning_rate: float | None
    seconds: float
    again: int  # of them had been made before
    waited: float  # seconds a step that members waited for others, mean
    slowest: float  # of these, those for the slowest

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Steps | None:
        """None if the entry is not as a master writes it: it may be damaged, or of another version."""
        known = [entry.get(name) for name in _NAMES]
        sure = all(isinstance(value, int | float) or (value is None and name in _UNKNOWN) for name, value in zip(_NAMES, known, strict=True))  # fmt: skip
        return cls(*known) if sure else None  # type: ignore[arg-type]

    def __add__(self, later: Self) -> Self:
        """These and the steps that follow, as one. A loss that is not known counts for nothing."""
        steps, samples = self.steps + later.steps, self.samples + later.samples
        loss = later.loss if self.loss is None else self.loss
        if self.loss is not None and later.loss is not None:
            loss = (self.loss * self.samples + later.loss * later.samples) / samples if samples else later.loss
        return replace(
            later,
            steps=steps,
            samples=samples,
            loss=loss,
            seconds=self.seconds + later.seconds,
            again=self.again + later.again,
            waited=(self.waited * self.steps + later.waited * later.steps) / steps if steps else later.waited,
            slowest=(self.slowest * self.steps + later.slowest * later.steps) / steps if steps else later.slowest,
        )

    def fields(self) -> dict[str, Any]:
        """For an entry, and for a snapshot."""
        return {name: _short(getattr(self, name)) for name in _NAMES}


_NAMES = tuple(each.name for each in fields(Steps))
_UNKNOWN = ("loss", "learning_rate")


def _short(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) and math.isfinite(value) else value
