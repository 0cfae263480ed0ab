"""Starting a job on a Slurm cluster, and following it. Its folder must be one that the cluster's nodes share."""

from __future__ import annotations

import shlex
import shutil
from datetime import UTC, datetime

from elasticdl.cli.course import Follower, follow
from elasticdl.cli.folder_job import BatchJob, SlurmJob
from elasticdl.cli.local_run import checked_as_worker, checked_here, new_job
from elasticdl.cli.printed import local_prints
from elasticdl.cli.screens import insists, own_outlets, tell
from elasticdl.cli.signals import SignalLog, caught, interrupt
from elasticdl.common.errors import ElasticDLError, UnreachableError, UserError, import_extra
from elasticdl.common.front_ends import RUN_MODULE
from elasticdl.job.jobdir import JobDir, elsewhere, write_aside
from elasticdl.job.spec import JobSpec
from elasticdl.places.slurm import number_of, run, sbatch

KEEPER_MODULE = "elasticdl.master.shell.slurm_keeper"


def run_job(spec: JobSpec, *, detach: bool) -> int:
    """Check, submit, follow; returns the exit code. Once it is submitted, the job does not need this command.

    Raises:
        UserError: something is wrong with the job; nothing was started.
        JobFailedError: the job failed, was stopped or is lost.
        Interrupted: a signal came; a job that is submitted goes on.
    """
    require_slurm()
    issue = import_extra("elasticdl.common.certificates", "jobs of Slurm", "slurm").issue
    with caught(interrupt):
        spec = checked_here(spec)
    signals = SignalLog()
    with caught(signals.add), new_job(spec) as (job, spec):
        if not spec.command:
            with checked_as_worker(spec, impatient=lambda: signals.first is not None):
                pass
        signals.raise_first()
        for role, files in issue(job.name, datetime.now(UTC)).items():
            files.write(job.tls / role)
        number = submit(job, spec)
    see = elsewhere(f"elasticdl status {job.name}")
    tell(f"job {job.name} submitted: its master is Slurm's job {number}; see `{see}`{insists(spec, job.name)}")
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


def require_slurm() -> None:
    """
    Raises:
        UserError: this is no machine from which batch jobs are submitted.
    """
    if missing := [name for name in ("sbatch", "squeue", "scancel") if shutil.which(name) is None]:
        raise UserError(
            f"--launcher slurm: {missing[0]} is not found: start the job on a machine from which you submit to Slurm"
        )


def submit(job: JobDir, spec: JobSpec) -> str:
    """Returns the number of the batch job. If its node is lost, Slurm starts it on another.

    Raises:
        UserError: Slurm refuses it, or does not answer.
        OSError: the number can't be written down; the batch job is cancelled again.
    """
    # What is wrong with these would be seen only when the master asks for the first worker.
    worker = ["--test-only", "--ntasks=1", *shlex.split(spec.slurm_args), "--wrap=true"]
    _submit(["sbatch", *worker], "--slurm_args")
    script = shlex.join(["exec", *RUN_MODULE, KEEPER_MODULE, "--job_dir", str(job.path)])
    arguments = ["--requeue", "--open-mode=append", *shlex.split(spec.slurm_master_args)]
    words = sbatch(f"elasticdl-{job.name}-master", str(job.master_log), arguments, script)
    number = number_of(_submit(words, "--slurm_master_args"))
    try:
        write_aside(job.batch, number)
    except OSError:  # nobody would find it, and the job's folder goes
        try:
            run("scancel", "--quiet", number)
        except ElasticDLError as error:
            tell(f"warning: Slurm's job {number} could not be cancelled: {error}")
        raise
    return number


def _submit(words: list[str], option: str) -> str:
    try:
        return run(*words)
    except UserError as error:
        raise UserError(f"{option}: {error}") from None
    except UnreachableError as error:
        raise UserError(f"nothing was submitted: {error}") from None
