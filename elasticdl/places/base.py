"""The port to whatever runs worker processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from elasticdl.job.spec import WorkerRange
from elasticdl.master.state.events import (
    FoundWorker,
    LauncherFailed,
    StacksFound,
    WorkerExited,
    WorkerPending,
    WorkerPlaced,
)

Report = Callable[[WorkerPending | WorkerPlaced | WorkerExited | StacksFound | LauncherFailed], None]
# The range of workers that the job has now: `elasticdl scale` changes it.
Limits = Callable[[], WorkerRange]


STACKS_SECONDS = 3.0


class Launcher(Protocol):
    """Runs workers and reports what becomes of them, on the event loop that called it.

    For each worker launched: `WorkerPending` while it can't run (again when the reason changes), `WorkerPlaced`
    once it runs, and in the end exactly one `WorkerExited`, after its process is gone and its place is free again.
    Every failure is reported that way, none is raised. No method waits for a worker except `close` and `detach`.
    """

    async def find(self) -> Sequence[FoundWorker]:
        """The workers that an earlier master of this job has left, whatever became of them; called once, first of all.

        From then on they count as launched: what became of them is reported after the call.
        """

    async def launch(self, worker_id: int, away_from: Sequence[str] = ()) -> None:
        """Start this worker, or keep it until there is a place; on other nodes than ``away_from``, if there are any.

        Raises:
            ValueError: this id was launched before.
        """

    def terminate(self, worker_id: int) -> None:
        """Ask the process to end (SIGTERM). Nothing happens for a worker that is gone or unknown."""

    def kill(self, worker_id: int) -> None:
        """End the process and its children at once. Nothing happens for a worker that is gone or unknown."""

    def read_stacks(self, worker_id: int) -> None:
        """Find out where this worker stands, and report it as `StacksFound` within `STACKS_SECONDS`; nothing comes for a
        worker that does not run, or is gone meanwhile."""

    def read_log(self, worker_id: int) -> None:
        """As `read_stacks`, with no more than the end of what this worker has printed."""

    async def close(self) -> None:
        """Kill what is left, wait until it is gone and give every place back. Nothing can be launched afterwards."""

    async def detach(self) -> None:
        """This master ends and has not decided that the job does: let workers be that another master could take over.

        Where there will be no other, it is `close`. Nothing is left to do after `close`.
        """
