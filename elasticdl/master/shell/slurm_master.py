"""`python -m elasticdl.master.shell.slurm_master --job_dir DIR`: the master of a job on a Slurm cluster, a batch job itself.

Its nodes share the job's folder: there the master writes where it is, and what the next master must know. Slurm starts the next one
if the master's node is lost (``--requeue``). The workers go on meanwhile, and their agents find the next master by the folder.

| why Slurm ends the master (SIGTERM)                  | what follows                                                    |
| ---------------------------------------------------- | --------------------------------------------------------------- |
| a job of higher priority has its place, or `requeue` | it leaves; Slurm starts the next, and the workers go on          |
| its time limit is near (``--signal``)                | the same, as it has itself put into the queue again              |
| it was cancelled (`scancel`)                         | the job is stopped with a checkpoint                             |

Exit codes: 0 succeeded, 1 failed, 2 the user's mistake, 130 stopped, 143 another master goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from elasticdl.common import environment as variables
from elasticdl.common.channel import FILE
from elasticdl.common.credentials import Role, TlsFolder
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.common.startup import RUN_MODULE, python_path
from elasticdl.job.jobdir import JobDir, MasterAddress
from elasticdl.job.spec import JobSpec
from elasticdl.master.shell.access import TlsAccess
from elasticdl.master.shell.agents import Agents
from elasticdl.master.shell.log_marking import LogMarker
from elasticdl.master.shell.serve import EXIT_CODES, EXIT_USER_ERROR, Platform, handling, log_as, read_spec, serve
from elasticdl.master.shell.servicer import Server
from elasticdl.master.shell.state_file import FileState
from elasticdl.master.state import events as e
from elasticdl.master.state.instructions import EndJob
from elasticdl.places.base import Launcher, Limits, Report
from elasticdl.places.launcher import PlaceLauncher, Seconds
from elasticdl.places.slurm import SlurmProvider, slurm_places, workers_name

ANYWHERE = "0.0.0.0"
# So long workers go on without a master: Slurm takes minutes to give a node up, and may have no place for the next master at once.
MASTER_TIMEOUT = 1800.0
EXIT_LEFT = 143
ANSWER_SECONDS = 10.0
_log = logging.getLogger(__name__)


class RelievedError(Exception):
    """Another master has the job, or will soon have it; the job goes on."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m elasticdl.master.shell.slurm_master", description=__doc__)
    parser.add_argument("--job_dir", required=True, type=Path, help="the job's folder, which holds job.json and tls")
    job_dir = JobDir(parser.parse_args(argv).job_dir.absolute())
    try:
        spec = read_spec(job_dir)
        log_as(job_dir.name, spec)
        return EXIT_CODES[asyncio.run(run(spec, job_dir)).phase]
    except UserError as error:
        print(f"elasticdl: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except (RelievedError, UnreachableError) as error:
        _log.warning("%s", error)
        return EXIT_LEFT


async def run(spec: JobSpec, job_dir: JobDir) -> EndJob:
    """Run the job to its end. Only its files remain.

    Raises:
        UserError: the job can't begin.
        RelievedError: another master has taken over.
        UnreachableError: Slurm does not answer, or the folder does not take the first state.
    """
    server = Server(ANYWHERE, TlsAccess.load(TlsFolder(job_dir.tls / Role.MASTER)))
    port = server.bind(spec.port)
    own = MasterAddress.of_this_process(f"{socket.gethostname()}:{port}", "")
    address = replace(own, tls=str(job_dir.tls / Role.OWNER))
    relieved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    launchers: list[Launcher] = []

    def relieve() -> None:
        if not relieved.done():
            relieved.set_result(None)

    state = FileState(job_dir, uuid.uuid4().hex, relieve)
    agents = Agents()
    batch = partial(slurm_places, provider(spec, job_dir, os.environ))

    def make_launcher(report: Report, limits: Limits) -> Launcher:
        fewest, seconds = (lambda: limits().minimum), Seconds(start=spec.start_timeout)
        launchers.append(PlaceLauncher(batch, agents.reporting_to, report, fewest=fewest, seconds=seconds))
        return launchers[0]

    @asynccontextmanager
    async def lifespan(post: Callable[[e.Event], None]) -> AsyncIterator[None]:
        async def end() -> None:
            if await asyncio.to_thread(_will_be_started_again):
                relieve()
            else:
                post(e.StopRequested("the master's batch job was cancelled", checkpoint=True, now=False))

        def told() -> None:
            ending.append(asyncio.ensure_future(end()))

        ending: list[asyncio.Future[None]] = []
        with handling(dict.fromkeys((signal.SIGTERM, signal.SIGINT), told)):
            job_dir.write_master(address)
            yield

    platform = Platform(server, make_launcher, state, lifespan, lambda status, facts: [LogMarker(job_dir)], agents)
    serving = asyncio.ensure_future(serve(spec, job_dir, platform))
    awaited: set[asyncio.Future[Any]] = {serving, relieved}
    await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        for launcher in launchers:
            await launcher.detach()  # before the end of `serve` could end the workers
        serving.cancel()
        await asyncio.wait({serving})
        raise RelievedError("leaving the job to another master")
    job_dir.master.unlink(missing_ok=True)
    return serving.result()


def provider(spec: JobSpec, job_dir: JobDir, environ: Mapping[str, str]) -> SlurmProvider:
    """Each place is a batch job with the environment of the command that started the training job, and an agent."""
    agent = {
        variables.MASTER: f"{FILE}{job_dir.master}",
        variables.TLS: str(job_dir.tls / Role.WORKER),
        variables.TOKEN: "",
        variables.JOB_SPEC: str(job_dir.spec),
        variables.MASTER_TIMEOUT: f"{MASTER_TIMEOUT:g}",
        variables.LOGS: str(job_dir.logs),
        **python_path(environ),
    }
    command = ["env", *(f"{name}={value}" for name, value in agent.items()), *RUN_MODULE, "elasticdl.places.agent"]
    output = str(job_dir.logs / "place-%j.log")
    name = workers_name(job_dir.name, environ["SLURM_JOB_ID"])  # a master that follows has the number of the first
    return SlurmProvider(name, command, output, shlex.split(spec.slurm_args))


def _will_be_started_again() -> bool:
    """Whether Slurm has counted another start already, or does so now, as all that has come is a time limit."""
    number = os.environ.get("SLURM_JOB_ID", "")
    told = _slurm("scontrol", "--oneliner", "show", "job", number)
    _log.info("Slurm says: %s", " ".join(re.findall(r"(?:JobState|Reason|Restarts)=\S*", told)) or "nothing")
    if not re.search(r"JobState=(COMPLETING|CANCELLED)", told):
        _slurm("scontrol", "requeue", number)
        return True
    restarts = re.search(r"Restarts=(\d+)", told)
    return restarts is None or int(restarts[1]) > int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def _slurm(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("Slurm does not answer %s: %s", words[0], error)
        return ""


if __name__ == "__main__":
    sys.exit(main())
