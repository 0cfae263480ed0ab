"""The page itself: as one file that needs nothing else, or in the pieces that a server hands out."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from elasticdl.job.facts import Facts, Lane, PauseRecord, Point, TimeUse, WorldSpan
from elasticdl.job.journal import plain

# Where the time went, in words.


# What a share is called, and what it means.
NAMES = {
    TimeUse.PRODUCTIVE: ("training", "steps that the job had not made before"),
    TimeUse.SLOW: ("the slowest worker", "all members waited in their steps for the slowest one"),
    TimeUse.AGAIN: ("steps made again", "steps whose result had been lost with all that held it"),
    TimeUse.EVALUATION: ("evaluation", "the model was evaluated"),
    TimeUse.CHECKPOINT: ("checkpoints", "the state was copied, or training stood still until it was written"),
    TimeUse.GROW: ("workers joining", "pauses in which workers were let in"),
    TimeUse.SHRINK: ("workers leaving", "pauses in which workers left in good order"),
    TimeUse.FAILURE: ("failures", "pauses after workers were lost, from the last step before to the first one after"),
    TimeUse.WAITING: ("waiting", "too few workers to train; of a worker: ready, and in no world"),
    TimeUse.STARTING: ("starting", "up to the first step; of a worker: until it is ready"),
    TimeUse.ENDING: (
        "ending",
        "from the last step, or the decision to end; of a worker: since then, or since it was told to leave",
    ),
}
_LEAST_SHARE = 0.01
_MOST_NAMED = 3


def duration(seconds: float) -> str:
    """As a person would say it: ``0.35 s``, ``12 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    parts = [f"{value} {unit}" for value, unit in ((days, "d"), (hour, "h"), (minute, "min"), (second, "s")) if value]
    return " ".join(parts[:2]) or "0 s"


def percent(share: float) -> str:
    shown = f"{100 * share:.0f}"
    return f"{shown} %" if shown not in ("0", "100") or share in (0, 1) else "< 1 %" if share < 0.5 else "> 99 %"


def sentence(history: Facts) -> str:
    """What the time of the job went to, the greatest losses first."""
    wall = history.spent.wall
    whole = sum(wall.values())
    if whole <= 0:
        return "Its journal tells nothing." if history.over else "Nothing has happened yet."
    lost = sorted((each for each in TimeUse if each is not TimeUse.PRODUCTIVE), key=wall.__getitem__, reverse=True)
    named = [each for each in lost if wall[each] >= _LEAST_SHARE * whole][:_MOST_NAMED]
    parts = [f"{percent(history.spent.productive)} of the {duration(whole)} was training"]
    for each in named:
        times = history.changes.get(str(each), 0)
        often = f" ({times} times)" if times > 1 else ""
        parts.append(f"{percent(wall[each] / whole)} went to {NAMES[each][0]}{often}")
    rest = whole - wall[TimeUse.PRODUCTIVE] - sum(wall[each] for each in named)
    if rest >= _LEAST_SHARE * whole / 2:
        parts.append(f"{percent(rest / whole)} to the rest")
    return "; ".join(parts) + "."


# What the page draws, as JSON: times in seconds since the job began, tables by columns.


WARNING = "warning"
MOST_IDS = 12  # of workers that are named where many came or went at once
# JSON may stand in a script of HTML if it has none of these; U+2028 and U+2029 are escaped as all that is not ASCII.
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def as_json(value: Any) -> str:
    """Harmless wherever it stands in a page."""
    return json.dumps(plain(value), separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def page_data(history: Facts) -> dict[str, Any]:
    began = history.began
    step, workers = history.compared
    training = sum(len(world.members) for world in history.worlds if world.until is None)  # in the last
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
            "worlds": f"{history.counts['world_formed']:,}",
            "pauses": f"{history.counts['pauses']:,}",
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
        "marks": [
            [_short(m.time - began), m.event, m.text, m.step, m.value] for m in history.marks if m.event != WARNING
        ],
        "warnings": [[_short(m.time - began), m.text] for m in history.marks if m.event == WARNING],
        "points": _columns(history.curve.points, began),
        "causes": history.causes,
        "advice": {
            "text": ". ".join(filter(None, (history.advice, history.decision))),
            "curve": [list(row.model_dump().values()) for row in history.speedup],
        },
        "remarks": list(history.remarks()),
    }


def _sizes(history: Facts) -> str:
    """How many there were in its worlds."""
    sizes = {len(world.members) for world in history.worlds}
    if not sizes:
        return history.wanted
    least, most = min(sizes), max(sizes)
    return f"{least}" if least == most else f"{least} to {most}"


def _spent(history: Facts) -> list[dict[str, Any]]:
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
    return [lane.worker, lane.host, lane.cause, lane.reason, lane.code, spans]


def _worlds(worlds: Iterable[WorldSpan], began: float) -> Iterable[list[Any]]:
    """With who came and who went."""
    before: frozenset[int] = frozenset()
    for world in worlds:
        now = frozenset(world.members)
        came, went = _some(now - before), _some(before - now)
        until = None if world.until is None else _short(world.until - began)
        yield [world.version, len(now), _short(world.since - began), until, world.step, world.reason, came, went]
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


MARK = "<!-- elasticdl report -->"  # in the first lines of each report: so it is told from other files
# Of a page that is served. Plotly sets styles of elements, which takes 'unsafe-inline'.
LIVE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PLOTLY = "plotly/plotly-basic.min.js.gz"  # the folder has its licence, too


def asset(name: str) -> str:
    """A file of this package."""
    return (files("elasticdl.report") / name).read_text(encoding="utf-8")


def plotly_script() -> str:
    """The library that draws: of Plotly the part that has bars and lines, which is a quarter of the whole."""
    return gzip.decompress((files("elasticdl.report") / _PLOTLY).read_bytes()).decode()


def report(data: dict[str, Any]) -> str:
    """One HTML file. Its policy lets nothing be loaded, and no script run but those that are in it now."""
    scripts = [plotly_script(), asset("charts.js"), asset("page.js")]
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {hashes}"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{asset("page.css")}</style>'
    body = f'<script type="application/json" id="data">{as_json(data)}</script>\n'
    return _fill(data["job"], "job", head, body + "\n".join(f"<script>{script}</script>" for script in scripts))


def live_page(title: str, view: str, root: str) -> str:
    """A page that asks for its numbers. ``view``: job or overview; ``root``: the relative path to the assets."""
    head = f'<link rel="stylesheet" href="{root}page.css">'
    names = ("plotly.js", "charts.js", "page.js") if view == "job" else ("page.js",)
    return _fill(title, view, head, "\n".join(f'<script src="{root}{name}" defer></script>' for name in names))


def _fill(title: str, view: str, head: str, scripts: str) -> str:
    text = asset("template.html").replace("{{mark}}", MARK).replace("{{view}}", view)
    text = text.replace("{{main}}", asset(f"{view}.html")).replace("{{head}}", head)
    # Last, as what was put in is not looked at again. Half a pair of surrogates, which JSON may have, fits in no file.
    before, _, after = text.partition("{{scripts}}")
    called = html.escape(title or "job").encode(errors="replace").decode()
    return before.replace("{{title}}", called) + scripts + after


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
