"""One container of a pod: its process, its log, what is shown of it, and when it is to be started."""

from __future__ import annotations

import math
from pathlib import Path

from tests.cluster.node.api import Json
from tests.cluster.node.environment import Invocation
from tests.cluster.node.status import timestamp
from tests.cluster.processes import Leashed

_MESSAGE_TAIL = 2048
NEVER = math.inf


class Container:
    """Owned by the thread of its pod."""

    def __init__(self, spec: Json, folder: Path, logs: Path) -> None:
        self.spec = spec
        self.name: str = spec["name"]
        self.image: str = spec["image"]
        self.folder = folder
        self.process: Leashed | None = None
        # What the API shows of it.
        self.state: Json = {"waiting": {"reason": "ContainerCreating"}}
        # When to start it, on the monotonic clock.
        self.due = 0.0
        self.log = logs / f"{self.name}.log"

    def run(self, what: Invocation) -> Leashed:
        """Start the process."""
        self.process = Leashed.start(what.command, self.log, what.env, what.folder)
        self.state = {"running": {"startedAt": timestamp()}}
        self.due = NEVER
        return self.process

    def wait(self, reason: str, message: str, due: float) -> None:
        """It cannot start yet; try again when it is due."""
        self.state = {"waiting": {"reason": reason, "message": message}}
        self.due = due

    def ended(self, exit_code: int, *, reason: str = "", message: str = "") -> None:
        running = self.state.get("running") or {}
        reason = reason or ("Error" if exit_code else "Completed")
        if not message and exit_code and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            message = self.log.read_bytes()[-_MESSAGE_TAIL:].decode(errors="replace") if self.log.exists() else ""
        over = {"exitCode": exit_code, "reason": reason, "message": message or None, "finishedAt": timestamp()}
        over["startedAt"] = running.get("startedAt") or over["finishedAt"]
        self.process = None
        self.state, self.due = {"terminated": over}, NEVER

    def signal(self, number: int) -> None:
        if self.process:
            self.process.signal(number)

    def kill(self) -> None:
        """Kill all of its processes; that it has ended is told like any other end."""
        if self.process:
            self.process.kill()
