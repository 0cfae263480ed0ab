"""Starting a job on a Slurm cluster, and following it. Its folder must be one that the cluster's nodes share."""

from __future__ import annotations

import contextlib
import os
from datetime import UTC, datetime
from typing import Any

from elasticdl.cli.course import show_course, show_end
from elasticdl.cli.follow import Heard
from elasticdl.cli.job_handle import JobHandle
from elasticdl.cli.local import batch_master
from elasticdl.cli.local.folder_home import home_of
from elasticdl.cli.local.job_check import checking
from elasticdl.cli.local.local_prints import local_prints
from elasticdl.cli.local.new_job import checked_here, new_job
from elasticdl.cli.outlets import own_outlets, tell
from elasticdl.cli.screens import Printing, open_screen
from elasticdl.cli.signals import SignalLog, caught, interrupt
from elasticdl.common.errors import JobFailedError, UnreachableError, UserError
from elasticdl.common.extras import how_to_install
from elasticdl.job.jobdir import JobDir, elsewhere
from elasticdl.job.spec import JobSpec


def run_job(spec: JobSpec, *, detach: bool) -> int:
    """Check, submit, follow; returns the exit code. Once it is submitted, the job does not need this command.

    Raises:
        UserError: something is wrong with the job; nothing was started.
        JobFailedError: the job failed.
        Interrupted: a signal came; a job that is submitted goes on.
    """
    batch_master.require_slurm()
    issue = _certificates()
    with caught(interrupt):
        spec = checked_here(spec)
    signals = SignalLog()
    with caught(signals.add), new_job(spec) as (job, spec):
        if not spec.command:
            with checking(spec) as running:
                running.wait(impatient=lambda: signals.first is not None)
        signals.raise_first()
        for role, files in issue(job.name, datetime.now(UTC)).items():
            files.write(job.tls / role)
        number = batch_master.submit(job, spec)
    tell(
        f"job {job.name} submitted: its master is Slurm's job {number}; see `{elsewhere(f'elasticdl status {job.name}')}`"
    )
    signals.raise_first()
    return 0 if detach else follow(job, spec)


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


def follow(job: JobDir, spec: JobSpec) -> int:
    """Until the job has ended; returns the exit code.

    Raises:
        JobFailedError: it failed, was stopped or is lost.
        Interrupted: by a signal; the job goes on.
    """
    handle, signals, outlets = JobHandle(home_of(job)), SignalLog(), own_outlets()
    number, told = job.batch.read_text(), ""
    with (
        caught(signals.add),
        open_screen(spec.log_loss_steps, Printing(*outlets)) as screen,
        local_prints(job, spec, screen, *outlets).shown(wait=lambda: signals.first is None) as prints,
        handle.following(statuses=True) as following,
    ):

        def go_on(heard: Heard | None) -> bool:
            nonlocal told
            if heard is None and not job.master.exists():
                with contextlib.suppress(UnreachableError, FileNotFoundError):
                    if (absence := handle.home.absence()) and absence != told:
                        screen.line(absence)
                        told = absence
            return signals.first is None

        show_course(following, screen, go_on)
    if signals.first is not None:
        tell(f"job {job.name} goes on: `{elsewhere(f'elasticdl stop {job.name}')}` stops it")
        signals.raise_first()
    status = handle.status()
    if status.phase == "lost":
        batch_master.cancel(job.name, number)  # what is left of it, as after its folder was removed
    show_end(status, handle.home.journal(), spec.output, prints.has_shown)
    if status.phase != "succeeded":
        raise JobFailedError(f"job {job.name} {status.phase}: {status.reason}; all logs: {job.logs}{os.sep}")
    return 0
