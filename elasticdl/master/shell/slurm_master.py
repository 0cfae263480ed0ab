"""`python -m elasticdl.master.shell.slurm_master --job_dir DIR`: the master of a job on a Slurm cluster, in a batch job itself.

Its nodes share the job's folder: there the master writes where it is, and what the next master must know. The next one is started by
`slurm_keeper` in the same batch job, and by Slurm if the master's node is lost (``--requeue``). The workers go on meanwhile, and their
agents find the next master by the folder.

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
from collections.abc import Callable, Mapping, Sequence
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
from elasticdl.master.shell.calls import Server, TlsAccess
from elasticdl.master.shell.loop import SnapshotStore
from elasticdl.master.shell.serve import EXIT_CODES, EXIT_USER_ERROR, Master, RelievedError, handling, log_as, read_spec
from elasticdl.master.shell.slurm_keeper import EXIT_AGAIN, EXIT_LEFT, LEAVE, STOP, is_replaced, restarts
from elasticdl.places.base import Launcher, Limits, Report
from elasticdl.places.launcher import PlaceLauncher, Seconds
from elasticdl.places.polled import PolledPlaces
from elasticdl.places.slurm import SlurmProvider, workers_name

ANYWHERE = "0.0.0.0"
# So long workers go on without a master: Slurm takes minutes to give a node up, and may have no place for the next master at once.
MASTER_TIMEOUT = 1800.0
_log = logging.getLogger(__name__)


class FileState(SnapshotStore):
    """A job's snapshot in a file of the job's folder, which the nodes share.

    Writing is fenced: a master that finds the mark of a later start of its batch job has been replaced, as after its node was cut off,
    and writes no more. That mark may come between the look and the write: no shared file system has a lock that outlives every node.
    Such a late write is lost and does no harm, as the successor reads only once, at its start.

    ``restarts``: how often the batch job of this master had been started again.
    """

    news_seconds = 5.0  # the file system is everybody's

    def __init__(self, job: JobDir, restarts: int) -> None:
        self._job = job
        self._restarts = restarts

    async def load(self) -> Snapshot | None:
        return await asyncio.to_thread(self._load)

    async def save(self, snapshot: Snapshot) -> None:
        await asyncio.to_thread(self._save, snapshot.to_json())

    def _load(self) -> Snapshot | None:
        job = self._job
        try:
            self._require_mine()
            write_aside(job.holder, str(self._restarts))
            text = job.state.read_text() if job.state.exists() else ""
            snapshot = Snapshot.from_json(text) if text else None
            _cut(job.journal, snapshot.journal_bytes if snapshot else None)
        except ValueError as error:
            raise UserError(f"what an earlier master has left in {job.path} can't be read: {error}") from None
        except OSError as error:  # as of a disk that is full
            raise UnreachableError(f"can't take the job over in {job.path}: {error.strerror or error}") from None
        return snapshot

    def _save(self, text: str) -> None:
        self._require_mine()
        write_aside(self._job.state, text)

    def _require_mine(self) -> None:
        if is_replaced(self._job, self._restarts):
            raise ReplacedError("another master has taken over")


def _cut(journal: Path, end: int | None) -> None:
    """Cut the journal to its length at the snapshot. Workers tell again what came later, so each entry is there once.

    The journal becomes another file: a master that was cut off may still write to the old one, and readers see that it begins anew.

    ``end``: in bytes; None: all whole lines.
    """
    if journal.exists():
        content = journal.read_bytes()
        end = content.rfind(b"\n") + 1 if end is None else end
        write_aside(journal, content[:end].decode(errors="replace"))


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
        return EXIT_LEFT if isinstance(error, RelievedError) else EXIT_AGAIN
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
    address = MasterAddress.of_this_process(f"{socket.gethostname()}:{port}", tls=str(job_dir.tls / Role.OWNER))
    agents = Agents()
    batch = partial(PolledPlaces, provider(spec, job_dir, os.environ))

    def make_launcher(report: Report, limits: Limits) -> Launcher:
        return PlaceLauncher(batch, agents.reporting_to, report, seconds=Seconds(start=spec.start_timeout))

    master = Master(
        spec, job_dir, server, FileState(job_dir, restarts()), make_launcher, agents=agents, address=address
    )
    stop = e.StopRequested("the master's batch job was cancelled", checkpoint=True, now=False)
    told: dict[signal.Signals, Callable[[], None]] = {
        LEAVE: partial(master.leave, "Slurm starts the batch job again"),
        STOP: partial(master.post, stop),
        signal.SIGTERM: lambda: None,  # Slurm's own, of which `slurm_keeper` says what it means
    }
    with handling(told):
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
    return SlurmProvider(name, command, output, shlex.split(spec.slurm_args), spec.processes_per_worker)


if __name__ == "__main__":
    sys.exit(main())
