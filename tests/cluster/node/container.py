"""One container of a pod: its process, its logs, what is shown of it, and when it is to be started next."""

from __future__ import annotations

import math
from pathlib import Path

from tests.cluster.node.api import Json
from tests.cluster.node.environment import Invocation
from tests.cluster.node.reporter import timestamp
from tests.cluster.node.status import ContainerView, restarts
from tests.cluster.processes import Leashed

_LONGEST_BACKOFF_S = 30.0
_STEADY_S = 60.0
_MESSAGE_TAIL = 2048
NEVER = math.inf


class Container:
    """Owned by the thread of its pod."""

    def __init__(self, spec: Json, folder: Path, logs: Path, backoff: float) -> None:
        self.spec = spec
        self.folder = folder
        self.view = ContainerView(spec["name"], spec["image"])
        self.process: Leashed | None = None
        # When to start it, on the monotonic clock.
        self.due = 0.0
        # Why it is killed, where the exit status would not tell.
        self.kill_reason: str | None = None
        self._logs = logs
        self._backoff = backoff
        self._failures = 0
        self._started = 0.0

    def log(self, *, previous: bool = False) -> Path:
        """The output of this run, or of the one before."""
        return self._logs / f"{self.view.name}.{self.view.restarts - previous}.log"

    def run(self, what: Invocation, now: float) -> Leashed:
        """Start the process."""
        if self.view.last_state:
            self.view.restarts += 1
        self.process = Leashed.start(what.command, self.log(), what.env, what.folder)
        self.view.state = {"running": {"startedAt": timestamp()}}
        self.due, self._started, self.kill_reason = NEVER, now, None
        return self.process

    def wait(self, reason: str, message: str, due: float) -> None:
        """It cannot start yet; try again when it is due."""
        self.view.state = {"waiting": {"reason": reason, "message": message}}
        self.due = due

    def ended(self, exit_code: int, policy: str, now: float, *, reason: str = "", message: str = "") -> None:
        """A run is over; when the restart ``policy`` has another follow, it is due after a growing while."""
        running = self.view.state.get("running") or {}
        reason = self.kill_reason or reason or ("Error" if exit_code else "Completed")
        if not message and exit_code and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            message = self._tail()
        over = {"exitCode": exit_code, "reason": reason, "message": message or None, "finishedAt": timestamp()}
        over["startedAt"] = running.get("startedAt") or over["finishedAt"]
        self.process = None
        if not restarts(policy, exit_code):
            self.view.state, self.due = {"terminated": over}, NEVER
            return
        self._failures = 0 if self._started and now - self._started > _STEADY_S else self._failures + 1
        delay = min(self._backoff * 2 ** max(0, self._failures - 1), _LONGEST_BACKOFF_S)
        self.view.last_state = {"terminated": over}
        self.wait("CrashLoopBackOff", f"back-off {delay:g}s restarting failed container", now + delay)

    def signal(self, number: int) -> None:
        if self.process:
            self.process.signal(number)

    def kill(self, reason: str | None = None) -> None:
        """Kill all of its processes; that it has ended is told like any other end."""
        if self.process:
            self.kill_reason = reason
            self.process.kill()

    def _tail(self) -> str:
        try:
            return self.log().read_bytes()[-_MESSAGE_TAIL:].decode(errors="replace")
        except FileNotFoundError:
            return ""
