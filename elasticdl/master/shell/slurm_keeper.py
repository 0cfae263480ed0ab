"""`python -m elasticdl.master.shell.slurm_keeper --job_dir DIR`: the batch job of a master on a Slurm cluster. It keeps a master running.

The keeper is a process apart from the master, as the kernel kills the largest process when memory is short. It imports next to nothing.

| how the master ends                                  | what follows                                                     |
| ---------------------------------------------------- | ---------------------------------------------------------------- |
| it has written how the job ended, or left it (143)   | the batch job ends with the same exit code                       |
| it crashed, was killed, or could not begin (75)      | the next one starts after a delay that grows                     |
| the same `MOST_CRASHES` times in a row               | the job has failed: its status says why, the workers are ended   |
| it ended without a word, as with the user's mistake  | the same                                                         |
| somehow, and Slurm has started the next one elsewhere | this start of the batch job ends (143); the job goes on there   |

A master that ran for `SOON_SECONDS` was able to work: the next crash is counted as the first. SIGTERM and SIGINT are passed on to the master.
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
import uuid
from collections.abc import Sequence
from pathlib import Path

from elasticdl.common.backoff import Backoff
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.common.front_ends import RUN_MODULE
from elasticdl.job.jobdir import JobDir, write_aside
from elasticdl.places.slurm import ask, runs_again, workers_name

MASTER_MODULE = "elasticdl.master.shell.slurm_master"
EXIT_LEFT = 128 + signal.SIGTERM
_PHASES = {0: "succeeded", 1: "failed", 130: "stopped"}
_EXIT_CODES = {phase: code for code, phase in _PHASES.items()}
# Of a master that broke, or could not begin for now (EX_TEMPFAIL of sysexits.h).
EXIT_AGAIN = 75
MOST_CRASHES = 8
SOON_SECONDS = 600.0
LOG_BYTES = 4096
_MEMORY = ": if memory was short, ask for more, as by --slurm_master_args=--mem=4G"
_log = logging.getLogger("elasticdl.master.shell.slurm_keeper")


def new_mark(restarts: int) -> str:
    """Of a master (`JobDir.holder`). ``restarts``: how often Slurm has started its batch job again."""
    return f"{restarts}-{uuid.uuid4().hex}"


class Keeper:
    """``command``: starts a master. ``backoff``: before the next one."""

    def __init__(self, job: JobDir, command: Sequence[str], number: str, restarts: int, backoff: Backoff) -> None:
        self._job = job
        self._command = command
        self._number, self._restarts = number, restarts
        self._backoff = backoff
        self._told = asyncio.Event()  # the batch job is to end
        self._master: asyncio.subprocess.Process | None = None

    async def run(self) -> int:
        """Until no other master is to be started here; returns the exit code of the batch job."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._tell)
        while not self._is_replaced():
            began = time.monotonic()
            code = await self._run_master()
            if code == EXIT_LEFT or self._is_replaced():
                return EXIT_LEFT
            if self._job.status.exists():
                if code < 0 or code == EXIT_AGAIN:  # while it closed its places
                    await self._end_workers()
                return code if code >= 0 else 128 - code
            if code >= 0 and code != EXIT_AGAIN:
                phase = _PHASES.get(code, "failed")
                return await self._give_up(f"its master ended with exit code {code}{self._last_line()}", phase)
            if not self._told.is_set():
                with contextlib.suppress(OSError):  # the folder may be away for a while, too
                    self._job.master.unlink()
                if time.monotonic() - began > SOON_SECONDS:
                    self._backoff.reset()
                delay, crashes = self._backoff.delay(), self._backoff.failures
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else "broke"
                if crashes >= MOST_CRASHES:
                    hint = _MEMORY if code == -signal.SIGKILL else self._last_line()
                    return await self._give_up(f"its master {how}, the {crashes}th in a row{hint}")
                _log.warning(
                    "the master %s: the next one starts in %.1f s (%d of %d)", how, delay, crashes, MOST_CRASHES
                )
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._told.wait(), delay)
            if self._told.is_set():  # and there is no master to act upon it
                if await runs_again(self._number, self._restarts):
                    return EXIT_LEFT
                return await self._give_up("the master's batch job was cancelled while no master ran", phase="stopped")
        return EXIT_LEFT

    def _is_replaced(self) -> bool:
        """Whether Slurm has started the batch job again elsewhere, as this node was cut off, and a master has begun there."""
        try:
            restarts = self._job.holder.read_text().partition("-")[0]
        except OSError:
            return False
        return restarts.isdecimal() and int(restarts) > self._restarts

    def _tell(self) -> None:
        self._told.set()
        if self._master is not None and self._master.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # Not terminate(): it reaps a master that has just died, and nobody learns how.
                os.kill(self._master.pid, signal.SIGTERM)

    async def _run_master(self) -> int:
        try:
            self._master = await asyncio.create_subprocess_exec(*self._command)
        except OSError as error:  # as of a machine that is short of memory
            _log.error("can't start a master: %s", error.strerror)
            return EXIT_AGAIN
        if self._told.is_set():  # while it was started
            self._tell()
        code = await self._master.wait()
        self._master = None
        return code

    def _last_line(self) -> str:
        """Of the master's log, in which all that is said here is as well."""
        try:
            with self._job.master_log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_BYTES))
                lines = log.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        said = [line for line in lines if line.strip()]
        return f": {said[-1].removeprefix('elasticdl: ')}" if said else ""

    async def _give_up(self, why: str, phase: str = "failed") -> int:
        """The job is over: say so first, then end what is left of it."""
        _log.error("job %s: %s", phase, why)
        if not self._job.status.exists():  # as whoever has stopped the job may have written
            try:
                await asyncio.to_thread(_write_end, self._job, phase, why)
            except OSError as error:
                _log.error("can't write that to %s: %s", self._job.status, error.strerror)
        await self._end_workers()
        return _EXIT_CODES[phase]

    async def _end_workers(self) -> None:
        try:
            await ask("scancel", "--quiet", "--me", f"--name={workers_name(self._job.name, self._number)}")
        except (UserError, UnreachableError) as error:
            _log.error("can't end the workers: %s", error)


