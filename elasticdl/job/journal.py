"""The journal of a job: what happened, one JSON object a line, appended and never changed.

Each entry has ``time`` (seconds since the epoch) and ``event``; `elasticdl.job.events` says what else. What a worker has told
has the ``worker`` in whose session it came, too. Status pages, plots, summaries and benchmarks are all made from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Entry = dict[str, Any]

STEPS = "steps"
MOST_BETWEEN = 100  # entries between two on steps that are made one
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
    """None if it is none: a disk may have been full, or somebody else may have written there."""
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


def read_journal(path: Path) -> Iterator[Entry]:
    """Every whole entry of a journal file; a last line that is still being written is left out, and so are damaged ones."""
    with path.open(errors="replace") as lines:
        for line in lines:
            if line.endswith("\n") and (entry := parse_entry(line)) is not None:
                yield entry


def join_steps(first: Entry, second: Entry) -> Entry:
    """One `STEPS` entry that says what two of one world say, the second being the later."""
    steps, samples = first["steps"] + second["steps"], first["samples"] + second["samples"]

    def mean(name: str, by: str, over: float) -> float | None:
        values = [entry[name] for entry in (first, second)]
        if None in values:  # a loss that is no number
            return None
        joined: float = (values[0] * first[by] + values[1] * second[by]) / over if over else values[1]
        return joined

    return {
        **second,
        **{name: first[name] + second[name] for name in ("steps", "samples", "seconds", "again")},
        "loss": mean("loss", "samples", samples),
        **{name: mean(name, "steps", steps) for name in ("waited", "slowest")},
    }


def _can_be_joined(entry: Entry) -> bool:
    """Whether it is as a master writes it: a line may be damaged, or of another version."""
    numbers = [entry.get(name) for name in ("steps", "samples", "seconds", "again", "waited", "slowest")]
    known = all(isinstance(number, int | float) for number in numbers) and entry.get("world") is not None
    return known and isinstance(entry.get("loss"), int | float | None)


def thinned(lines: Iterable[str], bunch: int) -> Iterator[str]:
    """Lines of a journal in which up to ``bunch`` entries on steps of one world are made one, in the place of the last."""
    kept: Entry | None = None
    size, after = 0, list[str]()  # lines that follow what is kept
    for line in lines:
        entry = parse_entry(line)
        is_bunch = entry is not None and entry["event"] == STEPS and _can_be_joined(entry)
        if kept is not None and is_bunch and entry and size < bunch and kept["world"] == entry["world"]:
            yield from after
            kept, size, after = join_steps(kept, entry), size + 1, []
            continue
        ends = is_bunch or entry is None or entry["event"] == STEPS or "world" in entry["event"]
        if kept is not None and (ends or len(after) >= MOST_BETWEEN):
            yield dump_entry(kept) + "\n"
            yield from after
            kept, after = None, []
        if is_bunch:
            kept, size = entry, 1
        elif kept is not None:
            after.append(line)
        else:
            yield line
    if kept is not None:
        yield dump_entry(kept) + "\n"
    yield from after
