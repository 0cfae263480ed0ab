"""Starting a job on this machine and following it to its end.

Status and news go to the screen, as what workers print does, and signals become requests to stop. The news come from the journal's
file, where they still are when the master is gone.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console

from elasticdl.cli.course import show_course, show_end
from elasticdl.cli.follow import Heard
from elasticdl.cli.job_handle import JobHandle
from elasticdl.cli.local.folder_home import FolderHome
from elasticdl.cli.local.job_check import checking
from elasticdl.cli.local.local_prints import apart, local_prints
from elasticdl.cli.local.master_process import CLOSING_TIME, MasterProcess, started
from elasticdl.cli.local.new_job import checked_here, new_job
from elasticdl.cli.master_client import MasterClient, connect
from elasticdl.cli.outlets import own_outlets, tell
from elasticdl.cli.screens import Printing, Screen, open_screen
from elasticdl.cli.signals import Interrupted, SignalLog, caught, interrupt
from elasticdl.common.errors import JobFailedError
from elasticdl.job.jobdir import JobDir, elsewhere
from elasticdl.job.spec import JobSpec

KILL_SECONDS = 3.0  # that a master gets to stop at once


def run_job(spec: JobSpec) -> int:
    """Check, start, follow; returns the exit code, and nothing of the job is left running, whatever happens.

    Raises:
        UserError: something is wrong with the job; nothing was started.
        JobFailedError: the job failed.
        Interrupted: a signal came before or while it ran.
    """
    with caught(interrupt):
        spec = checked_here(spec)
    signals = SignalLog()
    with caught(signals.add), new_job(spec) as (job, spec):
        has_shown = _run_master(job, spec, signals)
        if not (job.master.exists() or job.status.exists()):  # its master had not begun
            signals.raise_first()
    status = FolderHome(job).kept_status()
    if status is None:
        tell(f"job {job.name} was stopped before it could say how far it got; its logs: {job.logs}")
    else:
        show_end(status, FolderHome(job).journal(), spec.output, has_shown)
    if signals.first is not None and (status is None or status.phase == "stopped"):
        raise Interrupted(signals.first)
    if status is not None and status.phase != "succeeded":
        raise JobFailedError(f"job {job.name} {status.phase}: {status.reason}; all logs: {job.logs}")
    return 0


def _run_master(job: JobDir, spec: JobSpec, signals: SignalLog) -> Callable[[str], bool]:
    """Start the master, follow the job, and see the master off. It starts while the job is checked, and waits for that.

    Returns what tells of a text whether a worker has printed it, and it was shown.

    Raises:
        UserError: the check found something, or the master refused to start.
        JobFailedError: the check broke, the master did not start, or ended without saying how the job did.
        Interrupted: before the check was over.
    """
    checked = not spec.command  # what the user's own program needs, only it knows
    check = checking(spec) if checked else contextlib.nullcontext()
    outlets = own_outlets()
    with started(job, spec.stop_grace, signals.take, held=checked, stdout_apart=apart(spec, *outlets)) as master:
        with check as running:
            if running is not None:
                with _said("checking the model and the data"):
                    running.wait(impatient=lambda: signals.first is not None)
                signals.raise_first()
                master.release()
        address = master.wait_until_up()
        if signals.first is not None:
            return lambda text: False
        tell(f"job {job.name} started; in another terminal: {elsewhere(f'elasticdl status {job.name}')}")
        handle = JobHandle(FolderHome(job))
        with (
            contextlib.ExitStack() as stack,
            open_screen(spec.log_loss_steps, Printing(*outlets)) as screen,
            local_prints(job, spec, screen, *outlets).shown(wait=lambda: not signals.take()) as prints,
            handle.following(statuses=True, has_ended=lambda: master.has_ended() or job.status.exists()) as following,
        ):
            client = None if address is None else stack.enter_context(connect(address.endpoint))
            show_course(following, screen, _Interrupts(master, client, screen, signals, spec.stop_grace).go_on)
            master.wait(CLOSING_TIME)
        if not job.status.exists() and signals.first is None:
            raise JobFailedError(master.explain_end())
        return prints.has_shown


def _said(text: str) -> contextlib.AbstractContextManager[object]:
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

    def go_on(self, heard: Heard | None) -> bool:
        """False once the user's patience is over; then the master is killed."""
        if self.client and self.signals.take():
            self._interrupt(self.client)
        if time.monotonic() < self.deadline:
            return True
        self.master.group.kill()
        return False

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
