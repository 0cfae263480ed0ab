"""A job on this machine, from its start to its end: the command is its master.

The master has the main thread, as its workers end with that one (`elasticdl.common.tether`). In another one the job is followed as any
job is: its course goes to the screen, as what its workers print does, and signals, which the main thread notes, become requests to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from elasticdl.cli.course import Follower, follow
from elasticdl.cli.follow import Heard
from elasticdl.cli.local.folder_job import FolderJob, Life
from elasticdl.cli.local.local_prints import apart, local_prints
from elasticdl.cli.local.new_job import checked_as_worker, checked_here, new_job
from elasticdl.cli.screens import Screen, own_outlets, tell
from elasticdl.cli.signals import SignalLog, caught, interrupt
from elasticdl.cli.wording import insists
from elasticdl.common.errors import ElasticDLError, JobFailedError
from elasticdl.job.jobdir import JobDir, MasterAddress, elsewhere
from elasticdl.job.spec import JobSpec
from elasticdl.master.state.events import StopRequested

if TYPE_CHECKING:  # imported while a job is checked
    from elasticdl.master.shell.serve import LauncherFactory, Master

CLOSING_TIME = 5.0  # seconds that a master gets beyond the workers' grace
KILL_SECONDS = 3.0  # that a master gets to stop at once
POLL, UP_POLL = 0.1, 0.01

_log = logging.getLogger(__name__)


def run_job(spec: JobSpec) -> int:
    """Check, start, follow; returns the exit code, and nothing of the job is left running, whatever happens.

    The workers' framework is imported while the job is checked.

    Raises:
        UserError: the check found something, or the port is taken; nothing was started.
        JobFailedError: the job failed; the check broke, or the master ended without saying how the job did.
        Interrupted: a signal came before or while it ran.
    """
    with caught(interrupt):
        spec = checked_here(spec)
    signals = SignalLog()
    with caught(signals.add):
        return asyncio.run(_run(spec, signals))


async def _run(spec: JobSpec, signals: SignalLog) -> int:
    outlets = own_outlets()
    async with contextlib.AsyncExitStack() as undo:
        with new_job(spec) as (job, spec):
            with _checking(spec, signals):
                from elasticdl.master.shell.local_master import LocalWorkers, local_master, logging_to

                undo.enter_context(logging_to(job.master_log, spec))

                def make_launcher(address: MasterAddress) -> LauncherFactory:
                    workers = LocalWorkers(spec, job, address, stdout_apart=apart(spec, *outlets))
                    undo.push_async_callback(workers.close)
                    return workers.launcher

                master = local_master(spec, job, make_launcher)
            signals.raise_first()
            serving = await undo.enter_async_context(_serving(master, job, spec, signals))
            await serving.is_up(signals)
        if signals.first is None:
            status = elsewhere(f"elasticdl status {job.name}")
            tell(f"job {job.name} started; in another terminal: {status}{insists(spec, job.name)}")
        follower = Follower(
            prints=lambda screen: local_prints(job, spec, screen, *outlets),
            watch=lambda screen, _: _Interrupts(serving, screen, signals, spec.stop_grace).hear,
            farewell=None,
            at_end=lambda: serving.ended.wait(CLOSING_TIME),
            lost=lambda: _lost(serving, job, signals),
        )
        return await asyncio.to_thread(follow, _OwnJob(job, serving), spec, follower, signals)


@contextlib.contextmanager
def _checking(spec: JobSpec, signals: SignalLog) -> Iterator[None]:
    """Of the user's own program only that knows what it needs."""
    if spec.command:
        yield
        return
    with _spinner("checking the model and the data"), checked_as_worker(spec, lambda: signals.first is not None):
        yield


