"""Draw the tables of the two cores as Mermaid diagrams: `python scripts/draw_states.py`.

They are in `elasticdl.master.core.transitions` and `elasticdl.elastic.core.worker`.
`docs/architecture.md` and `docs/worker_side.md` have the output; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable

from elasticdl.elastic.core import worker as worker_side
from elasticdl.master.core.transitions import WORKERS, Trigger
from elasticdl.master.core.values import LIVE, WorkerState


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


def draw_worker_core() -> str:
    """States that stay are left out. What is so of all states in a world is drawn from the box around them."""
    inside = {state.name.lower() for state in worker_side.IN_WORLD}
    edges: dict[tuple[str, str], list[str]] = {}
    for trigger in worker_side.Trigger:
        table = worker_side.TABLE.items()
        moves = {state.name.lower(): then.name.lower() for (state, on), (then, _) in table if on is trigger}
        ends = {moves.get(name) for name in inside}
        if len(ends) == 1 and None not in ends:
            moves = {"in_world": moves[min(inside)], **{a: b for a, b in moves.items() if a not in inside}}
        for start, then in moves.items():
            if start != then:
                edges.setdefault((start, then), []).append(trigger.value)
    lines = ["stateDiagram-v2", "    [*] --> preparing", "    state in_world {"]
    lines += [f"        {line}" for line in _lines(edges, lambda start, then: {start, then} <= inside)]
    lines += ["    }"]
    lines += [f"    {line}" for line in _lines(edges, lambda start, then: not {start, then} <= inside)]
    return "\n".join([*lines, "    gone --> [*]"])


def _lines(edges: dict[tuple[str, str], list[str]], wanted: Callable[[str, str], bool]) -> list[str]:
    return [f"{a} --> {b}: {', '.join(labels)}" for (a, b), labels in edges.items() if labels and wanted(a, b)]


if __name__ == "__main__":
    print(draw_workers(), draw_worker_core(), sep="\n\n")
