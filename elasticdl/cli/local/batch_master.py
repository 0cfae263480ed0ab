"""A master that is a batch job of a Slurm cluster: submitted, looked after and cancelled with Slurm's own commands."""

from __future__ import annotations

import shlex
import shutil
import subprocess

from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.common.startup import RUN_MODULE
from elasticdl.job.jobdir import JobDir, write_aside
from elasticdl.job.spec import JobSpec
from elasticdl.places.slurm import refusal, workers_name

MASTER_MODULE = "elasticdl.master.shell.slurm_master"
ANSWER_SECONDS = 60.0
LOOK_SECONDS = (
    10.0  # for what is only asked: somebody waits at the command, and the training job may be asked without Slurm
)
NOTICE_SECONDS = 120  # before its time limit the master puts itself into the queue again
# Of a batch job that may still run, or run again; after all others no master comes any more.
WAITS = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED", "STOPPED")
RUNS = ("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT")


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
        UserError: Slurm refuses it.
        UnreachableError: Slurm does not answer.
    """
    # What is wrong with these would be seen only when the master asks for the first worker.
    _run(
        "sbatch",
        "--test-only",
        "--ntasks=1",
        *shlex.split(spec.slurm_args),
        "--wrap=true",
        said_of=" for a worker (--slurm_args)",
    )
    command = [*RUN_MODULE, MASTER_MODULE, "--job_dir", str(job.path)]
    words = ["--parsable", "--requeue", f"--job-name=elasticdl-{job.name}-master", f"--output={job.master_log}"]
    words += [
        "--open-mode=append",
        "--ntasks=1",
        f"--signal=B:TERM@{NOTICE_SECONDS}",
        *shlex.split(spec.slurm_master_args),
    ]
    told = _run("sbatch", *words, f"--wrap=exec {shlex.join(command)}", said_of=" for the master (--slurm_master_args)")
    number = told.strip().partition(";")[0]
    write_aside(job.batch, number)
    return number


def cancel(name: str, number: str) -> None:
    """End the master, if there is one, and the workers.

    Raises:
        UnreachableError: Slurm does not answer.
    """
    try:
        _run("scancel", "--quiet", number)
    except UserError as error:
        if "nvalid job id" not in str(error):  # else Slurm does not know the master any more
            raise
    cancel_workers(name, number)


def cancel_workers(name: str, number: str) -> None:
    """Those of a master that is gone: they would hold their places for as long as they look for the next one.

    Raises:
        UnreachableError: Slurm does not answer.
    """
    _run("scancel", "--quiet", "--me", f"--name={workers_name(name, number)}")


def has_workers(name: str, number: str) -> bool:
    """
    Raises:
        UnreachableError: Slurm does not answer.
    """
    return bool(
        _run(
            "squeue",
            "--noheader",
            "--me",
            "--states=PENDING,RUNNING",
            f"--name={workers_name(name, number)}",
            "--format=%i",
        ).strip()
    )


def state_of(job: JobDir) -> tuple[str, str]:
    """What Slurm says of the master's batch job: its state, and why; the state is empty if Slurm does not know the job any more.

    Raises:
        UnreachableError: Slurm does not answer.
    """
    try:
        number = job.batch.read_text()
    except FileNotFoundError:  # somebody has removed the job's folder
        return "", ""
    try:
        told = _run(
            "squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T|%r", within=LOOK_SECONDS
        ).strip()
    except UserError as error:
        if "nvalid job id" in str(error):
            return "", ""
        raise UnreachableError(str(error)) from None
    state, _, why = told.partition("|")
    return state, why


def _run(*words: str, said_of: str = "", within: float = ANSWER_SECONDS) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=within, check=False)
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"{words[0]} has not answered in {within:g} s") from None
    except OSError as error:
        raise UnreachableError(f"can't run {words[0]}: {error.strerror}") from None
    if done.returncode:
        raise UserError(f"Slurm refuses {words[0]}{said_of}: {refusal(done.stderr)}")
    return done.stdout
