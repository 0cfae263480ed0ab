"""`python -m elasticdl.master.shell.slurm_master --job_dir DIR`: the master of a job on a Slurm cluster, in a batch job itself.

Its nodes share the job's folder: there the master writes where it is, and what the next master must know. The next one is started by
`slurm_keeper` in the same batch job, and by Slurm if the master's node is lost (``--requeue``). The workers go on meanwhile, and their
agents find the next master by the folder.

| why Slurm ends the master (SIGTERM)                  | what follows                                                    |
| ---------------------------------------------------- | --------------------------------------------------------------- |
| a job of higher priority has its place, or `requeue` | it leaves; Slurm starts the next, and the workers go on          |
| its time limit is near (``--signal``)                | the same, as it has itself put into the queue again              |
| it was cancelled (`scancel`)                         | the job is stopped with a checkpoint                             |

Exit codes: 0 succeeded, 1 failed, 2 the user's mistake, 130 stopped, 143 another master goes on, 75 it broke: another may do better.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from elasticdl.common import credentials as variables
from elasticdl.common.channel import FILE
from elasticdl.common.credentials import Role, TlsFolder
from elasticdl.common.errors import ReplacedError, UnreachableError, UserError
from elasticdl.common.front_ends import RUN_MODULE, python_path
from elasticdl.job.jobdir import JobDir, MasterAddress, write_aside
from elasticdl.job.spec import JobSpec
from elasticdl.master.core import events as e
from elasticdl.master.core.events import EndJob
from elasticdl.master.core.worker_record import Snapshot
from elasticdl.master.shell.agents import Agents
from elasticdl.master.shell.loop import SnapshotStore
from elasticdl.master.shell.serve import EXIT_CODES, EXIT_USER_ERROR, Master, RelievedError, handling, log_as, read_spec
from elasticdl.master.shell.servicer import Server, TlsAccess
from elasticdl.master.shell.slurm_keeper import EXIT_AGAIN, EXIT_LEFT, new_mark
from elasticdl.places.base import Launcher, Limits, Report
from elasticdl.places.launcher import PlaceLauncher, Seconds
from elasticdl.places.slurm import SlurmProvider, runs_again, slurm_places, workers_name

# A job's snapshot in a file of the job's folder, where the next master finds it: for a batch system whose nodes share the folder.
#
# Writing is fenced: a master that finds another master's mark in the folder has been replaced, as after its node was cut off, and
# writes no more. Another master may put its mark there between the look and the write: no shared file system has a lock that outlives
# every node. Such a late write is lost and does no harm, as the successor reads only once, at its start.


# The file system is everybody's, so it is written seldom.
NEWS_SECONDS = 5.0


class FileState(SnapshotStore):
    """``holder``: the mark of this master."""

    news_seconds = NEWS_SECONDS

    def __init__(self, job: JobDir, holder: str) -> None:
        self._path, self._journal = job.state, job.journal
        self._mark = job.holder
        self._holder = holder

    async def load(self) -> Snapshot | None:
        return await asyncio.to_thread(self._load)

    async def save(self, snapshot: Snapshot) -> None:
        await asyncio.to_thread(self._save, snapshot.to_json())

    def _load(self) -> Snapshot | None:
        try:
            write_aside(self._mark, self._holder)
            text = self._path.read_text() if self._path.exists() else ""
            snapshot = Snapshot.from_json(text) if text else None
            _cut(self._journal, snapshot.journal_bytes if snapshot else None)
        except ValueError as error:
            raise UserError(f"what an earlier master has left in {self._path.parent} can't be read: {error}") from None
        except OSError as error:  # as of a disk that is full
            raise UnreachableError(f"can't take the job over in {self._path.parent}: {error.strerror}") from None
        return snapshot

    def _save(self, text: str) -> None:
        if self._mark.read_text() != self._holder:
            raise ReplacedError("another master has taken over")
        write_aside(self._path, text)


def _cut(journal: Path, end: int | None) -> None:
    """Cut the journal to its length at the snapshot. Workers tell again what came later, so each entry is there once.

    The journal becomes another file: a master that was cut off may still write to the old one, and readers see that it begins anew.

    ``end``: in bytes; None: all whole lines.
    """
    if journal.exists():
        content = journal.read_bytes()
        end = content.rfind(b"\n") + 1 if end is None else end
        write_aside(journal, content[:end].decode(errors="replace"))


ANYWHERE = "0.0.0.0"
# So long workers go on without a master: Slurm takes minutes to give a node up, and may have no place for the next master at once.
MASTER_TIMEOUT = 1800.0
_log = logging.getLogger(__name__)


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
    except RelievedError as error:
        _log.warning("%s", error)
        return EXIT_LEFT
    except UnreachableError as error:
        _log.error("%s", error)
        return EXIT_AGAIN
    except Exception:  # noqa: BLE001 - told apart from a job that has failed
        _log.exception("the master broke")
        return EXIT_AGAIN


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
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    agents = Agents()
    batch = partial(slurm_places, provider(spec, job_dir, os.environ))

    def make_launcher(report: Report, limits: Limits) -> Launcher:
        return PlaceLauncher(batch, agents.reporting_to, report, seconds=Seconds(start=spec.start_timeout))

    store = FileState(job_dir, new_mark(restarts))
    master = Master(spec, job_dir, server, store, make_launcher, agents=agents, address=address)

    async def end() -> None:
        if await runs_again(os.environ["SLURM_JOB_ID"], restarts):
            master.leave("Slurm starts the batch job again")
        else:
            master.post(e.StopRequested("the master's batch job was cancelled", checkpoint=True, now=False))

    def told() -> None:
        if not ending:  # Slurm may tell the master itself, and `slurm_keeper` passes it on
            ending.append(asyncio.ensure_future(end()))

    ending: list[asyncio.Future[None]] = []
    with handling(dict.fromkeys((signal.SIGTERM, signal.SIGINT), told)):
        return await master.run()


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


if __name__ == "__main__":
    sys.exit(main())
