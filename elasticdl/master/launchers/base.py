"""The port to whatever runs worker processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from elasticdl.master.events import WorkerExited, WorkerPending, WorkerPlaced

Report = Callable[[WorkerPending | WorkerPlaced | WorkerExited], None]


class Launcher(Protocol):
    """Runs workers and reports what becomes of them, on the event loop that called it.

    For each worker launched: `WorkerPending` while there is no place (again when the reason changes), `WorkerPlaced`
    once it runs, and in the end exactly one `WorkerExited`, after its process is gone and its place is free again.
    Every failure is reported that way, none is raised. No method waits for a worker except `close`.
    """

    async def launch(self, worker_id: int) -> None:
        """Start this worker, or keep it until there is a place.

        Raises:
            ValueError: this id was launched before.
        """

    def terminate(self, worker_id: int) -> None:
        """Ask the process to end (SIGTERM). Nothing happens for a worker that is gone or unknown."""

    def kill(self, worker_id: int) -> None:
        """End the process and its children at once. Nothing happens for a worker that is gone or unknown."""

    async def close(self) -> None:
        """Kill what is left, wait until it is gone and give every place back. Nothing can be launched afterwards."""
