"""The journal of a job: what happened, one JSON object a line, appended and never changed.

Each entry has ``time`` (seconds since the epoch) and ``event``; `EVENTS` says what else. What a worker has told has the
``worker`` in whose session it came, too. Status pages,
plots, summaries and benchmarks are all made from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Entry = dict[str, Any]

EVENTS = {
    "job_started": "job, workers (MIN-MAX), specification",
    "master_restarted": "world, members, missing (worker ids that were expected and have not come), seconds until it knew",
    "worker_launched": "worker, reason, replaces (whether one that left)",
    "worker_pending": "worker, reason: asked for, but there is no place for it yet",
    "worker_started": "worker, host, pid",
    "worker_ready": "worker: warm, waiting to be let in",
    "worker_draining": "worker, reason: told to leave, or leaving by itself",
    "worker_stuck": "worker, host, why (stuck|not ready|no heartbeat|has not reached the master|...), seconds, "
    "state (of its process, if it can't run; of the master that it tries), "
    "where (as in train.py:31 in load), differs (from the others), stack (lines); those that are known",
    "worker_waits": "worker, where (as in train.py:31 in load), seconds: not ready yet, as its own code takes long at the start",
    "worker_left": "worker, cause, reason, code: its process is gone",
    "change_announced": "world, reason: members will leave the world after their step",
    "world_broken": "world, reason: a member is gone; the others leave the world at once",
    "world_formed": "world, members (worker ids in rank order), step, reason, seconds since forming began",
    "pause": "world, worker, kind (grow|shrink|failure), notice, drain, rendezvous, init, sync, first_step, total, steps_torn",
    "evaluation": "step, epoch, samples, metrics, seconds",
    "checkpoint": "step, path, seconds to write it, held (seconds of these, and of copying, that training stood still)",
    "checkpoint_failed": "step, path, reason",
    "collective": "engine (horovod|torch): what sums gradients over workers",
    "resumed": "step, epoch, samples, path",
    "exported": "path",
    "worker_slow": "worker, host, phase (data|compute|update), factor (of the median worker's), seconds (a step, by which the others wait)",
    "worker_recovered": "worker: no longer slow",
    "warning": "message",
    "epoch_finished": "epoch, step, loss (mean over its samples, as far as rank 0 could report them), compared (the step after which the "
    "workers' states were compared last), compared_workers (of how many they were one)",
    "scale_requested": "workers",
    "advice": "text, curve [{workers, speedup (of one worker), low, high (of 80 %), gain (over one worker less)}]",
    "decision": "workers (that the job wants from now on), reason",
    "stop_requested": "reason, checkpoint",
    "phase": "phase, reason",
    "steps_over": "step, seconds: a script has made its last step, and since its last step, evaluation or checkpoint it has done "
    "something else for so long",
    "steps": "step (the last), world, steps, samples, loss (mean over samples), learning_rate, seconds, again (how many of them "
    "were made before), waited (seconds a step that members waited for others, mean), slowest (of these, those for the slowest)",
    "job_finished": "phase, reason, steps, epochs, samples, metrics",
}
STEPS = "steps"
MOST_BETWEEN = 100  # entries between two on steps that are made one
LATEST = 2.5e11  # seconds since the epoch: the year 9892


def dump_entry(entry: Entry) -> str:
    return json.dumps(plain(entry), separators=(", ", ": "), allow_nan=False)


def standing(entry: Entry) -> str:
    """Where the worker of a ``worker_stuck`` stands, for people; empty if nothing is known."""
    where = entry.get("where")
    parts = (entry.get("state"), where and f"at {where}", entry.get("differs"))
    return ", ".join(str(part) for part in parts if part)


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
