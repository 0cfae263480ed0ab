"""Places of a Slurm cluster: each is a batch job of its own that runs an agent (`elasticdl.places.agent`).

An allocation of Slurm does not grow, so an elastic job has many: a pending one costs nothing, and one that a job of higher priority
takes away is one place lost. Slurm's own way to run a job again (``--requeue``) is off: the master asks for another place.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from elasticdl.common.environment import NODE, PLACE
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.master.state.events import ExitCause
from elasticdl.places.base import Place, PlaceReport, PlaceState
from elasticdl.places.polled import End, PolledPlaces

POLL_SECONDS = 2.0
ANSWER_SECONDS = 60.0
# So long before its time limit a place is told to end, as one is that is preempted.
NOTICE_SECONDS = 120
_FIELDS = 5  # of a line of `squeue`
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_ENDING = ("COMPLETING", "STOPPED", "SUSPENDED", "SIGNALING", "STAGE_OUT")
_ENDS = {
    "PREEMPTED": End(ExitCause.PREEMPTED, -9, "preempted by a job of higher priority"),
    "TIMEOUT": End(ExitCause.EVICTED, -9, "its time limit is over"),
    "DEADLINE": End(ExitCause.EVICTED, -9, "its deadline is over"),
    "NODE_FAIL": End(ExitCause.NODE_LOST, -9, "its node has failed"),
    "BOOT_FAIL": End(ExitCause.NODE_LOST, -9, "its node could not be started"),
    "OUT_OF_MEMORY": End(ExitCause.OUT_OF_MEMORY, -9, "it took more memory than it may"),
    "CANCELLED": End(ExitCause.DELETED, -9, "somebody has cancelled it"),
    "COMPLETED": End(ExitCause.CLEAN, 0, "exit code 0"),
    "FAILED": End(ExitCause.CRASHED, 1, "its agent has failed"),
}
# What only the batch job knows: the place's id, its node, and how many processors it has.
_VARIABLES = f"export {PLACE}=$SLURM_JOB_ID {NODE}=$SLURMD_NODENAME OMP_NUM_THREADS=${{OMP_NUM_THREADS:-${{SLURM_CPUS_ON_NODE:-1}}}}"
_NOT_SEEN = "Slurm has not looked at it yet"
# Slurm's controller is away or busy, or takes no more jobs of this user at present; whatever else it says is said of the request.
_AWAY = re.compile(r"timed out|unable to contact|connect|try again|temporarily|busy|limit", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SlurmProvider:
    """A place's id is the number of its batch job.

    Args:
        name: Of all its batch jobs; no other job of this user has it.
        command: The agent's.
        output: A file for what the agent and its workers print, in which Slurm replaces ``%j`` by the batch job's number.
        arguments: The user's for ``sbatch`` (``--slurm_args``); they come last, so they win.
    """

    name: str
    command: Sequence[str]
    output: str
    arguments: Sequence[str] = ()

    async def list(self) -> Mapping[str, Place | End]:
        query = [f"--name={self.name}", "--states=all", "--format=%i|%T|%N|%b|%r"]
        try:
            lines = (await _run("squeue", "--noheader", "--me", *query)).splitlines()
        except UserError as error:  # nothing is wrong with the request: whatever it says will pass
            raise UnreachableError(str(error)) from None
        return {line.partition("|")[0]: _read(line) for line in lines if line.count("|") >= _FIELDS - 1}

    async def ask(self, avoid: AbstractSet[str]) -> str:
        words = ["--parsable", "--no-requeue", f"--job-name={self.name}", f"--output={self.output}", "--ntasks=1"]
        words += [f"--signal=B:TERM@{NOTICE_SECONDS}", *([f"--exclude={','.join(sorted(avoid))}"] if avoid else [])]
        said = await _run("sbatch", *words, *self.arguments, f"--wrap={_VARIABLES}; exec {shlex.join(self.command)}")
        return said.strip().partition(";")[0]

    async def end(self, place_id: str, *, at_once: bool) -> None:
        # A signal is for what runs: of a job that waits nothing would come of it.
        await _run("scancel", *(["--signal=KILL", "--full", "--state=RUNNING"] if at_once else []), place_id)
        if at_once:
            await _run("scancel", place_id)


def workers_name(job: str, master: str) -> str:
    """Of all batch jobs with workers of one job; ``master``: the number of its master's, as another job may have the same name elsewhere."""
    return f"elasticdl-{job}-{master}-worker"


def refusal(said: str) -> str:
    """What one of Slurm's programs prints, in one line."""
    return "; ".join(re.sub(r"^\w+: (error: )?", "", line) for line in said.splitlines() if line.strip())


def slurm_places(provider: SlurmProvider, report: PlaceReport) -> PolledPlaces:
    return PolledPlaces(provider, report, POLL_SECONDS)


def _read(line: str) -> Place | End:
    """A line of ``squeue``."""
    number, state, node, _, reason = line.split("|", _FIELDS - 1)
    place = Place(number, node)
    if state in _WAITING:
        why = reason.strip("()")
        return replace(place, reason=f"Slurm has no place for it yet: {why}" if why != "None" else _NOT_SEEN)
    if state in _ENDING:
        return replace(place, state=PlaceState.ENDING, reason=f"Slurm: {state.lower()}")
    if state == "RUNNING":
        return replace(place, state=PlaceState.READY)
    return _ENDS.get(state, End(ExitCause.KILLED, -9, f"Slurm calls it {state}"))


async def _run(*words: str) -> str:
    """What one of Slurm's programs prints."""
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
    except OSError as error:
        raise UserError(f"can't run {words[0]}: {error.strerror}; is this a machine of a Slurm cluster?") from None
    try:
        out, said = await asyncio.wait_for(process.communicate(), ANSWER_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise UnreachableError(f"{words[0]} has not answered in {ANSWER_SECONDS:g} s") from None
    if process.returncode:
        why = f"{words[0]}: {refusal(said.decode(errors='replace'))}"
        raise UnreachableError(why) if _AWAY.search(why) else UserError(f"Slurm refuses {why}")
    return out.decode(errors="replace")
