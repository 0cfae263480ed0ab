"""Starting a job on a Slurm cluster, and following it. Its folder must be one that the cluster's nodes share."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from elasticdl.cli import folder_job
from elasticdl.cli.course import Follower, follow
from elasticdl.cli.folder_job import handle_of
from elasticdl.cli.local_run import check_as_worker, checked_here, new_job
from elasticdl.cli.printed import local_prints
from elasticdl.cli.screens import insists, own_outlets, tell
from elasticdl.cli.signals import SignalLog, caught, interrupt
from elasticdl.common.errors import UserError, how_to_install
from elasticdl.job.jobdir import JobDir, elsewhere
from elasticdl.job.spec import JobSpec


def run_job(spec: JobSpec, *, detach: bool) -> int:
    """Check, submit, follow; returns the exit code. Once it is submitted, the job does not need this command.

    Raises:
        UserError: something is wrong with the job; nothing was started.
        JobFailedError: the job failed.
        Interrupted: a signal came; a job that is submitted goes on.
    """
    folder_job.require_slurm()
    issue = _certificates()
    with caught(interrupt):
        spec = checked_here(spec)
    signals = SignalLog()
    with caught(signals.add), new_job(spec) as (job, spec):
        if not spec.command:
            check_as_worker(spec, impatient=lambda: signals.first is not None)
        signals.raise_first()
        for role, files in issue(job.name, datetime.now(UTC)).items():
            files.write(job.tls / role)
        number = folder_job.submit(job, spec)
    see = elsewhere(f"elasticdl status {job.name}")
    tell(f"job {job.name} submitted: its master is Slurm's job {number}; see `{see}`{insists(spec, job.name)}")
    signals.raise_first()
    return 0 if detach else follow_submitted(job, spec)


def _certificates() -> Any:
    """`elasticdl.common.certificates.issue`. Jobs of this machine, which are started by the same command, need no certificates.

    Raises:
        UserError: the package ``cryptography`` is missing, or one that it needs.
    """
    try:
        from elasticdl.common.certificates import issue
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        raise UserError(f"jobs of Slurm need the package {missing}: {how_to_install('slurm')}") from None
    return issue


def follow_submitted(job: JobDir, spec: JobSpec) -> int:
    """Until the job has ended; returns the exit code.

    Raises:
        JobFailedError: it failed, was stopped or is lost.
        Interrupted: by a signal; the job goes on.
    """
    number, outlets = job.batch.read_text(), own_outlets()
    follower = Follower(
        prints=lambda screen: local_prints(job, spec, screen, *outlets),
        farewell=f"job {job.name} goes on: `{elsewhere(f'elasticdl stop {job.name}')}` stops it",
        lost=lambda: folder_job.cancel(job.name, number),  # what is left of it, as after its folder was removed
    )
    return follow(handle_of(job), spec, follower)
