"""Places of a Slurm cluster: each is a batch job of its own that runs an agent (`elasticdl.places.agent`).

An allocation of Slurm does not grow, so an elastic job has many: a pending one costs nothing, and one that a job of higher priority
takes away is one place lost. Slurm's own way to run a job again (``--requeue``) is off: the master asks for another place.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from elasticdl.common.credentials import NODE, PLACE
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.master.core.events import ExitCause
from elasticdl.places.base import Place, PlaceLost, PlaceState

# Slurm's programs: how they are called, and what their answers mean. Masters wait with `ask`, commands with `run`.


ANSWER_SECONDS = 60.0
# So long before its time limit a batch job is told to end, as one is that is preempted.
NOTICE_SECONDS = 120
# For an answer to a batch job that was told to end, and will be killed.
TOLD_SECONDS = 10.0
# Slurm's controller is away or busy, or takes no more jobs of this user at present. Whatever else it says is said of the request.
_AWAY = re.compile(r"timed out|unable to contact|connect|zero bytes|try again|temporarily|busy|policy", re.IGNORECASE)


class UnknownJobError(UserError):
    """Slurm does not know this batch job, or not any more."""


_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_ENDING = ("COMPLETING", "SIGNALING", "STAGE_OUT", "SUSPENDED", "STOPPED")
_STATES = {
    **dict.fromkeys(_WAITING, PlaceState.WAITING),
    "RUNNING": PlaceState.READY,
    **dict.fromkeys(_ENDING, PlaceState.ENDING),
}


def state_of(state: str) -> PlaceState:
    """Of a batch job, where it is in its life, by Slurm's own word; an empty one is that of a job that Slurm has forgotten."""
    return _STATES.get(state, PlaceState.LOST)


def run(*words: str, within: float = ANSWER_SECONDS) -> str:
    """What one of Slurm's programs prints.

    Raises:
        UserError: Slurm refuses the request, or is not on this machine.
        UnreachableError: Slurm does not answer, or can't do it now.
    """
    program = words[0]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=within, check=False)
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"Slurm does not answer: {program} took more than {within:g} s") from None
    except OSError as error:
        raise UserError(f"can't run {program}: {error.strerror}; is this a machine of a Slurm cluster?") from None
    if done.returncode == 0:
        return done.stdout.decode(errors="replace")
    lines = done.stderr.decode(errors="replace").splitlines()
    why = "; ".join(re.sub(r"^\w+: (error: )?", "", line) for line in lines if line.strip())
    if "nvalid job id" in why:
        raise UnknownJobError(f"Slurm refuses {program}: {why}")
    if _AWAY.search(why):
        raise UnreachableError(f"Slurm does not answer: {program}: {why}")
    raise UserError(f"Slurm refuses {program}: {why}")


async def ask(*words: str, within: float = ANSWER_SECONDS) -> str:
    """As `run`, on an event loop."""
    return await asyncio.to_thread(run, *words, within=within)


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


_FIELDS = 4  # of a line of `squeue`
_ENDS = {
    "PREEMPTED": (ExitCause.PREEMPTED, -9, "preempted by a job of higher priority"),
    "TIMEOUT": (ExitCause.EVICTED, -9, "its time limit is over"),
    "DEADLINE": (ExitCause.EVICTED, -9, "its deadline is over"),
    "NODE_FAIL": (ExitCause.NODE_LOST, -9, "its node has failed"),
    "BOOT_FAIL": (ExitCause.NODE_LOST, -9, "its node could not be started"),
    "OUT_OF_MEMORY": (ExitCause.OUT_OF_MEMORY, -9, "it took more memory than it may"),
    "CANCELLED": (ExitCause.DELETED, -9, "somebody has cancelled it"),
    "COMPLETED": (ExitCause.CLEAN, 0, "exit code 0"),
    "FAILED": (ExitCause.CRASHED, 1, "its agent has failed"),
}
# What only the batch job knows: the place's id and its node.
_VARIABLES = f"export {PLACE}=$SLURM_JOB_ID {NODE}=$SLURMD_NODENAME"
_NOT_SEEN = "Slurm has not looked at it yet"


@dataclass(frozen=True, slots=True)
class SlurmProvider:
    """A place's id is the number of its batch job.

    Args:
        name: Of all its batch jobs; no other job of this user has it.
        command: The agent's.
        output: A file for what the agent and its workers print, in which Slurm replaces ``%j`` by the batch job's number.
        arguments: The user's for ``sbatch`` (``--slurm_args``); they come last, so they win.
        processes: Of a worker, which share the processors.
    """

    name: str
    command: Sequence[str]
    output: str
    arguments: Sequence[str] = ()
    processes: int = 1

    async def list(self) -> Mapping[str, Place | PlaceLost]:
        query = [f"--name={self.name}", "--states=all", "--format=%i|%T|%N|%r"]
        try:
            lines = (await ask("squeue", "--noheader", "--me", *query)).splitlines()
        except UserError as error:  # nothing is wrong with the request: whatever it says will pass
            raise UnreachableError(str(error)) from None
        return {line.partition("|")[0]: _read(line) for line in lines if line.count("|") >= _FIELDS - 1}

    async def ask(self, avoid: AbstractSet[str]) -> str:
        elsewhere = [f"--exclude={','.join(sorted(avoid))}"] if avoid else []
        each = f"$(((${{SLURM_CPUS_ON_NODE:-1}} + {self.processes - 1}) / {self.processes}))"
        script = f"{_VARIABLES} OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{each}}}; exec {shlex.join(self.command)}"
        words = sbatch(self.name, self.output, ["--no-requeue", *elsewhere, *self.arguments], script)
        return number_of(await ask(*words))

    async def end(self, place_ids: Sequence[str], *, at_once: bool) -> None:
        try:
            if at_once:  # a signal is for what runs: of a job that waits nothing would come of it
                await ask("scancel", "--quiet", "--signal=KILL", "--full", "--state=RUNNING", *place_ids)
            await ask("scancel", "--quiet", *place_ids)
        except UserError as error:  # whatever it says will pass
            raise UnreachableError(str(error)) from None


def _read(line: str) -> Place | PlaceLost:
    """A line of ``squeue``."""
    number, state, node, reason = line.split("|", _FIELDS - 1)
    place = Place(number, node, state_of(state))
    match place.state:
        case PlaceState.WAITING:
            why = reason.strip("()")
            return replace(place, reason=f"Slurm has no place for it yet: {why}" if why != "None" else _NOT_SEEN)
        case PlaceState.ENDING:
            return replace(place, reason=f"Slurm: {state.lower()}")
        case PlaceState.LOST:
            return PlaceLost(number, *_ENDS.get(state, (ExitCause.KILLED, -9, f"Slurm calls it {state}")))
    return place
