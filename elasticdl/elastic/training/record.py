"""A record of the samples that a worker really consumed, for proving that each was used exactly once per epoch.

Two kinds of JSON lines: ``begin`` before a step's gradients are reduced (so that it is there even if the worker is
killed right after contributing), ``commit`` after the step has been applied. A step counts with the indices begun by all
members in the newest world that committed it; what was begun and never committed is a torn step.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.progress import Progress, StepPlan
from elasticdl.elastic.core.world import World


class SampleRecord:
    """Appends to one file per worker."""

    def __init__(self, folder: Path, worker_id: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"worker-{worker_id}.jsonl").open("a", buffering=1)
        except OSError as error:
            raise UserError(f"--sample_record {folder}: {error.strerror}") from error

    def begin(self, world: World, plan: StepPlan) -> None:
        indices = [int(index) for micro_batch in plan.micro_batches for index in micro_batch]
        self._write({"begin": plan.step, "world": world.version, "epoch": plan.epoch, "indices": indices})

    def commit(self, world: World, progress: Progress) -> None:
        self._write({"commit": progress.step, "world": world.version})

    def close(self) -> None:
        self._file.close()

    def _write(self, entry: dict[str, object]) -> None:
        self._file.write(json.dumps(entry) + "\n")


def consumed(records: Iterable[Path]) -> dict[int, Counter[int]]:
    """How often each sample index was used, by epoch, from the records of all workers."""
    begun: dict[tuple[int, int], list[tuple[int, list[int]]]] = {}  # (step, world) -> (epoch, indices) of each worker
    committed: dict[int, int] = {}  # step -> newest world that committed it
    for path in records:
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if "commit" in entry:
                committed[entry["commit"]] = max(entry["world"], committed.get(entry["commit"], 0))
            else:
                begun.setdefault((entry["begin"], entry["world"]), []).append((entry["epoch"], entry["indices"]))
    epochs: dict[int, Counter[int]] = {}
    for step, world in committed.items():
        for epoch, indices in begun.get((step, world), []):
            epochs.setdefault(epoch, Counter()).update(indices)
    return epochs
