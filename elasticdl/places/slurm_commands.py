"""Slurm's programs: how they are called, and what their answers mean. Masters wait with `ask`, commands with `run`."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Sequence
from enum import Enum

from elasticdl.common.errors import UnreachableError, UserError

ANSWER_SECONDS = 60.0
# So long before its time limit a batch job is told to end, as one is that is preempted.
NOTICE_SECONDS = 120
# For an answer to a batch job that was told to end, and will be killed.
TOLD_SECONDS = 10.0
# Of sbatch: minutes, minutes:seconds or hours:minutes:seconds; with days it is long.
_TIME = re.compile(r"(?:^|\s)(?:--time[= ]|-t ?)(\d+(?::\d+){0,2})(?=\s|$)")
_UNITS = 3
# Slurm's controller is away or busy, or takes no more jobs of this user at present. Whatever else it says is said of the request.
_AWAY = re.compile(r"timed out|unable to contact|connect|zero bytes|try again|temporarily|busy|policy", re.IGNORECASE)


class UnknownJobError(UserError):
    """Slurm does not know this batch job, or not any more."""


class Stage(Enum):
    """Where a batch job is in its life."""

    WAITING = "waiting"  # it may run, perhaps once more
    RUNNING = "running"
    HALTED = "halted"  # it has its node, and may not run at present
    ENDING = "ending"
    OVER = "over"


_STAGES = {
    **dict.fromkeys(
        ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"), Stage.WAITING
    ),
    "RUNNING": Stage.RUNNING,
    **dict.fromkeys(("SUSPENDED", "STOPPED"), Stage.HALTED),
    **dict.fromkeys(("COMPLETING", "SIGNALING", "STAGE_OUT"), Stage.ENDING),
}


def stage_of(state: str) -> Stage:
    """Of a batch job in this state of Slurm's; an empty state is that of a job that Slurm has forgotten."""
    return _STAGES.get(state, Stage.OVER)


def run(*words: str, within: float = ANSWER_SECONDS) -> str:
    """What one of Slurm's programs prints.

    Raises:
        UserError: Slurm refuses the request, or is not on this machine.
        UnreachableError: Slurm does not answer, or can't do it now.
    """
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=within, check=False)
    except OSError as error:
        raise _absent(words[0], error) from None
    except subprocess.TimeoutExpired:
        raise _silent(words[0], within) from None
    return _answer(words[0], done.returncode, done.stdout, done.stderr)


async def ask(*words: str, within: float = ANSWER_SECONDS) -> str:
    """As `run`, on an event loop; a program that nobody waits for any more is killed."""
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
    except OSError as error:
        raise _absent(words[0], error) from None
    try:
        out, said = await asyncio.wait_for(process.communicate(), within)
    except TimeoutError:
        raise _silent(words[0], within) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return _answer(words[0], process.returncode or 0, out, said)


def sbatch(name: str, output: str, arguments: Sequence[str], script: str) -> list[str]:
    """The call that submits a batch job, which is warned before its time limit; `number_of` reads the answer.

    Args:
        name: Of the batch job.
        output: A file for what it prints, in which Slurm replaces ``%j`` by the batch job's number.
        arguments: More of them; they come last, so they win.
        script: What a shell runs in the batch job.
    """
    about = [f"--job-name={name}", f"--output={output}", "--ntasks=1", f"--signal=B:TERM@{NOTICE_SECONDS}"]
    return ["sbatch", "--parsable", *about, *arguments, f"--wrap={script}"]


def require_time(arguments: str) -> None:
    """
    Raises:
        UserError: with this time limit a batch job is told to end as soon as it begins.
    """
    for limit in _TIME.findall(arguments):
        parts = limit.split(":")
        hours, minutes, seconds = map(int, parts if len(parts) == _UNITS else ["0", *parts, "0"][:_UNITS])
        if 0 < (hours * 60 + minutes) * 60 + seconds <= NOTICE_SECONDS:  # 0 is no time limit
            raise UserError(
                f"the time limit {limit} is too short, as a batch job is told to end {NOTICE_SECONDS} s before it"
            )


def number_of(answer: str) -> str:
    """Of the batch job that was submitted."""
    return answer.strip().partition(";")[0]


def workers_name(job: str, master: str) -> str:
    """Of all batch jobs with workers of one job; ``master``: the number of its master's, as another job may have the same name elsewhere."""
    return f"elasticdl-{job}-{master}-worker"


async def runs_again(number: str, restarts: int) -> bool:
    """Of a batch job that was told to end: whether Slurm starts it once more. If its time limit is near, that is asked for.

    Args:
        restarts: How often it had been started again when it began.
    """
    try:
        told = await ask("scontrol", "--oneliner", "show", "job", number, within=TOLD_SECONDS)
        if not re.search(r"JobState=(COMPLETING|CANCELLED)", told):
            await ask("scontrol", "requeue", number, within=TOLD_SECONDS)
            return True
    except UserError:
        return False
    except UnreachableError:  # the next master would be none too many
        return True
    counted = re.search(r"Restarts=(\d+)", told)
    return counted is None or int(counted[1]) > restarts


def _absent(program: str, error: OSError) -> UserError:
    return UserError(f"can't run {program}: {error.strerror}; is this a machine of a Slurm cluster?")


def _silent(program: str, seconds: float) -> UnreachableError:
    return UnreachableError(f"Slurm does not answer: {program} took more than {seconds:g} s")


def _answer(program: str, code: int, out: bytes, said: bytes) -> str:
    if code == 0:
        return out.decode(errors="replace")
    lines = said.decode(errors="replace").splitlines()
    why = "; ".join(re.sub(r"^\w+: (error: )?", "", line) for line in lines if line.strip())
    if "nvalid job id" in why:
        raise UnknownJobError(f"Slurm refuses {program}: {why}")
    if _AWAY.search(why):
        raise UnreachableError(f"Slurm does not answer: {program}: {why}")
    raise UserError(f"Slurm refuses {program}: {why}")
