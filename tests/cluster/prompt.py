"""What can be typed where `python -m tests.cluster` runs: mishaps of a cluster, on request."""

from __future__ import annotations

import os
import select
import sys
import time

from tests.cluster.cluster import Cluster

HELP = (
    "lose NODE (its power), freeze NODE (its network), thaw NODE, add NODE [GPUS], api SECONDS (the API server is away)"
)


class TypedLines:
    """Of the standard input, as long as there may be any."""

    def __init__(self) -> None:
        self._open = True

    def next(self, seconds: float) -> str:
        """What is typed within so many seconds, or nothing."""
        if not self._open or _in_background():  # where who reads the terminal is stopped
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        line = sys.stdin.readline() if ready else ""
        self._open = bool(line) or not ready
        return line.strip()


def obey(cluster: Cluster, line: str, gpus: int) -> str:
    """What has become of a line; ``gpus``: of a node for which no number is given."""
    match line.split():
        case ["lose" | "freeze" | "thaw" as what, name] if name in cluster.node_names:
            {"lose": cluster.lose_node, "freeze": cluster.freeze_node, "thaw": cluster.thaw_node}[what](name)
            return f"{what}: node {name}"
        case ["add", name, *rest] if name not in cluster.node_names and all(each.isdecimal() for each in rest[:1]):
            cluster.add_node(name, int(rest[0]) if rest else gpus)
            return f"node {name} is ready"
        case ["api", seconds] if seconds.isdecimal():
            cluster.restart_api_server(float(seconds))
            return "the API server is back"
    return f"{HELP}; nodes: {', '.join(cluster.node_names)}"


def _in_background() -> bool:
    return sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp()