def _spinner(text: str) -> contextlib.AbstractContextManager[object]:
    return Console(stderr=True).status(text) if sys.stderr.isatty() else contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class _Serving:
    """A master that runs. To be asked from any thread, but for `is_up`."""

    master: Master
    loop: asyncio.AbstractEventLoop
    running: asyncio.Task[object]
    ended: threading.Event

    async def is_up(self, signals: SignalLog) -> None:
        """Wait until it can be called.

        Raises:
            UserError: a folder of the job can't be written.
            JobFailedError: it ended.
            Interrupted: a signal came before; the master has ended.
        """
        while not self.master.is_up.is_set() and not self.running.done():
            if signals.first is not None:
                self.running.cancel()
            await asyncio.wait({self.running}, timeout=UP_POLL)
        if self.running.cancelled():
            signals.raise_first()
        if not self.master.is_up.is_set():
            self.running.result()

    def stop(self, reason: str, *, now: bool = False) -> None:
        self.loop.call_soon_threadsafe(self.master.post, StopRequested(reason, checkpoint=not now, now=now))

    def kill(self) -> None:
        """The workers are killed at once, and nobody says how the job has ended."""
        self.loop.call_soon_threadsafe(self.running.cancel)


@contextlib.asynccontextmanager
async def _serving(master: Master, job: JobDir, spec: JobSpec, signals: SignalLog) -> AsyncIterator[_Serving]:
    """Leaving the context ends the master and all that it has started."""
    ended = threading.Event()

    async def run() -> None:
        try:
            await master.run()
        except ElasticDLError:
            raise
        except Exception as error:
            _log.exception("the master ends before the job")
            raise JobFailedError(
                f"the master ended before the job had: {error!r}; its log: {job.master_log}"
            ) from error
        finally:
            ended.set()

    running = asyncio.create_task(run())
    serving = _Serving(master, asyncio.get_running_loop(), running, ended)
    try:
        yield serving
    finally:
        if not running.done():
            serving.stop("nobody follows the job any more")
            deadline = time.monotonic() + spec.stop_grace + CLOSING_TIME
            while not running.done() and time.monotonic() < deadline and not signals.take():
                await asyncio.wait({running}, timeout=POLL)
            running.cancel()
            await asyncio.wait({running})


@dataclass(frozen=True, slots=True)
class _OwnJob(FolderJob):
    """Of the job whose master is this process: that it has ended is known at once."""

    serving: _Serving

    def life(self) -> Life:
        has_ended = self.serving.ended.is_set()  # asked first: a master that has ended may have written how the job did
        if self.folder.status.exists():
            return Life.ENDED
        return Life.LOST if has_ended else Life.RUNNING


def _lost(serving: _Serving, job: JobDir, signals: SignalLog) -> None:
    if signals.first is None:
        serving.running.result()
        raise JobFailedError(f"the job has ended, and how is not known; the master's log: {job.master_log}")
    tell(f"job {job.name} was stopped before it could say how far it got; its logs: {job.logs}")
    signals.raise_first()


@dataclass(slots=True)
class _Interrupts:
    """The first signal asks for a clean stop, the second for one at once, the third kills."""

    serving: _Serving
    screen: Screen
    signals: SignalLog
    stop_grace: float
    signalled: int = 0
    deadline: float = float("inf")

    def hear(self, heard: Heard | None) -> None:
        """Once the user's patience is over the workers are killed."""
        if self.signals.take():
            self._interrupt()
        if time.monotonic() >= self.deadline:
            self.serving.kill()

    def _interrupt(self) -> None:
        now, self.signalled = time.monotonic(), self.signalled + 1
        if self.signalled == 1:
            self.serving.stop("interrupted")
            self.deadline = now + self.stop_grace + CLOSING_TIME
            self.screen.line("stopping after this step; press Ctrl-C again to stop at once")
        elif self.signalled == 2:
            self.serving.stop("interrupted twice", now=True)
            self.deadline = now + KILL_SECONDS
            self.screen.line("stopping at once; press Ctrl-C again to kill all workers")
        else:
            self.deadline = now
            self.screen.line("killing all workers")
