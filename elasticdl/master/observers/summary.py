"""`summary.json`: what became of a job, for people and programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from elasticdl.common.jobdir import write_aside
from elasticdl.common.journal import plain, read_journal
from elasticdl.master.core.instructions import EndJob
from elasticdl.master.core.training import Training

# A world that nobody broke lasts until the next is formed: its members leave it together.
WORLD_ENDS = ("world_broken", "world_formed", "job_finished")


def write_summary(folder: str, end: EndJob, training: Training, journal: Path, wall_time: float) -> Path:
    """Write the summary into ``folder``, whole or not at all.

    Raises:
        OSError: the folder can't be written.
    """
    path = Path(folder) / "summary.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_aside(path, json.dumps(plain(summarize(end, training, journal, wall_time)), indent=1, allow_nan=False) + "\n")
    return path


def summarize(end: EndJob, training: Training, journal: Path, wall_time: float) -> dict[str, Any]:
    worlds: list[dict[str, Any]] = []
    pauses: list[dict[str, Any]] = []
    for entry in read_journal(journal):
        if worlds and entry["event"] in WORLD_ENDS:
            worlds[-1].setdefault("ended_at", entry["time"])
        if entry["event"] == "world_formed":
            world = {key: entry[key] for key in ("members", "reason", "step")}
            worlds.append({"version": entry["world"], **world, "formed_at": entry["time"]})
        elif entry["event"] == "pause":
            pauses.append({key: value for key, value in entry.items() if key != "event"})
    found = {"worlds": worlds, "pauses": pauses, "wall_time": round(wall_time, 3)}
    return {"status": str(end.phase), **achieved(end, training), **found}


def achieved(end: EndJob, training: Training) -> dict[str, Any]:
    numbers = {"steps": training.step, "epochs": training.epochs_done, "samples": training.samples}
    return {"reason": end.reason, **numbers, "metrics": training.metrics, "collective": training.collective}
