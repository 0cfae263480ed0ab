"""The journal of a job: what happened, one JSON object a line, appended and never changed.

Each entry has ``time`` (seconds since the epoch) and ``event``; `EVENTS` says what else. What a worker has told has the
``worker`` in whose session it came, too. Status pages,
plots, summaries and benchmarks are all made from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
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
    "worker_left": "worker, cause, reason, code: its process is gone",
    "change_announced": "world, reason: members will leave the world after their step",
    "world_broken": "world, reason: a member is gone; the others leave the world at once",
    "world_formed": "world, members (worker ids in rank order), step, reason, seconds since forming began",
    "pause": "world, worker, kind (grow|shrink|failure), notice, drain, rendezvous, init, sync, first_step, total, steps_torn",
    "evaluation": "step, epoch, samples, metrics",
    "checkpoint": "step, path, seconds",
    "checkpoint_failed": "step, path, reason",
    "collective": "engine (horovod|torch): what sums gradients over workers",
    "resumed": "step, epoch, samples, path",
    "exported": "path",
    "warning": "message",
    "epoch_finished": "epoch, step, loss (mean over its samples, as far as rank 0 could report them)",
    "scale_requested": "workers",
    "stop_requested": "reason, checkpoint",
    "phase": "phase, reason",
    "job_finished": "phase, reason, steps, epochs, samples, metrics",
}


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


def read_journal(path: Path) -> Iterator[Entry]:
    """Every whole entry of a journal file; a last line that is still being written is left out."""
    with path.open() as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)
