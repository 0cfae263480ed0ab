"""`summary.json`: what became of a job, for people and programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elasticdl.job.history import History, PauseRecord, TimeUse, WorldSpan
from elasticdl.job.jobdir import write_aside
from elasticdl.job.journal import plain
from elasticdl.master.state.instructions import EndJob
from elasticdl.master.state.training import Training


def write_summary(folder: str, end: EndJob, training: Training, found: History, wall_time: float) -> Path:
    """Write the summary into ``folder``, whole or not at all.

    Raises:
        OSError: the folder can't be written.
    """
    path = Path(folder) / "summary.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_aside(path, json.dumps(plain(summarize(end, training, found, wall_time)), indent=1, allow_nan=False) + "\n")
    return path


def summarize(end: EndJob, training: Training, found: History, wall_time: float) -> dict[str, Any]:
    """``time``: where the seconds of the job (``wall``) and of all its workers went. ``remarks``: what was left out, as of
    lists that are too long, and what can't be known."""
    return {
        "status": str(end.phase),
        **achieved(end, training),
        "worlds": [_world(world) for world in found.worlds],
        "pauses": [_pause(pause) for pause in found.pauses],
        "wall_time": round(wall_time, 3),
        "scaling": _scaling(found),
        "time": {"wall": _rounded(found.spent.wall), "workers": _rounded(found.spent.workers)},
        "remarks": list(found.remarks),
    }


def _world(world: WorldSpan) -> dict[str, Any]:
    about = {"version": world.version, "members": list(world.members), "reason": world.reason, "step": world.step}
    return {**about, "formed_at": world.since, **({"ended_at": world.until} if world.until is not None else {})}


def _pause(pause: PauseRecord) -> dict[str, Any]:
    about = {"time": pause.time, "world": pause.world, "kind": pause.kind, "workers": pause.workers}
    return {**about, **pause.parts, "total": pause.total, "steps_torn": pause.steps_torn}


def _scaling(found: History) -> dict[str, Any]:
    """What is known of other numbers of workers, and what the job decided by it; empty if nothing."""
    names = ("workers", "speedup", "measured")
    curve = [dict(zip(names, row, strict=True)) for row in found.speedup]
    advice = {"advice": found.advice, "curve": curve} if found.advice else {}
    return {**advice, **({"workers": found.target, "decision": found.decision} if found.decision else {})}


def _rounded(seconds: Mapping[TimeUse, float]) -> dict[str, float]:
    return {str(doing): round(value, 3) for doing, value in seconds.items()}


def achieved(end: EndJob, training: Training) -> dict[str, Any]:
    numbers = {"steps": training.step, "epochs": training.epochs_done, "samples": training.samples}
    told = {"metrics": training.metrics, "collective": training.collective}
    compared = {"step": training.compared_step, "workers": training.compared_workers}
    return {"reason": end.reason, **numbers, **told, "compared": compared if training.compared_workers else None}
