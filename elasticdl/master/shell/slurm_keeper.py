"""`python -m elasticdl.master.shell.slurm_keeper --job_dir DIR`: the batch job of a master on a Slurm cluster. It keeps a master running.

The keeper is a process apart from the master, as the kernel kills the largest process when memory is short. It imports next to nothing.

| how the master ends                                  | what follows                                                     |
| ---------------------------------------------------- | ---------------------------------------------------------------- |
| it has written how the job ended, or left it (143)   | the batch job ends with the same exit code                       |
| it crashed, was killed, or could not begin (75)      | the next one starts after a delay that grows                     |
| the same `MOST_CRASHES` times in a row               | the job has failed: its status says why, the workers are ended   |
| it ended without a word, as with the user's mistake  | the same                                                         |
| somehow, and Slurm has started the next one elsewhere | this start of the batch job ends (143); the job goes on there   |

A master that ran for `SOON_SECONDS` was able to work: the next crash is counted as the first.

| why Slurm ends the batch job (SIGTERM)               | what follows                                                     |
| ---------------------------------------------------- | ---------------------------------------------------------------- |
| a job of higher priority has its place, or `requeue` | the master is to leave (`LEAVE`); Slurm starts the next one      |
| its time limit is near (``--signal``)                | the same, as it is put into the queue again                      |
| it was cancelled (`scancel`)                         | the master is to stop the job (`STOP`)                           |
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticdl.common.backoff import Backoff
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.common.front_ends import RUN_MODULE
from elasticdl.common.reason import last_line
from elasticdl.job.jobdir import JobDir, tail
from elasticdl.places.slurm import ask, runs_again, workers_name

MASTER_MODULE = "elasticdl.master.shell.slurm_master"
# What a master is told. Slurm itself sends SIGTERM, and to all processes of the batch job if it likes.
LEAVE, STOP = signal.SIGUSR1, signal.SIGINT
EXIT_LEFT = 128 + signal.SIGTERM
_PHASES = {0: "succeeded", 1: "failed", 130: "stopped"}
# Of a master that broke, or could not begin for now (EX_TEMPFAIL of sysexits.h).
EXIT_AGAIN = 75
MOST_CRASHES = 8
SOON_SECONDS = 600.0
LOG_BYTES = 4096
_MEMORY = ": if memory was short, ask for more, as by --slurm_master_args=--mem=4G"
_log = logging.getLogger("elasticdl.master.shell.slurm_keeper")


def restarts() -> int:
    """How often Slurm has started this batch job again. The job's folder has the number of the last start in which there was a master."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def is_replaced(job: JobDir, restarts: int) -> bool:
    """Whether Slurm has started the batch job again elsewhere, as this node was cut off, and a master has begun there."""
    try:
        return int(job.holder.read_text()) > restarts
    except (OSError, ValueError):
        return False


