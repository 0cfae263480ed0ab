"""What the records of a job's samples (``--sample_record``) say: how often each sample was used."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path


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
