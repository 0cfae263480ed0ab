"""What tests of a master's shell share: a launcher with no place for anybody, and an observer."""

from __future__ import annotations

from elasticdl.master.core import events as e
from elasticdl.master.shell.observers import Observer


class NoPlace:
    """It writes down what is asked of it; ``finding``, ``launching`` and ``closing`` are called then."""

    def __init__(self, report=None, finding=lambda: None):
        self.report, self.finding, self.launching, self.closing = report, finding, lambda: None, lambda: None
        self.calls, self.launched = [], []

    async def find(self, remembered):
        self.finding()
        return ()

    async def launch(self, worker_id, away_from=()):
        self.calls.append("launch")
        self.launched.append(worker_id)
        self.launching()

    def terminate(self, worker_id): ...

    def kill(self, worker_id):
        if self.report:
            self.report(e.WorkerExited(worker_id, e.ExitCause.KILLED, -9))

    async def close(self, *, keep=False):
        self.calls.append("keep" if keep else "close")
        if not keep:
            self.closing()


class Ears(Observer):
    """What they heard; ``broken``: they raise when a stop is asked for."""

    def __init__(self, *, broken=False):
        self.heard, self.closed, self.broken = [], False, broken

    def recorded(self, event, fields):
        if self.broken and event == "stop_requested":
            raise ZeroDivisionError("a mistake")
        self.heard.append(event)

    def close(self):
        self.closed = True
