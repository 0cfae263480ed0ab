"""Starting a job on this machine and following it to its end."""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from elasticdl.cli.job_names import made_up_name
from elasticdl.cli.line_streams import FileLines
from elasticdl.cli.local import checks
from elasticdl.cli.local.local_follow import Following
from elasticdl.cli.local.local_jobs import Life, last_status, life_of, prune_jobs
from elasticdl.cli.local.master_process import MasterProcess
from elasticdl.cli.screens import open_screen
from elasticdl.cli.signals import Interrupted, SignalLog, caught, interrupt
from elasticdl.cli.status_watch import show_end
from elasticdl.common.errors import JobFailedError, UserError
from elasticdl.common.folders import require_writable_folders
from elasticdl.common.horovod_variables import refuse_variables
from elasticdl.common.jobdir import JobDir, create_job_dir, jobs_root, write_aside
from elasticdl.common.journal import read_journal
from elasticdl.common.spec import JobSpec


def run_job(spec: JobSpec) -> int:
    """Check, start, follow; returns the exit code, and nothing of the job is left running, whatever happens.

    Raises:
        UserError: something is wrong with the job; nothing was started.
        JobFailedError: the job failed.
        Interrupted: a signal came before or while it ran.
    """
    with caught(interrupt):
        spec = checked(spec)
    signals = SignalLog()
    with caught(signals.add):
        job, spec = new_job(spec)
        try:
            run_master(job, spec, signals)
        except UserError:
            shutil.rmtree(job.path, ignore_errors=True)
            raise
    status = last_status(job)
    if status is None:
        print(f"job {job.name} was stopped before it could say how far it got; its logs: {job.logs}")
    else:
        show_end(status, read_journal(job.journal) if job.journal.exists() else (), spec.output)
    if signals.first is not None and (status is None or status.phase == "stopped"):
        raise Interrupted(signals.first)
    if status is not None and status.phase != "succeeded":
        raise JobFailedError(f"job {job.name} {status.phase}: {status.reason}; all logs: {job.logs}")
    return 0


def checked(spec: JobSpec) -> JobSpec:
    """The job as it will run, once nothing is known to be wrong with it."""
    refuse_variables(os.environ)
    if spec.command:
        spec = spec.model_copy(update={"command": checks.with_this_python(spec.command)})
        checks.require_executable(spec.command)
    spec = checks.with_absolute_paths(spec, Path.cwd())
    require_writable_folders(spec)
    if not spec.command:  # what the user's own program needs, only it knows
        with Console(stderr=True).status("checking the model and the data") if sys.stderr.isatty() else nullcontext():
            checks.check_job(spec)
    return spec


def new_job(spec: JobSpec) -> tuple[JobDir, JobSpec]:
    """Make the job's folder and write its specification into it; an old job of the same name gives way if it is over."""
    prune_jobs()
    if spec.job_name:
        remove_if_over(JobDir(jobs_root() / spec.job_name))
    job = create_job_dir(spec.job_name or made_up_name(lambda name: (jobs_root() / name).exists()))
    spec = spec.model_copy(update={"job_name": job.name})
    write_aside(job.spec, spec.to_json())
    return job, spec


def remove_if_over(job: JobDir) -> None:
    if job.path.is_dir() and life_of(job, time.time()) in (Life.ENDED, Life.LOST):
        shutil.rmtree(job.path)


def run_master(job: JobDir, spec: JobSpec, signals: SignalLog) -> None:
    """Start the master, follow the job, and see the master off.

    Raises:
        UserError: the master refused to start.
        JobFailedError: the master did not start, or ended without saying how the job did.
    """
    with MasterProcess(job, spec.stop_grace, impatient=signals.take) as master:
        address = master.wait_until_up()
        if signals.first is not None:
            return
        print(f"job {job.name} started; in another terminal: elasticdl status {job.name}", flush=True)
        with open_screen(spec.log_loss_steps) as screen:
            Following(master, FileLines(job.journal), screen, signals.take, spec.stop_grace).run(address)
        if not job.status.exists() and signals.first is None:
            raise JobFailedError(master.explain_end())
