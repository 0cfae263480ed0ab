"""Workers as processes of this machine: the `Starter` whose places are slots.

Each is the leader of a session of its own, so that a signal to the terminal does not reach it and its children can be
ended with it; each dies with the master. What it prints goes to its log, or what it prints on stdout to a file beside. Its temporary
files are in a folder of its own, which goes with it: a worker that is killed cannot clean up after itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticdl.master.state.events import ExitCause, StacksFound, WorkerExited, WorkerPlaced
from elasticdl.places.base import FoundInPlace, Place, StarterReport
from elasticdl.places.exits import judge_end
from elasticdl.places.hung_process import look_at
from elasticdl.places.launcher import Seconds
from elasticdl.places.memory_kills import MemoryKills
from elasticdl.places.worker_output import InFile
from elasticdl.places.worker_process import Spawner, WorkerRun, what_failed

HOST = "127.0.0.1"
# A place that is idle is kept for so long: until a worker that is replaced at once has been launched, and no longer, as other jobs
# may wait for its GPU. A process that can't be killed keeps its GPU.
TIMES = Seconds(idle=1.0, kill=None)
# A process that is killed goes at once, unless the kernel holds it.
CLOSE_SECONDS = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """How to start a worker, its environment, and the file that takes what it prints. ``out``: that takes what it prints on
    stdout, if that is another."""

    spawner: Spawner
    environment: Callable[[int, Place], dict[str, str]]
    log: Callable[[int], Path]
    out: Callable[[int], Path] | None = None


class LocalStarter:
    """See `elasticdl.places.base.Starter` for the contract."""

    def __init__(self, command: WorkerCommand, report: StarterReport) -> None:
        self._command = command
        self._report = report
        self._runs: dict[int, WorkerRun] = {}
        self._places: dict[str, int] = {}  # the worker that was started there last
        self._silent: set[int] = set()  # workers whose place is gone
        self._tasks: set[asyncio.Task[Any]] = set()
        self._memory_kills = MemoryKills()
        self._closed = False

    async def found(self, places: Sequence[Place], remembered: Mapping[int, str]) -> Sequence[FoundInPlace]:
        """None: workers of this machine die with their master."""
        return ()

    def start(self, worker_id: int, place: Place) -> None:
        self._places[place.id] = worker_id
        out = self._command.out(worker_id) if self._command.out else None
        run = self._runs[worker_id] = WorkerRun(worker_id, InFile(self._command.log(worker_id), out))
        if self._closed:
            run.end(0)
        self._track(self._run(run, place))

    def end(self, worker_id: int, grace: float | None) -> None:
        if run := self._runs.get(worker_id):
            run.end(grace)

    def lost(self, place_id: str) -> None:
        worker_id = self._places.pop(place_id, None)
        if worker_id in self._runs:
            self._silent.add(worker_id)
            self.end(worker_id, 0)

    def read_stacks(self, worker_id: int) -> None:
        if (run := self._runs.get(worker_id)) and not self._closed:
            self._track(self._tell_stacks(run))

    async def _tell_stacks(self, run: WorkerRun) -> None:
        if found := await run.look(self._stacks):
            self._tell(found)

    def _stacks(self, run: WorkerRun, pid: int) -> StacksFound:
        return look_at(run.worker_id, pid, run.dump, self._command.log(run.worker_id))

    async def detach(self) -> None:
        await self.close()

    async def close(self) -> None:
        self._closed = True
        for worker_id in list(self._runs):
            self.end(worker_id, 0)
        await self._command.spawner.close()
        while self._tasks:
            _, hanging = await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
            if hanging:
                _log.error("workers %s can't be killed: leaving them behind", sorted(self._runs))
                return

    def _track(self, work: Coroutine[Any, Any, None]) -> None:
        """`close` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tell(self, report: WorkerPlaced | WorkerExited | StacksFound) -> None:
        if report.worker_id not in self._silent:
            self._report(report)

    async def _run(self, run: WorkerRun, place: Place) -> None:
        """Start a worker, and report what becomes of it."""
        worker_id = run.worker_id
        environment = self._command.environment(worker_id, place)

        def placed(pid: int) -> None:
            self._tell(WorkerPlaced(worker_id, HOST, pid))

        try:
            code = await run.to_its_end(self._spawner, environment, placed)
            exited = self._judge(run, code)
        except OSError as error:
            exited = WorkerExited(worker_id, ExitCause.CRASHED, 1, f"can't start it: {what_failed(error)}")
        del self._runs[worker_id]
        self._tell(exited)
        self._silent.discard(worker_id)
        if run.left:
            await run.left

    async def _spawner(self) -> Spawner:
        return self._command.spawner

    def _judge(self, run: WorkerRun, code: int) -> WorkerExited:
        if not run.was_started:
            return WorkerExited(run.worker_id, ExitCause.KILLED, code, "it was not started yet")
        cause, detail, output = judge_end(code, run.output.all(), memory_was_short=self._memory_kills.happened())
        if cause is ExitCause.CRASHED:
            detail += f"; its log: {self._command.log(run.worker_id)}"
        return WorkerExited(run.worker_id, cause, code, detail, output)
