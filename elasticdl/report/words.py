"""Where the time went, in words."""

from __future__ import annotations

from elasticdl.job.history import History, TimeUse

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


def sentence(history: History) -> str:
    """What the time of the job went to, the greatest losses first."""
    wall = history.spent.wall
    whole = sum(wall.values())
    if whole <= 0:
        return "Its journal tells nothing." if history.over else "Nothing has happened yet."
    lost = sorted((each for each in TimeUse if each is not TimeUse.PRODUCTIVE), key=wall.__getitem__, reverse=True)
    named = [each for each in lost if wall[each] >= _LEAST_SHARE * whole][:_MOST_NAMED]
    parts = [f"{percent(history.spent.productive)} of the {duration(whole)} was training"]
    parts += [f"{percent(wall[each] / whole)} went to {_what(each, history)}" for each in named]
    rest = whole - wall[TimeUse.PRODUCTIVE] - sum(wall[each] for each in named)
    if rest >= _LEAST_SHARE * whole / 2:
        parts.append(f"{percent(rest / whole)} to the rest")
    return "; ".join(parts) + "."


def _what(doing: TimeUse, history: History) -> str:
    times = history.changes.get(str(doing), 0)
    match doing:
        case TimeUse.FAILURE:
            return f"{times} {'failure' if times == 1 else 'failures'}" if times else "failures"
        case TimeUse.GROW:
            return "letting workers in" + (f" ({times} times)" if times > 1 else "")
        case TimeUse.SHRINK:
            return "letting workers go" + (f" ({times} times)" if times > 1 else "")
        case TimeUse.SLOW:
            return "waiting for the slowest worker"
        case TimeUse.WAITING:
            return "waiting for workers"
        case _:
            return NAMES[doing][0]
