"""A master that is a batch job of a Slurm cluster: submitted, looked after and cancelled with Slurm's own commands."""

from __future__ import annotations

import math
import shlex
import shutil
import subprocess
import time

from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.common.startup import RUN_MODULE
from elasticdl.job.jobdir import JobDir, write_aside
from elasticdl.job.spec import JobSpec
from elasticdl.places.slurm import refusal, workers_name

MASTER_MODULE = "elasticdl.master.shell.slurm_master"
ANSWER_SECONDS = 60.0
LOOK_SECONDS = 3.0  # between two questions after a batch job
WAIT_SECONDS = 10.0  # for an answer to such a question: the job's own master may answer without Slurm
NOTICE_SECONDS = 120  # before its time limit the master puts itself into the queue again
# Of a batch job that may still run, or run again; after all others no master comes any more.
WAITS = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "SUSPENDED", "STOPPED")
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
    worker = ["--test-only", "--ntasks=1", *shlex.split(spec.slurm_args), "--wrap=true"]
    _run("sbatch", *worker, said_of=" for a worker (--slurm_args)")
    command = [*RUN_MODULE, MASTER_MODULE, "--job_dir", str(job.path)]
    words = ["--parsable", "--requeue", f"--job-name=elasticdl-{job.name}-master", f"--output={job.master_log}"]
    words += ["--open-mode=append", "--ntasks=1", f"--signal=B:TERM@{NOTICE_SECONDS}"]
    words += [*shlex.split(spec.slurm_master_args), f"--wrap=exec {shlex.join(command)}"]
    number = _run("sbatch", *words, said_of=" for the master (--slurm_master_args)").strip().partition(";")[0]
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
    listed = ("--noheader", "--me", "--states=PENDING,RUNNING", f"--name={workers_name(name, number)}", "--format=%i")
    return bool(_run("squeue", *listed).strip())


class MasterState:
    """What Slurm says of the master's batch job. Slurm serves many: an answer, or that there is none, holds for `LOOK_SECONDS`."""

    def __init__(self, job: JobDir) -> None:
        self._job = job
        self._asked = -math.inf
        self._answer: tuple[str, str] | UnreachableError = "", ""

    def ask(self) -> tuple[str, str]:
        """Its state, and why; the state is empty if Slurm does not know the job any more.

        Raises:
            UnreachableError: Slurm does not answer.
        """
        if time.monotonic() - self._asked > LOOK_SECONDS:
            try:
                self._answer = _state(self._job)
            except UnreachableError as error:
                self._answer = error
            self._asked = time.monotonic()
        if isinstance(self._answer, UnreachableError):
            raise self._answer
        return self._answer


def _state(job: JobDir) -> tuple[str, str]:
    try:
        number = job.batch.read_text()
    except FileNotFoundError:  # somebody has removed the job's folder
        return "", ""
    words = ("--noheader", "--states=all", f"--jobs={number}", "--format=%T|%r")
    try:
        state, _, why = _run("squeue", *words, within=WAIT_SECONDS).strip().partition("|")
    except UserError as error:
        if "nvalid job id" in str(error):
            return "", ""
        raise UnreachableError(str(error)) from None
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
