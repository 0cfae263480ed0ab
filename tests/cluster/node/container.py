"""One container of a pod: its process, its logs, what is shown of it, and when it is to be started next."""

from __future__ import annotations

import math
from pathlib import Path

from tests.cluster.node.api import Json
from tests.cluster.node.environment import Invocation
from tests.cluster.node.status import restarts, timestamp
from tests.cluster.processes import Leashed

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 1.0, 30.0
_STEADY_S = 60.0
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
        self.last_state: Json = {}
        self.restarts = 0
        # When to start it, on the monotonic clock.
        self.due = 0.0
        self._logs = logs
        self._failures = 0
        self._started = 0.0

    def log(self) -> Path:
        """The output of this run."""
        return self._logs / f"{self.name}.{self.restarts}.log"

    def run(self, what: Invocation, now: float) -> Leashed:
        """Start the process."""
        if self.last_state:
            self.restarts += 1
        self.process = Leashed.start(what.command, self.log(), what.env, what.folder)
        self.state = {"running": {"startedAt": timestamp()}}
        self.due, self._started = NEVER, now
        return self.process

    def wait(self, reason: str, message: str, due: float) -> None:
        """It cannot start yet; try again when it is due."""
        self.state = {"waiting": {"reason": reason, "message": message}}
        self.due = due

    def ended(self, exit_code: int, policy: str, now: float, *, reason: str = "", message: str = "") -> None:
        """A run is over; when the restart ``policy`` has another follow, it is due after a growing while."""
        running = self.state.get("running") or {}
        reason = reason or ("Error" if exit_code else "Completed")
        log = self.log()
        if not message and exit_code and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            message = log.read_bytes()[-_MESSAGE_TAIL:].decode(errors="replace") if log.exists() else ""
        over = {"exitCode": exit_code, "reason": reason, "message": message or None, "finishedAt": timestamp()}
        over["startedAt"] = running.get("startedAt") or over["finishedAt"]
        self.process = None
        if not restarts(policy, exit_code):
            self.state, self.due = {"terminated": over}, NEVER
            return
        self._failures = 0 if self._started and now - self._started > _STEADY_S else self._failures + 1
        delay = min(_FIRST_BACKOFF_S * 2 ** max(0, self._failures - 1), _LONGEST_BACKOFF_S)
        self.last_state = {"terminated": over}
        self.wait("CrashLoopBackOff", f"back-off {delay:g}s restarting failed container", now + delay)

    def signal(self, number: int) -> None:
        if self.process:
            self.process.signal(number)

    def kill(self) -> None:
        """Kill all of its processes; that it has ended is told like any other end."""
        if self.process:
            self.process.kill()