def _write_end(job: JobDir, phase: str, why: str) -> None:
    """
    Raises:
        OSError: it can't be written.
    """
    from google.protobuf import json_format  # large, and seldom needed, as are the others

    from elasticdl.job.facts import Facts
    from elasticdl.job.journal import dump_entry
    from elasticdl.proto import elasticdl_pb2 as pb

    with job.journal.open("ab+") as journal:
        journal.seek(max(0, journal.tell() - 1))
        begin = "\n" if journal.read() not in (b"", b"\n") else ""  # the master may have been killed within a line
        journal.seek(0)
        found = Facts.of(line.decode(errors="replace") for line in journal).result()
        ended = {"event": "job_finished", "phase": phase, "reason": why, "steps": found.step}
        journal.write(f"{begin}{dump_entry({'time': time.time(), **ended})}\n".encode())
    status = pb.JobStatus(job_name=job.name, phase=phase, reason=why, step=found.step, time_left=-1)
    status.elapsed = found.until - found.began
    write_aside(job.status, json_format.MessageToJson(status, preserving_proto_field_name=True))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m elasticdl.master.shell.slurm_keeper", description=__doc__)
    parser.add_argument("--job_dir", required=True, type=Path, help="the job's folder, which holds job.json and tls")
    job = JobDir(parser.parse_args(argv).job_dir.absolute())
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {job.name} %(levelname)s %(name)s: %(message)s")
    command = [*RUN_MODULE, MASTER_MODULE, "--job_dir", str(job.path)]
    number, restarts = os.environ["SLURM_JOB_ID"], int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    backoff = Backoff(random.Random(), first=1.0, longest=60.0)

    async def keep() -> int:
        return await Keeper(job, command, number, restarts, backoff).run()

    return asyncio.run(keep())


if __name__ == "__main__":
    sys.exit(main())
