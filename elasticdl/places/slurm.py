"""Places of a Slurm cluster: each is a batch job of its own that runs an agent (`elasticdl.places.agent`).

An allocation of Slurm does not grow, so an elastic job has many: a pending one costs nothing, and one that a job of higher priority
takes away is one place lost. Slurm's own way to run a job again (``--requeue``) is off: the master asks for another place.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from elasticdl.common.environment import NODE, PLACE
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.master.state.events import ExitCause
from elasticdl.places.base import Place, PlaceReport, PlaceState
from elasticdl.places.polled import End, PolledPlaces
from elasticdl.places.slurm_commands import Stage, ask, number_of, sbatch, stage_of

POLL_SECONDS = 2.0
_FIELDS = 4  # of a line of `squeue`
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
        query = [f"--name={self.name}", "--states=all", "--format=%i|%T|%N|%r"]
        try:
            lines = (await ask("squeue", "--noheader", "--me", *query)).splitlines()
        except UserError as error:  # nothing is wrong with the request: whatever it says will pass
            raise UnreachableError(str(error)) from None
        return {line.partition("|")[0]: _read(line) for line in lines if line.count("|") >= _FIELDS - 1}

    async def ask(self, avoid: AbstractSet[str]) -> str:
        elsewhere = [f"--exclude={','.join(sorted(avoid))}"] if avoid else []
        script = f"{_VARIABLES}; exec {shlex.join(self.command)}"
        words = sbatch(self.name, self.output, ["--no-requeue", *elsewhere, *self.arguments], script)
        return number_of(await ask(*words))

    async def end(self, place_id: str, *, at_once: bool) -> None:
        try:
            if at_once:  # a signal is for what runs: of a job that waits nothing would come of it
                await ask("scancel", "--signal=KILL", "--full", "--state=RUNNING", place_id)
            await ask("scancel", place_id)
        except UserError as error:  # it may have ended by itself: the list will say so
            raise UnreachableError(str(error)) from None


def slurm_places(provider: SlurmProvider, report: PlaceReport) -> PolledPlaces:
    return PolledPlaces(provider, report, POLL_SECONDS)


def _read(line: str) -> Place | End:
    """A line of ``squeue``."""
    number, state, node, reason = line.split("|", _FIELDS - 1)
    place = Place(number, node)
    match stage_of(state):
        case Stage.WAITING:
            why = reason.strip("()")
            return replace(place, reason=f"Slurm has no place for it yet: {why}" if why != "None" else _NOT_SEEN)
        case Stage.RUNNING:
            return replace(place, state=PlaceState.READY)
        case Stage.OVER:
            return _ENDS.get(state, End(ExitCause.KILLED, -9, f"Slurm calls it {state}"))
        case _:
            return replace(place, state=PlaceState.ENDING, reason=f"Slurm: {state.lower()}")