@dataclass(frozen=True, slots=True)
class Keeper:
    """``command``: starts a master. ``number``: of the batch job. ``backoff``: before the next master."""

    job: JobDir
    command: Sequence[str]
    number: str
    restarts: int
    backoff: Backoff

    async def run(self) -> int:
        """Until no other master is to be started here; returns the exit code of the batch job."""
        told = asyncio.Event()  # the batch job is to end
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, told.set)
        again = asyncio.ensure_future(self._is_to_run_again(told))
        while not is_replaced(self.job, self.restarts):
            began = time.monotonic()
            code = await self._run_master(again)
            broke = code < 0 or code == EXIT_AGAIN
            if code == EXIT_LEFT or is_replaced(self.job, self.restarts):
                break
            if self.job.status.exists():
                if broke:  # while it closed its places
                    await self._end_workers()
                return code if code >= 0 else 128 - code
            if not broke:
                return await self._give_up(f"its master ended with exit code {code}{self._last_line()}", code)
            with contextlib.suppress(OSError):  # the folder may be away for a while, too
                self.job.master.unlink()
            if time.monotonic() - began > SOON_SECONDS:
                self.backoff.reset()
            delay, crashes = self.backoff.delay(), self.backoff.failures
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else "broke"
            if crashes >= MOST_CRASHES:
                hint = _MEMORY if code == -signal.SIGKILL else self._last_line()
                return await self._give_up(f"its master {how}, the {crashes}th in a row{hint}")
            _log.warning("the master %s: the next one starts in %.1f s (%d of %d)", how, delay, crashes, MOST_CRASHES)
            await asyncio.wait({again}, timeout=delay)
            if again.done():  # and there is no master to act upon it
                if again.result():
                    break
                return await self._give_up("the master's batch job was cancelled while no master ran", 130)
        return EXIT_LEFT

    async def _is_to_run_again(self, told: asyncio.Event) -> bool:
        """By Slurm, which is asked once the batch job is to end."""
        await told.wait()
        return await runs_again(self.number, self.restarts)

    async def _run_master(self, again: asyncio.Future[bool]) -> int:
        try:
            master = await asyncio.create_subprocess_exec(*self.command)
        except OSError as error:  # as of a machine that is short of memory
            _log.error("can't start a master: %s", error.strerror)
            return EXIT_AGAIN
        ended = asyncio.ensure_future(master.wait())
        either: set[asyncio.Future[Any]] = {ended, again}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            with contextlib.suppress(ProcessLookupError):
                # Not send_signal(): it reaps a master that has just died, and nobody learns how.
                os.kill(master.pid, LEAVE if again.result() else STOP)
        return await ended

    def _last_line(self) -> str:
        """Of the master's log, in which all that is said here is as well."""
        said = last_line(tail(self.job.master_log, LOG_BYTES))
        return f": {said.removeprefix('elasticdl: ')}" if said else ""

    async def _give_up(self, why: str, code: int = 1) -> int:
        """The job is over: say so first, then end what is left of it. ``code``: the exit code of a master that ended so."""
        phase = _PHASES.get(code, "failed")
        _log.error("job %s: %s", phase, why)
        if not self.job.status.exists():  # as whoever has stopped the job may have written
            try:
                await asyncio.to_thread(_write_end, self.job, phase, why)
            except OSError as error:
                _log.error("can't write that to %s: %s", self.job.status, error.strerror)
        await self._end_workers()
        return code if code in _PHASES else 1

    async def _end_workers(self) -> None:
        try:
            await ask("scancel", "--quiet", "--me", f"--name={workers_name(self.job.name, self.number)}")
        except (UserError, UnreachableError) as error:
            _log.error("can't end the workers: %s", error)


def _write_end(job: JobDir, phase: str, why: str) -> None:
    """
    Raises:
        OSError: it can't be written.
    """
    from elasticdl.job.facts import Facts  # large, and seldom needed, as are the others
    from elasticdl.job.journal import dump_entry, number_of
    from elasticdl.proto import elasticdl_pb2 as pb

    with job.journal.open("ab+") as journal:
        journal.seek(0)
        found = Facts().read(line.decode(errors="replace") for line in journal)
        journal.seek(0)
        number = 1 + max((number_of(line.decode(errors="replace")) for line in journal), default=0)
        ended = {"number": number, "event": "job_finished", "phase": phase, "reason": why, "steps": found.step}
        # The master may have been killed within a line.
        journal.write(f"\n{dump_entry({'time': time.time(), **ended})}\n".encode())
    status = pb.JobStatus(job_name=job.name, phase=phase, reason=why, step=found.step, time_left=-1)
    status.elapsed = found.until - found.began
    job.write_status(status)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m elasticdl.master.shell.slurm_keeper", description=__doc__)
    parser.add_argument("--job_dir", required=True, type=Path, help="the job's folder, which holds job.json and tls")
    job = JobDir(parser.parse_args(argv).job_dir.absolute())
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {job.name} %(levelname)s %(name)s: %(message)s")
    command = [*RUN_MODULE, MASTER_MODULE, "--job_dir", str(job.path)]
    backoff = Backoff(random.Random(), first=1.0, longest=60.0)

    return asyncio.run(Keeper(job, command, os.environ["SLURM_JOB_ID"], restarts(), backoff).run())


if __name__ == "__main__":
    sys.exit(main())
