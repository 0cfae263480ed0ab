"""Draw the tables of the two cores as Mermaid diagrams: `python scripts/draw_states.py`.

They are in `elasticdl.master.core.lifecycle` and `elasticdl.elastic.core.lifecycle`.

`docs/architecture.md` has the output; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable

from elasticdl.elastic.core import lifecycle as worker_side
from elasticdl.master.core.lifecycle import JOB, LIVE, WORKERS, Trigger, WorkerState


def draw_workers() -> str:
    """States that stay are left out. What is so of every live worker is drawn from the box around them."""
    edges: dict[tuple[str, str], list[str]] = {}
    for trigger in Trigger:
        following = {state: WORKERS[state, trigger][0] for state in WorkerState if (state, trigger) in WORKERS}
        live = {following[state] for state in LIVE if state in following}
        whole = len(live) == 1 and all(state in following for state in LIVE) and not live <= set(LIVE)
        for state, then in following.items():
            start = "live" if whole and state in LIVE else str(state)
            labels = edges.setdefault((start, str(then)), [])
            if state is not then and trigger.value not in labels:
                labels.append(trigger.value)
    inside = {str(state) for state in LIVE}
    lines = ["stateDiagram-v2", "    [*] --> starting", "    state live {"]
    lines += [f"        {line}" for line in _lines(edges, lambda start, then: start in inside and then in inside)]
    lines += ["    }"]
    lines += [f"    {line}" for line in _lines(edges, lambda start, then: not (start in inside and then in inside))]
    return "\n".join([*lines, "    gone --> [*]"])


def draw_job() -> str:
    lines = [f"    {phase} --> {then}: {condition.value.split(': ')[-1]}" for (phase, condition), then in JOB.items()]
    return "\n".join(["stateDiagram-v2", "    [*] --> pending", *lines])


def draw_worker_core() -> str:
    """States that stay are left out. What is so of all states in a box is drawn from the box."""
    boxes = {"in_world": worker_side.IN_WORLD, "steps": worker_side.STEPS}
    edges: dict[tuple[str, str], list[str]] = {}
    for trigger in worker_side.Trigger:
        moves = {state.name.lower(): then for (state, on), then in worker_side.TABLE.items() if on is trigger}
        for box, states in boxes.items():
            names = [state.name.lower() for state in states]
            ends = {moves[name][0] if name in moves else None for name in names}
            if len(ends) == 1 and None not in ends:
                moves[box] = moves[names[0]]
                moves = {start: move for start, move in moves.items() if start not in names}
        for start, move in moves.items():
            if start != move[0].name.lower():
                edges.setdefault((start, move[0].name.lower()), []).append(trigger.value)
    steps = {state.name.lower() for state in worker_side.STEPS}
    world = {"steps", *(state.name.lower() for state in worker_side.IN_WORLD)}
    lines = ["stateDiagram-v2", "    [*] --> preparing", "    state in_world {", "        state steps {"]
    lines += [f"            {line}" for line in _lines(edges, lambda start, then: {start, then} <= steps)]
    lines += ["        }"]
    lines += [f"        {line}" for line in _lines(edges, lambda a, b: {a, b} <= world and not {a, b} <= steps)]
    lines += ["    }"]
    lines += [f"    {line}" for line in _lines(edges, lambda start, then: not {start, then} <= world)]
    return "\n".join([*lines, "    gone --> [*]"])


def _lines(edges: dict[tuple[str, str], list[str]], wanted: Callable[[str, str], bool]) -> list[str]:
    return [f"{a} --> {b}: {', '.join(labels)}" for (a, b), labels in edges.items() if labels and wanted(a, b)]


if __name__ == "__main__":
    print(draw_workers(), draw_job(), draw_worker_core(), sep="\n\n")
