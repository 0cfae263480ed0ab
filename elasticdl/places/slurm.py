"""Slurm as a batch system of places.

Slurm sends the agent SIGTERM when it preempts the job, and `NOTICE_SECONDS` before the job's time is over. It has no gangs of jobs,
and can only be told which nodes are never to be used: `Places.want` can't have the fewest at once, nor avoid a node.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from elasticdl.common.environment import NODE, PLACE
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.common.reason import flat
from elasticdl.common.startup import RUN_MODULE
from elasticdl.master.state.events import ExitCause
from elasticdl.places.base import Place, PlaceState
from elasticdl.places.batch_system import BatchJob

NOTICE_SECONDS = 120
AGENT = f"{PLACE}=$SLURM_JOB_ID {NODE}=$SLURMD_NODENAME exec {' '.join(RUN_MODULE)} elasticdl.places.agent"
_STATES = {  # all others are the end of a job
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"), PlaceState.WAITING),
    **dict.fromkeys(("COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"), PlaceState.ENDING),
    "RUNNING": PlaceState.READY,
}
_CAUSES = {
    **dict.fromkeys(("PREEMPTED", "TIMEOUT", "DEADLINE"), ExitCause.PREEMPTED),  # its node is others' now
    **dict.fromkeys(("NODE_FAIL", "BOOT_FAIL"), ExitCause.NODE_LOST),
    "CANCELLED": ExitCause.DELETED,
    "OUT_OF_MEMORY": ExitCause.OUT_OF_MEMORY,
}
# What passes by itself: the controller is away or busy, or takes no more jobs of this user at present.
_PASSES = re.compile(r"contact|timed out|temporarily|connection|limit|busy|try again", re.IGNORECASE)
# Runs a program with an environment: its exit code, and what it printed on stdout and on stderr.
Run: TypeAlias = Callable[[Sequence[str], Mapping[str, str]], Awaitable[tuple[int, str, str]]]


async def run_program(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str, str]:
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(*argv, env=environment, stdout=pipe, stderr=pipe)
    except OSError as error:
        return 127, "", f"can't be run: {error.strerror}"
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Slurm:
    """``name``: of this job's batch jobs alone. ``environment``: of the agents, beside that of Slurm's commands. ``slurm_args``: the
    user's own options of `sbatch`, which say what a place is. ``folder``: one that all nodes see, for what agents print."""

    name: str
    environment: Mapping[str, str]
    folder: Path
    slurm_args: Sequence[str] = ()
    gpus: int = 0  # of a place
    run: Run = run_program

    async def submit(self) -> str:
        own = ("--parsable", f"--job-name={self.name}", f"--output={self.folder}/place-%j.log", "--no-requeue")
        notice = f"--signal=B:TERM@{NOTICE_SECONDS}"
        try:
            printed = await self._call("sbatch", *own, notice, *self.slurm_args, f"--wrap={AGENT}")
        except UnreachableError as error:
            if _PASSES.search(str(error)):
                raise
            raise UserError(f"Slurm takes no job like this: {error}") from None
        return printed.partition(";")[0].strip()

    async def listed(self) -> Mapping[str, BatchJob]:
        what = ("--me", f"--name={self.name}", "--states=all", "--noheader", "--format=%i|%T|%N|%r")
        rows = [line.strip().split("|", 3) for line in (await self._call("squeue", *what)).splitlines()]
        return {row[0]: self._job(*row) for row in sorted(rows, key=lambda row: int(row[0]))}

    async def cancel(self, job: str, grace: float | None) -> None:
        await self._call("scancel", *(("--signal=KILL", "--full") if grace == 0 else ()), job)

    async def _call(self, *argv: str) -> str:
        code, out, err = await self.run(argv, self.environment)
        if code:
            raise UnreachableError(f"{argv[0]}: {flat(err) or f'exit code {code}'}")
        return out

    def _job(self, job: str, state: str, node: str, reason: str) -> BatchJob:
        told = f"Slurm: {state.lower()}" + (f" ({reason})" if reason not in ("", "None") else "")
        place = Place(job, node, self.gpus, _STATES.get(state, PlaceState.LOST), told)
        return BatchJob(place, _CAUSES.get(state, ExitCause.KILLED))
