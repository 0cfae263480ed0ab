"""Starting a job on this machine and following it to its end.

Status and news go to the screen, as what workers print does, and signals become requests to stop. The news come from the journal's
file, where they still are when the master is gone.
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass

from rich.console import Console

from elasticdl.cli.course import Follower, follow
from elasticdl.cli.follow import Heard
from elasticdl.cli.local.folder_job import FolderJob, Life
from elasticdl.cli.local.local_prints import apart, local_prints
from elasticdl.cli.local.master_process import CLOSING_TIME, MasterProcess, started
from elasticdl.cli.local.new_job import check_as_worker, checked_here, new_job
from elasticdl.cli.master_client import MasterClient, connect
from elasticdl.cli.screens import Screen, own_outlets, tell
from elasticdl.cli.signals import SignalLog, caught, interrupt
from elasticdl.cli.wording import insists
from elasticdl.common.errors import JobFailedError
from elasticdl.job.jobdir import elsewhere
from elasticdl.job.spec import JobSpec

KILL_SECONDS = 3.0  # that a master gets to stop at once


def run_job(spec: JobSpec) -> int:
    """Check, start, follow; returns the exit code, and nothing of the job is left running, whatever happens.

    The master starts while the job is checked, and waits for that.

    Raises:
        UserError: the check found something, or the master refused to start; nothing was started.
        JobFailedError: the job failed; the check broke, the master did not start, or ended without saying how the job did.
        Interrupted: a signal came before or while it ran.
    """
    with caught(interrupt):
        spec = checked_here(spec)
    signals, outlets = SignalLog(), own_outlets()
    with caught(signals.add):
        with new_job(spec) as (job, spec), contextlib.ExitStack() as starting:
            checked = not spec.command  # what the user's own program needs, only it knows
            stdout_apart = apart(spec, *outlets)
            master = starting.enter_context(
                started(job, spec.stop_grace, signals.take, held=checked, stdout_apart=stdout_apart)
            )
            if checked:
                with _spinner("checking the model and the data"):
                    check_as_worker(spec, impatient=lambda: signals.first is not None)
                signals.raise_first()
                master.release()
            address = master.wait_until_up()
            if signals.first is not None:
                starting.close()
                if not (job.master.exists() or job.status.exists()):  # the job had not begun
                    signals.raise_first()
                address = None
            undo = starting.pop_all()
        with undo:
            if signals.first is None:
                status = elsewhere(f"elasticdl status {job.name}")
                tell(f"job {job.name} started; in another terminal: {status}{insists(spec, job.name)}")
            client = None if address is None else undo.enter_context(connect(address.endpoint))
            follower = Follower(
                prints=lambda screen: local_prints(job, spec, screen, *outlets),
                watch=lambda screen, _: _Interrupts(master, client, screen, signals, spec.stop_grace).hear,
                farewell=None,
                at_end=lambda: master.wait(CLOSING_TIME),
                lost=lambda: _lost(master, signals),
            )
            return follow(_OwnJob(job, master), spec, follower, signals)


@dataclass(frozen=True, slots=True)
class _OwnJob(FolderJob):
    """Of the job whose master is this command's child: that it has ended is known at once."""

    process: MasterProcess

    def life(self) -> Life:
        if self.folder.status.exists():
            return Life.ENDED
        return Life.LOST if self.process.has_ended() else Life.RUNNING


def _lost(master: MasterProcess, signals: SignalLog) -> None:
    if signals.first is None:
        raise JobFailedError(master.explain_end())
    job = master.job
    tell(f"job {job.name} was stopped before it could say how far it got; its logs: {job.logs}")
    signals.raise_first()


def _spinner(text: str) -> contextlib.AbstractContextManager[object]:
    return Console(stderr=True).status(text) if sys.stderr.isatty() else contextlib.nullcontext()


@dataclass(slots=True)
class _Interrupts:
    """The first signal asks for a clean stop, the second for one at once, the third kills."""

    master: MasterProcess
    client: MasterClient | None  # None of a master that has ended sooner than it could be reached
    screen: Screen
    signals: SignalLog
    stop_grace: float
    signalled: int = 0
    deadline: float = float("inf")

    def hear(self, heard: Heard | None) -> None:
        """Once the user's patience is over the master is killed."""
        if self.client and self.signals.take():
            self._interrupt(self.client)
        if time.monotonic() >= self.deadline:
            self.master.group.end()

    def _interrupt(self, client: MasterClient) -> None:
        now, self.signalled = time.monotonic(), self.signalled + 1
        if self.signalled == 1:
            client.stop_soon("interrupted")
            self.deadline = now + self.stop_grace + CLOSING_TIME
            self.screen.line("stopping after this step; press Ctrl-C again to stop at once")
        elif self.signalled == 2:
            client.stop_soon("interrupted twice", now=True)
            self.deadline = now + KILL_SECONDS
            self.screen.line("stopping at once; press Ctrl-C again to kill the master")
        else:
            self.deadline = now
            self.screen.line("killing the master and all workers")
