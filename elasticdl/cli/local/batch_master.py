"""A master that is a batch job of a Slurm cluster: submitted and looked after with Slurm's own commands."""

from __future__ import annotations

import math
import shlex
import shutil
import subprocess
import time

from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.common.reason import flat
from elasticdl.common.startup import RUN_MODULE
from elasticdl.job.jobdir import JobDir, write_aside
from elasticdl.job.spec import JobSpec

MASTER_MODULE = "elasticdl.master.shell.slurm_master"
ANSWER_SECONDS = 60.0
LOOK_SECONDS = 3.0  # between two questions after a batch job
NOTICE_SECONDS = 120  # before its time limit the master puts itself into the queue again
# Of a batch job that may still run, or run again; after all others no master comes any more.
WAITS = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "SUSPENDED", "STOPPED")
RUNS = ("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT")
_answers: dict[
    str, tuple[float, tuple[str, str] | str]
] = {}  # by batch job: when it was asked after; text is why in vain


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
    command = [*RUN_MODULE, MASTER_MODULE, "--job_dir", str(job.path)]
    words = ["--parsable", "--requeue", f"--job-name=elasticdl-{job.name}-master", f"--output={job.master_log}"]
    words += [
        "--open-mode=append",
        "--ntasks=1",
        f"--signal=B:TERM@{NOTICE_SECONDS}",
        *shlex.split(spec.slurm_master_args),
    ]
    number = _run("sbatch", *words, f"--wrap=exec {shlex.join(command)}").strip().partition(";")[0]
    write_aside(job.batch, number)
    return number


def state_of(job: JobDir) -> tuple[str, str]:
    """What Slurm says of the master's batch job: its state, and why; the state is empty if Slurm does not know the job any more.

    Slurm serves many: whoever asks again soon is given the same answer.

    Raises:
        UnreachableError: Slurm does not answer.
    """
    number = job.batch.read_text()
    asked, answer = _answers.get(number, (-math.inf, ""))
    if time.monotonic() - asked > LOOK_SECONDS:
        try:
            answer = _ask(number)
        except UnreachableError as error:
            answer = str(error)
        _answers[number] = time.monotonic(), answer
    if isinstance(answer, str):
        raise UnreachableError(answer)
    return answer


def _ask(number: str) -> tuple[str, str]:
    try:
        told = _run("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T|%r").strip()
    except UserError as error:
        if "nvalid job id" in str(error):
            return "", ""
        raise UnreachableError(str(error)) from None
    state, _, why = told.partition("|")
    return state, why


def _run(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"{words[0]} has not answered in {ANSWER_SECONDS:g} s") from None
    except OSError as error:
        raise UnreachableError(f"can't run {words[0]}: {error.strerror}") from None
    if done.returncode:
        raise UserError(f"Slurm refuses {words[0]}: {flat(done.stderr)}")
    return done.stdout
