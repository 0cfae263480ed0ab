"""A master that is a batch job of a Slurm cluster: submitted, looked after and cancelled with Slurm's own commands."""

from __future__ import annotations

import contextlib
import math
import shlex
import shutil
import time

from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.common.startup import RUN_MODULE
from elasticdl.job.jobdir import JobDir, write_aside
from elasticdl.job.spec import JobSpec
from elasticdl.places.slurm_commands import (
    Stage,
    UnknownJobError,
    number_of,
    require_time,
    run,
    sbatch,
    stage_of,
    workers_name,
)

MASTER_MODULE = "elasticdl.master.shell.slurm_keeper"
LOOK_SECONDS = 3.0  # between two questions after a batch job
WAIT_SECONDS = 10.0  # for an answer to such a question: the job's own master may answer without Slurm
CANCEL_SECONDS = 20.0  # a person waits for it


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
    """
    for option in ("slurm_args", "slurm_master_args"):
        try:
            require_time(getattr(spec, option))
        except UserError as error:
            raise UserError(f"--{option}: {error}") from None
    # What is wrong with these would be seen only when the master asks for the first worker.
    worker = ["--test-only", "--ntasks=1", *shlex.split(spec.slurm_args), "--wrap=true"]
    _submit(["sbatch", *worker], "--slurm_args")
    script = shlex.join(["exec", *RUN_MODULE, MASTER_MODULE, "--job_dir", str(job.path)])
    arguments = ["--requeue", "--open-mode=append", *shlex.split(spec.slurm_master_args)]
    words = sbatch(f"elasticdl-{job.name}-master", str(job.master_log), arguments, script)
    number = number_of(_submit(words, "--slurm_master_args"))
    write_aside(job.batch, number)
    return number


def _submit(words: list[str], option: str) -> str:
    try:
        return run(*words)
    except UserError as error:
        raise UserError(f"{option}: {error}") from None
    except UnreachableError as error:
        raise UserError(f"nothing was submitted: {error}") from None


def cancel(name: str, number: str) -> None:
    """End the master, if there is one, and the workers.

    Raises:
        UnreachableError: Slurm does not answer.
    """
    with contextlib.suppress(UnknownJobError):  # it ended long ago
        _cancel(number)
    cancel_workers(name, number)


def cancel_workers(name: str, number: str) -> None:
    """Those of a master that is gone: they would hold their places for as long as they look for the next one.

    Raises:
        UnreachableError: Slurm does not answer.
    """
    _cancel("--me", f"--name={workers_name(name, number)}")


def _cancel(*which: str) -> None:
    try:
        run("scancel", "--quiet", *which, within=CANCEL_SECONDS)
    except UnreachableError as error:
        raise UnreachableError(f"{error}; the job may still run: try again once `squeue` answers") from None


def has_workers(name: str, number: str) -> bool:
    """
    Raises:
        UnreachableError: Slurm does not answer.
    """
    listed = ("--noheader", "--me", "--states=PENDING,RUNNING", f"--name={workers_name(name, number)}", "--format=%i")
    return bool(run("squeue", *listed, within=WAIT_SECONDS).strip())


class MasterState:
    """What Slurm says of the master's batch job. Slurm serves many: an answer, or that there is none, holds for `LOOK_SECONDS`."""

    def __init__(self, job: JobDir) -> None:
        self._job = job
        self._asked = -math.inf
        self._answer: tuple[Stage, str] | UnreachableError = Stage.OVER, ""

    def ask(self) -> tuple[Stage, str]:
        """Where it is, and why it waits.

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


def _state(job: JobDir) -> tuple[Stage, str]:
    try:
        number = job.batch.read_text()
    except FileNotFoundError:  # somebody has removed the job's folder
        return Stage.OVER, ""
    words = ("--noheader", "--states=all", f"--jobs={number}", "--format=%T|%r")
    try:
        state, _, why = run("squeue", *words, within=WAIT_SECONDS).strip().partition("|")
    except UnknownJobError:
        return Stage.OVER, ""
    except UserError as error:  # nothing is wrong with the request: whatever it says will pass
        raise UnreachableError(str(error)) from None
    return stage_of(state), why
