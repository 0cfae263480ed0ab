"""What the page draws, as JSON: times in seconds since the job began, tables by columns."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from elasticdl.job.history import History, Lane, PauseRecord, Point, TimeUse, WorldSpan
from elasticdl.job.journal import plain
from elasticdl.report.words import NAMES, duration, percent, sentence

MOST_IDS = 12  # of workers that are named where many came or went at once
# JSON may stand in a script of HTML if it has none of these; U+2028 and U+2029 are escaped as all that is not ASCII.
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def as_json(value: Any) -> str:
    """Harmless wherever it stands in a page."""
    return json.dumps(plain(value), separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def page_data(history: History) -> dict[str, Any]:
    began = history.began
    step, workers = history.compared
    training = next((world.size for world in history.worlds[-1:] if world.until is None), 0)
    return {
        "job": history.job,
        "phase": history.phase,
        "reason": history.reason,
        "over": history.over,
        "began": began,
        "length": _short(history.until - began),
        "facts": {
            "elapsed": duration(history.until - began),
            "step": f"{history.step:,}",
            "loss": f"{history.loss:.4g}" if history.loss is not None else "",
            "samples/s": f"{history.rate:,.0f}" if history.rate is not None else "",
            "workers": _sizes(history) if history.over else f"{training} of {history.wanted or '?'}",
            "worlds": f"{history.counts.get('world_formed', 0):,}",
            "pauses": f"{history.counts.get('pauses', 0):,}",
            "collective": history.collective,
            "same state": f"on all {workers} workers after step {step:,}" if workers else "",
            "training": percent(history.spent.productive),
            "training, by worker": percent(history.spent.utilized),
            **{f"evaluated {name}": f"{value:.4g}" for name, value in history.metrics.items() if value is not None},
        },
        "sentence": sentence(history),
        "spent": _spent(history),
        "lanes": [_lane(lane, began) for lane in history.lanes],
        "worlds": list(_worlds(history.worlds, began)),
        "pauses": [_pause(pause, began) for pause in history.pauses],
        "marks": [[_short(m.time - began), m.event, m.text, m.step, m.value] for m in history.marks],
        "warnings": [[_short(m.time - began), m.text] for m in history.warnings],
        "points": _columns(history.points, began),
        "causes": history.causes,
        "advice": {"text": ". ".join(filter(None, (history.advice, history.decision))), "curve": history.speedup},
        "remarks": history.remarks,
    }


def _sizes(history: History) -> str:
    """How many there were in its worlds."""
    sizes = {world.size for world in history.worlds}
    if not sizes:
        return history.wanted
    least, most = min(sizes), max(sizes)
    return f"{least}" if least == most else f"{least} to {most}"


def _spent(history: History) -> list[dict[str, Any]]:
    wall, workers = history.spent.wall, history.spent.workers
    whole, all_workers = sum(wall.values()) or 1.0, sum(workers.values()) or 1.0
    return [
        {
            "id": str(doing), "name": NAMES[doing][0], "means": NAMES[doing][1], "share": wall[doing] / whole,
            "percent": percent(wall[doing] / whole), "seconds": duration(wall[doing]),
            "workers": percent(workers[doing] / all_workers), "worker_seconds": duration(workers[doing]),
        }
        for doing in TimeUse
        if wall[doing] or workers[doing]
    ]  # fmt: skip


def _lane(lane: Lane, began: float) -> list[Any]:
    spans = [
        [
            str(each.phase),
            _short(each.since - began),
            None if each.until is None else _short(each.until - began),
            each.reason,
        ]
        for each in lane.spans
    ]
    return [lane.worker, lane.host, lane.cause, lane.reason, lane.code, lane.trouble, spans]


def _worlds(worlds: Iterable[WorldSpan], began: float) -> Iterable[list[Any]]:
    """With who came and who went, as far as that is known."""
    before: frozenset[int] = frozenset()
    for world in worlds:
        now = frozenset(world.members)
        came, went = (_some(now - before), _some(before - now)) if world.members else ("", "")
        until = None if world.until is None else _short(world.until - began)
        yield [world.version, world.size, _short(world.since - began), until, world.step, world.reason, came, went]
        before = now


def _some(workers: frozenset[int]) -> str:
    listed = ", ".join(map(str, sorted(workers)[:MOST_IDS]))
    return f"{listed} and {len(workers) - MOST_IDS:,} more" if len(workers) > MOST_IDS else listed


def _pause(pause: PauseRecord, began: float) -> list[Any]:
    parts = {name: _short(value, 4) for name, value in pause.parts.items()}
    about = [pause.world, pause.kind, _short(pause.time - began), _short(pause.total, 4), pause.workers]
    return [*about, pause.steps_torn, parts]


def _columns(points: Iterable[Point], began: float) -> dict[str, list[Any]]:
    points = list(points)
    return {
        "time": [_short(each.time - began) for each in points],
        "step": [each.step for each in points],
        "loss": [each.loss for each in points],
        "rate": [each.learning_rate for each in points],
        "speed": [_short(each.rate) for each in points],
        "workers": [each.workers for each in points],
    }


def _short(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)
