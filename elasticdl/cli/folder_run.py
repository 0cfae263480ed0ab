"""Starting a job that has a folder, and following it: on this machine, or on a Slurm cluster, whose nodes share the folder.

On this machine the command is the job's master. The master has the main thread, as its workers end with that one (`elasticdl.common.process_group`). In another one the job is followed as any
job is: its course goes to the screen, as what its workers print does, and signals, which the main thread notes, become requests to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from elasticdl.cli.folder_job import BatchJob, FolderJob, Life, SlurmJob, goes_on, handle_of, prune_jobs
from elasticdl.cli.follow import Follower, apart, follow, local_prints
from elasticdl.cli.job_handle import Heard
from elasticdl.cli.parsing import made_up_name
from elasticdl.cli.screens import Screen, own_outlets, tell
from elasticdl.cli.signals import Interrupted, SignalLog, caught, interrupt
from elasticdl.common.credentials import refuse_variables
from elasticdl.common.errors import ElasticDLError, JobFailedError, UnreachableError, UserError, import_extra
from elasticdl.common.front_ends import RUN_MODULE
from elasticdl.common.process_group import ProcessGroup, tethered
from elasticdl.common.template import CannotFork
from elasticdl.job import jobdir
from elasticdl.job.jobdir import JobDir, MasterAddress, create_job_dir, elsewhere, jobs_root, kept_states, write_aside
from elasticdl.job.spec import JobSpec
from elasticdl.master.core.events import StopRequested
from elasticdl.places import slurm
from elasticdl.places.preload import NoSuchProgram, program_of

if TYPE_CHECKING:
    from elasticdl.master.shell.serve import LauncherFactory, Master

# Checking a job that is started from this machine, and making its folder.
#
# What needs a framework is checked in a process of its own.


FOLDERS_READ = ("model_zoo",)
DATA = ("training_data", "validation_data", "prediction_data")
CHECK_MODULE = "elasticdl.worker.check"
CHECK_POLL = 0.02
FOLDER_SECONDS = 30.0  # for others that make jobs: a batch system may be asked meanwhile


class CheckBrokeError(JobFailedError):
    """Nothing is known of the job."""


def checked_here(spec: JobSpec) -> JobSpec:
    """The job as it will run, once nothing is known to be wrong with it."""
    refuse_variables(os.environ)
    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise UserError("the folder in which this was typed is gone: change to one that is there") from None
    if spec.command:
        spec = spec.model_copy(update={"command": with_this_python(spec.command)})
        require_executable(spec.command)
    spec = with_absolute_paths(spec, here)
    jobdir.require_writable_folders(spec)
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise UserError(f"can't make a temporary folder: {error.strerror}; TMPDIR names the place") from None
    return spec


def with_absolute_paths(spec: JobSpec, cwd: Path) -> JobSpec:
    """The same job with its folders made absolute, as the processes that use them may be started elsewhere.

    URLs are left alone, and so is a value for the data that is not a file here: what it means is up to ``dataset()``.
    """
    changed: dict[str, str] = {}
    for name in (*FOLDERS_READ, *DATA, *jobdir.WRITTEN):
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
    except CannotFork:
        pass  # it may have a script all the same


@contextlib.contextmanager
def checked_as_worker(spec: JobSpec, impatient: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """The worker's own check (`elasticdl.worker.check`) in a process of its own, beside which a master may start.

    The context ends once nothing was found, or somebody is impatient; what the user's module has started in the check has ended then.

    Raises:
        UserError: what the check found.
        CheckBrokeError: the check itself broke.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
        given.write(spec.to_json().encode())
        given.seek(0)
        process = subprocess.Popen(
            tethered([*RUN_MODULE, CHECK_MODULE]),
            stdin=given,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
        group = ProcessGroup(process.pid, process.wait)
        try:
            yield
            # It imports a framework and the user's module, and opens the data, as a worker does at its start.
            deadline = time.monotonic() + spec.start_timeout
            while (code := group.code()) is None:
                if impatient():
                    return
                if time.monotonic() > deadline:
                    raise UserError(
                        "the check of the model and the data took longer than a worker's start may, "
                        f"{spec.start_timeout:g} s: --start_timeout gives it more"
                    )
                time.sleep(CHECK_POLL)
        finally:
            group.end()
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
    if code == 2:
        raise UserError(lines[-1])
    if code != 0:
        tail = "\n".join(lines[-20:])
        raise CheckBrokeError(f"the check of the job broke (exit code {code}); it said:\n{tail}")


def _take_over(old: JobDir, job: JobDir, spec: JobSpec) -> bool:
    """If the two are one training, have the journal of both. ``old``: the job of the same name that is over. Returns whether it may go
    without a word."""
    kept, end, same_folder = kept_states(old.path) if spec.resume else [], None, False
    with contextlib.suppress(ElasticDLError):  # a damaged status does not tell how it ended
        end = handle_of(old).end()
    for state in kept:  # a link, as the old folder may come back
        os.link(state, job.path / state.name)
    if spec.resume and spec.checkpoint_dir:
        with contextlib.suppress(ElasticDLError, OSError):  # a damaged specification names no folder
            its = handle_of(old).spec()
            same_folder = (its.task, its.checkpoint_dir) == (spec.task, spec.checkpoint_dir)
    goes_on = bool(kept or same_folder) and (end is None or end.phase != "succeeded")
    for file in (old.earlier, old.journal) if goes_on else ():
        with contextlib.suppress(FileNotFoundError), file.open("rb") as before, job.earlier.open("ab") as after:
            shutil.copyfileobj(before, after)
    return goes_on or end is None or end.phase != "succeeded"


@contextlib.contextmanager
def new_job(spec: JobSpec) -> Iterator[tuple[JobDir, JobSpec]]:
    """Make the job's folder and write its specification into it; an old job of the same name gives way if it is over. If the new one
    goes on from where the old one was stopped, both are one training, and the new folder has the journals of both.

    If the user is to blame for what is raised within, or the check breaks, or a signal comes before the job has begun, or the disk is full,
    all is as it was before.
    """
    prune_jobs()
    before = JobDir(jobs_root() / spec.job_name)
    aside = before.path.with_name(f".{spec.job_name}-before")
    with _one_at_a_time():
        if spec.job_name and before.path.is_dir() and not goes_on(before):
            if before.batch.exists() and not before.status.exists():
                # Workers may still look for their master in this folder.
                BatchJob(before).cancel_workers()
            shutil.rmtree(aside, ignore_errors=True)
            before.path.rename(aside)
        try:
            job = create_job_dir(spec.job_name or made_up_name(lambda name: (jobs_root() / name).exists()))
        except UserError:
            with contextlib.suppress(OSError):  # it is not there, or another command's that has made the job
                aside.rename(before.path)
            raise
    try:
        with contextlib.ExitStack() as starting:
            starting.callback(job.starter.unlink, missing_ok=True)
            spec = spec.model_copy(update={"job_name": job.name})
            MasterAddress.of_this_process().write(job.starter)
            write_aside(job.spec, spec.to_json())
            silently = not aside.is_dir() or _take_over(JobDir(aside), job, spec)
            yield job, spec
    except (UserError, CheckBrokeError, Interrupted, OSError) as why:
        shutil.rmtree(job.path, ignore_errors=True)
        if aside.is_dir():
            aside.rename(job.path)
        if isinstance(why, Interrupted):
            tell(f"job {job.name} was interrupted before it had begun: nothing is left of it")
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    if not silently:
        tell(
            f"the job {job.name} that has succeeded gave way, with its journal and logs: another --job_name keeps a job"
        )


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Of several commands that make jobs, so that none takes the folder that another has just made for one that is over."""
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):  # there is no folder yet, or its file system has no such locks
            folder = os.open(jobs_root(), os.O_RDONLY)
            opened.callback(os.close, folder)
            deadline = time.monotonic() + FOLDER_SECONDS
            while time.monotonic() < deadline:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(CHECK_POLL)
        yield


# ---- on this machine ----

CLOSING_TIME = 5.0  # seconds that a master gets beyond the workers' grace
KILL_SECONDS = 3.0  # that a master gets to stop at once
POLL, UP_POLL = 0.1, 0.01

_log = logging.getLogger(__name__)


def run_here(spec: JobSpec) -> int:
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
        with new_job(spec) as (folder, spec):
            with _checking(spec, signals):
                from elasticdl.master.shell.serve import LocalWorkers, local_master, logging_to

                undo.enter_context(logging_to(folder.master_log, spec, tell))

                def make_launcher(address: MasterAddress) -> LauncherFactory:
                    workers = LocalWorkers(spec, folder, address, stdout_apart=apart(spec, *outlets))
                    undo.push_async_callback(workers.close)
                    return workers.launcher

                master = local_master(spec, folder, make_launcher)
            signals.raise_first()
            job = await undo.enter_async_context(_serving(master, folder, spec, signals))
            await job.is_up()
        if signals.first is None:
            status = elsewhere(f"elasticdl status {job.name}")
            tell(f"job {job.name} started; in another terminal: {status}")
        follower = Follower(
            prints=lambda screen: local_prints(folder, spec, screen, *outlets),
            watch=lambda screen, _: _Interrupts(job, screen, spec.stop_grace).hear,
            farewell=None,
            at_end=lambda: job.ended.wait(CLOSING_TIME),
            lost=job.raise_lost,
        )
        following = asyncio.create_task(asyncio.to_thread(follow, job, spec, follower, signals))
        while not following.done():  # The kernel may give a signal to another thread: it is noted when this one runs.
            await asyncio.wait({following}, timeout=POLL)
        return following.result()


@contextlib.contextmanager
def _checking(spec: JobSpec, signals: SignalLog) -> Iterator[None]:
    """Of the user's own program only that knows what it needs."""
    if spec.command:
        yield
        return
    spinner = Console(stderr=True).status("checking the model and the data")  # on a terminal
    with spinner, checked_as_worker(spec, lambda: signals.first is not None):
        yield


@dataclass(frozen=True, slots=True)
class _OwnJob(FolderJob):
    """The job whose master is in this process. To be asked from any thread, but for `is_up`."""

    signals: SignalLog
    own_master: Master
    running: asyncio.Task[None]
    ended: threading.Event
    loop: asyncio.AbstractEventLoop

    async def is_up(self) -> None:
        """Wait until the master can be called.

        Raises:
            UserError: a folder of the job can't be written.
            JobFailedError: it ended.
            Interrupted: a signal came before; the master has ended.
        """
        while not self.own_master.is_up.is_set() and not self.running.done():
            if self.signals.first is not None:
                self.running.cancel()
            await asyncio.wait({self.running}, timeout=UP_POLL)
        if self.running.cancelled():
            self.signals.raise_first()
        if not self.own_master.is_up.is_set():
            self.running.result()

    def look(self, master: MasterAddress | None) -> tuple[Life, str]:
        """That it has ended is known at once."""
        has_ended = self.ended.is_set()  # asked first: a master that has ended may have written how the job did
        if self.folder.status.exists():
            return Life.ENDED, ""
        return (Life.LOST if has_ended else Life.RUNNING), ""

    def stop(self, reason: str, *, now: bool = False) -> None:
        self.loop.call_soon_threadsafe(self.own_master.post, StopRequested(reason, checkpoint=not now, now=now))

    def kill(self) -> None:
        """The workers are killed at once, and nobody says how the job has ended."""
        self.loop.call_soon_threadsafe(self.running.cancel)

    def raise_lost(self) -> None:
        """Nobody has said how the job has ended."""
        if self.signals.first is None:
            self.running.result()
            raise JobFailedError(f"the job has ended, and how is not known; the master's log: {self.folder.master_log}")
        tell(f"job {self.name} was stopped before it could say how far it got; its logs: {self.folder.logs}")
        self.signals.raise_first()


@contextlib.asynccontextmanager
async def _serving(master: Master, folder: JobDir, spec: JobSpec, signals: SignalLog) -> AsyncIterator[_OwnJob]:
    """Leaving the context ends the master and all that it has started."""
    ended = threading.Event()

    async def run() -> None:
        try:
            await master.run()
        except ElasticDLError:
            raise
        except Exception as error:
            _log.exception("the master ends before the job")
            why = f"the master ended before the job had: {error!r}; its log: {folder.master_log}"
            raise JobFailedError(why) from error
        finally:
            ended.set()

    running = asyncio.create_task(run())
    job = _OwnJob(folder, signals, master, running, ended, asyncio.get_running_loop())
    try:
        yield job
    finally:
        if not running.done():
            job.stop("nobody follows the job any more")
            deadline = time.monotonic() + spec.stop_grace + CLOSING_TIME
            while not running.done() and time.monotonic() < deadline and not signals.take():
                await asyncio.wait({running}, timeout=POLL)
            running.cancel()
            await asyncio.wait({running})


@dataclass(slots=True)
class _Interrupts:
    """The first signal asks for a clean stop, the second for one at once, the third kills; so does the end of the user's patience."""

    job: _OwnJob
    screen: Screen
    stop_grace: float
    signalled: int = 0
    deadline: float = float("inf")
    is_killing: bool = False

    def hear(self, heard: Heard | None) -> None:
        if self.job.signals.take():
            self._interrupt()
        if time.monotonic() >= self.deadline:
            self.job.kill()
            if not self.is_killing:
                self.is_killing = True
                self.screen.line("killing all workers")

    def _interrupt(self) -> None:
        now, self.signalled = time.monotonic(), self.signalled + 1
        if self.signalled == 1:
            self.job.stop("interrupted")
            self.deadline = now + self.stop_grace + CLOSING_TIME
            self.screen.line("stopping after this step; press Ctrl-C again to stop at once")
        elif self.signalled == 2:
            self.job.stop("interrupted twice", now=True)
            self.deadline = now + KILL_SECONDS
            self.screen.line("stopping at once; press Ctrl-C again to kill all workers")
        else:
            self.deadline = now


# ---- on a Slurm cluster ----

KEEPER_MODULE = "elasticdl.master.shell.slurm_keeper"


def run_on_slurm(spec: JobSpec, *, detach: bool) -> int:
    """Check, submit, follow; returns the exit code. Once it is submitted, the job does not need this command.

    Raises:
        UserError: something is wrong with the job; nothing was started.
        JobFailedError: the job failed, was stopped or is lost.
        Interrupted: a signal came; a job that is submitted goes on.
    """
    issue = import_extra("elasticdl.common.certificates", "jobs of Slurm", "slurm").issue
    with caught(interrupt):
        spec = checked_here(spec)
    signals = SignalLog()
    with caught(signals.add), new_job(spec) as (job, spec):
        with _checking(spec, signals):
            pass
        signals.raise_first()
        for role, files in issue(job.name, datetime.now(UTC)).items():
            files.write(job.tls / role)
        number = submit(job, spec)
    see = elsewhere(f"elasticdl status {job.name}")
    tell(f"job {job.name} submitted: its master is Slurm's job {number}; see `{see}`")
    signals.raise_first()
    if detach:
        return 0
    outlets, batch = own_outlets(), BatchJob(job)
    follower = Follower(
        prints=lambda screen: local_prints(job, spec, screen, *outlets),
        farewell=f"job {job.name} goes on: `{elsewhere(f'elasticdl stop {job.name}')}` stops it",
        lost=batch.cancel,  # what is left of it, as after its folder was removed
    )
    return follow(SlurmJob(job, batch), spec, follower)


def submit(job: JobDir, spec: JobSpec) -> str:
    """Returns the number of the batch job. If its node is lost, Slurm starts it on another.

    Raises:
        UserError: Slurm refuses it, or does not answer.
        OSError: the number can't be written down; the batch job is cancelled again.
    """
    # What is wrong with these would be seen only when the master asks for the first worker.
    worker = ["--test-only", "--ntasks=1", *shlex.split(spec.slurm_args), "--wrap=true"]
    _submit(["sbatch", *worker], "--slurm_args" if spec.slurm_args else "--launcher slurm")
    script = shlex.join(["exec", *RUN_MODULE, KEEPER_MODULE, "--job_dir", str(job.path)])
    arguments = ["--requeue", "--open-mode=append", *shlex.split(spec.slurm_master_args)]
    words = slurm.sbatch(f"elasticdl-{job.name}-master", str(job.master_log), arguments, script)
    number = slurm.number_of(_submit(words, "--slurm_master_args"))
    try:
        write_aside(job.batch, number)
    except OSError:  # nobody would find it, and the job's folder goes
        try:
            slurm.run("scancel", "--quiet", number)
        except ElasticDLError as error:
            tell(f"warning: Slurm's job {number} could not be cancelled: {error}")
        raise
    return number


def _submit(words: list[str], option: str) -> str:
    try:
        return slurm.run(*words)
    except UserError as error:
        raise UserError(f"{option}: {error}") from None
    except UnreachableError as error:
        raise UserError(f"nothing was submitted: {error}") from None
