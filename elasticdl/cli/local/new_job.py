"""Checking a job that is started from this machine, and making its folder.

What needs a framework is checked in a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from elasticdl.cli.job_names import made_up_name
from elasticdl.cli.local import batch_master
from elasticdl.cli.local.folder_job import goes_on, handle_of, prune_jobs
from elasticdl.cli.screens import tell
from elasticdl.cli.signals import Interrupted
from elasticdl.common.environment import refuse_variables
from elasticdl.common.errors import ElasticDLError, JobFailedError, UserError
from elasticdl.common.process_group import ProcessGroup
from elasticdl.common.python_command import NoSuchProgram, UnclearCommand, program_of
from elasticdl.common.startup import RUN_MODULE
from elasticdl.job import folders
from elasticdl.job.jobdir import JobDir, create_job_dir, jobs_root, write_aside
from elasticdl.job.spec import JobSpec

FOLDERS_READ = ("model_zoo",)
DATA = ("training_data", "validation_data")
CHECK_MODULE = "elasticdl.worker.check"
POLL = 0.02


class CheckBrokeError(JobFailedError):
    """Nothing is known of the job."""


def checked_here(spec: JobSpec) -> JobSpec:
    """The job as it will run, once nothing is known to be wrong with it."""
    refuse_variables(os.environ)
    if spec.command:
        spec = spec.model_copy(update={"command": with_this_python(spec.command)})
        require_executable(spec.command)
    spec = with_absolute_paths(spec, Path.cwd())
    folders.require_writable_folders(spec)
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


def check_as_worker(spec: JobSpec, impatient: Callable[[], bool] = lambda: False) -> None:
    """As `checked_as_worker`, with nothing beside it."""
    with checked_as_worker(spec, impatient):
        pass


@contextlib.contextmanager
def checked_as_worker(spec: JobSpec, impatient: Callable[[], bool]) -> Iterator[None]:
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
            [*RUN_MODULE, CHECK_MODULE], stdin=given, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True
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
                time.sleep(POLL)
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
    kept, end, same_folder = old.kept_states() if spec.resume else [], handle_of(old).end(), False
    for state in kept:  # a link, as the old folder may come back
        os.link(state, job.path / state.name)
    if spec.resume and spec.checkpoint_dir:
        with contextlib.suppress(ElasticDLError, OSError):  # a damaged specification names no folder
            same_folder = handle_of(old).spec().checkpoint_dir == spec.checkpoint_dir
    goes_on = bool(kept or same_folder) and (end is None or end.phase != "succeeded")
    for file in (old.earlier, old.journal) if goes_on else ():
        with contextlib.suppress(FileNotFoundError), file.open("rb") as before, job.earlier.open("ab") as after:
            shutil.copyfileobj(before, after)
    return goes_on or end is None or end.phase != "succeeded"


@contextlib.contextmanager
def new_job(spec: JobSpec) -> Iterator[tuple[JobDir, JobSpec]]:
    """Make the job's folder and write its specification into it; an old job of the same name gives way if it is over. If the new one
    goes on from where the old one was stopped, both are one training, and the new folder has the journals of both.

    If the user is to blame for what is raised within, or the check breaks, or a signal comes before the job has begun, all is as
    it was before.
    """
    prune_jobs()
    before = JobDir(jobs_root() / spec.job_name)
    aside = before.path.with_name(f".{spec.job_name}-before")
    if spec.job_name and before.path.is_dir() and not goes_on(before):
        if before.batch.exists() and not before.status.exists():
            # Workers may still look for their master in this folder.
            batch_master.cancel_workers(before.name, before.batch.read_text())
        shutil.rmtree(aside, ignore_errors=True)
        before.path.rename(aside)
    job = create_job_dir(spec.job_name or made_up_name(lambda name: (jobs_root() / name).exists()))
    spec = spec.model_copy(update={"job_name": job.name})
    write_aside(job.spec, spec.to_json())
    silently = not aside.is_dir() or _take_over(JobDir(aside), job, spec)
    try:
        yield job, spec
        if not silently:
            tell(
                f"the job {job.name} that has succeeded gave way, with its journal and logs: another --job_name keeps a job"
            )
    except (UserError, CheckBrokeError, Interrupted) as why:
        shutil.rmtree(job.path, ignore_errors=True)
        if aside.is_dir():
            aside.rename(job.path)
        if isinstance(why, Interrupted):
            tell(f"job {job.name} was interrupted before it had begun: nothing is left of it")
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
