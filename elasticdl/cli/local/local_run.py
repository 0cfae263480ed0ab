"""Checking a job, starting it on this machine and following it to its end.

The checks here need no framework; the rest (module, model, data, Horovod) is checked by ``python -m elasticdl.worker.check``
in a process of its own.

Status and news go to the screen, as what workers print does, and signals become requests to stop. The news come from the journal's
file, where they still are when the master is gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from elasticdl.cli.course import show_course, show_end
from elasticdl.cli.follow import Heard
from elasticdl.cli.job_handle import JobHandle
from elasticdl.cli.job_names import made_up_name
from elasticdl.cli.local.folder_home import FolderHome, goes_on, prune_jobs
from elasticdl.cli.local.job_check import CheckBrokeError, checking
from elasticdl.cli.local.local_prints import apart, local_prints
from elasticdl.cli.local.master_process import CLOSING_TIME, MasterProcess, started
from elasticdl.cli.master_client import MasterClient, connect
from elasticdl.cli.outlets import own_outlets, tell
from elasticdl.cli.screens import Printing, Screen, open_screen
from elasticdl.cli.signals import Interrupted, SignalLog, caught, interrupt
from elasticdl.common.environment import refuse_variables
from elasticdl.common.errors import JobFailedError, UserError
from elasticdl.common.python_command import NoSuchProgram, UnclearCommand, program_of
from elasticdl.job import folders
from elasticdl.job.jobdir import JobDir, create_job_dir, elsewhere, jobs_root, write_aside
from elasticdl.job.spec import JobSpec

KILL_SECONDS = 3.0  # that a master gets to stop at once
FOLDERS_READ = ("model_zoo",)
DATA = ("training_data", "validation_data")


def run_job(spec: JobSpec) -> int:
    """Check, start, follow; returns the exit code, and nothing of the job is left running, whatever happens.

    Raises:
        UserError: something is wrong with the job; nothing was started.
        JobFailedError: the job failed.
        Interrupted: a signal came before or while it ran.
    """
    with caught(interrupt):
        spec = _checked(spec)
    signals = SignalLog()
    with caught(signals.add), _new_job(spec) as (job, spec):
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


def _checked(spec: JobSpec) -> JobSpec:
    """The job as it will run, once nothing is known to be wrong with it."""
    refuse_variables(os.environ)
    if spec.command:
        spec = spec.model_copy(update={"command": with_this_python(spec.command)})
        require_executable(spec.command)
    spec = with_absolute_paths(spec, Path.cwd())
    folders.require_writable_folders(spec)
    return spec


def with_absolute_paths(spec: JobSpec, cwd: Path) -> JobSpec:
    """The same job with its folders made absolute, as the processes that use them may be started elsewhere.

    URLs are left alone, and so is a value for the data that is not a file here: what it means is up to ``dataset()``.
    """
    changed: dict[str, str] = {}
    for name in (*FOLDERS_READ, *DATA, *folders.WRITTEN):
        value = getattr(spec, name)
        if value and "://" not in value:
            path = cwd / Path(value).expanduser()
            if name not in DATA or path.exists():
                changed[name] = os.path.normpath(path)
    return spec.model_copy(update=changed)


def with_this_python(command: tuple[str, ...]) -> tuple[str, ...]:
    """The command, with a bare ``python`` made the one that elasticdl is installed for.

    Another one on PATH (the virtual environment is not activated) would not find the library.
    """
    return (sys.executable, *command[1:]) if command[0] in ("python", "python3") else command


def require_executable(command: tuple[str, ...]) -> None:
    program = command[0]
    if shutil.which(program) is None:
        hint = f"did you mean `python {program}`?" if program.endswith(".py") else "check its name and PATH"
        raise UserError(f"the program {program} is not found, or not executable: {hint}")
    try:
        program_of(command)
    except NoSuchProgram as error:
        raise UserError(f"{error}: name the script as it is called from {Path.cwd()}") from None
    except UnclearCommand:
        pass  # it may have a script all the same


@contextlib.contextmanager
def _new_job(spec: JobSpec) -> Iterator[tuple[JobDir, JobSpec]]:
    """Make the job's folder and write its specification into it; an old job of the same name gives way if it is over.

    If the user is to blame for what is raised within, or the check breaks, or a signal comes before the job has begun, all is as
    it was before.
    """
    prune_jobs()
    before = JobDir(jobs_root() / spec.job_name)
    aside = before.path.with_name(f".{spec.job_name}-before")
    if spec.job_name and before.path.is_dir() and not goes_on(before):
        shutil.rmtree(aside, ignore_errors=True)
        before.path.rename(aside)
    job = create_job_dir(spec.job_name or made_up_name(lambda name: (jobs_root() / name).exists()))
    spec = spec.model_copy(update={"job_name": job.name})
    write_aside(job.spec, spec.to_json())
    if spec.resume and aside.is_dir():
        for kept in JobDir(aside).kept_states():  # a link, as the old folder may come back
            os.link(kept, job.path / kept.name)
    try:
        yield job, spec
    except (UserError, CheckBrokeError, Interrupted) as why:
        shutil.rmtree(job.path, ignore_errors=True)
        if aside.is_dir():
            aside.rename(job.path)
        if isinstance(why, Interrupted):
            tell(f"job {job.name} was interrupted before it had begun: nothing is left of it")
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


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
