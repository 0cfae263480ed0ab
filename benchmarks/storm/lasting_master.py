"""A master that may be killed and started again, as on a cluster: it listens at one address with one token, its memory is
in a file, and its workers outlive it. `python -m benchmarks.storm.lasting_master JOB_DIR HOST:PORT`

Its workers run beside it or, with a file ``hosts.json`` in the job's folder, each in the network namespace of one host; they
then need certificates in the folder ``tls``. Commands are taken over loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc

from elasticdl.common.credentials import Role, TlsFolder, Token
from elasticdl.common.environment import LOOPBACK, STACKS, WorkerEnvironment
from elasticdl.common.errors import UserError
from elasticdl.common.startup import RUN_MODULE
from elasticdl.job.jobdir import JobDir, MasterAddress, write_aside
from elasticdl.job.spec import JobSpec
from elasticdl.master.shell.access import Context, TlsAccess, TokenAccess
from elasticdl.master.shell.saver import SnapshotStore
from elasticdl.master.shell.serve import EXIT_CODES, Platform, serve
from elasticdl.master.shell.servicer import Server
from elasticdl.master.state.events import Event, FoundWorker, WorkerExited, WorkerPlaced
from elasticdl.master.state.instructions import EndJob
from elasticdl.master.state.snapshot import Snapshot
from elasticdl.places.base import Launcher, Limits, Report
from elasticdl.places.exits import judge_exit
from elasticdl.places.hung_process import look_at

TOKEN = "of-this-job"
MASTER_TIMEOUT = 120.0
CLOSE_SECONDS = 10.0
# Writes its own process id before anything else, so that a master which is killed at that moment leaves no worker unknown
# to the next; then runs a command, and leaves its exit code for whoever is master then. SIGTERM is for the command alone.
RUN_AND_KEEP_CODE = 'echo $$ > "$0.pid"; trap : TERM; "$@"; echo $? > "$0.code"'


@dataclass(frozen=True, slots=True)
class Host:
    """Where workers run. ``pid``: of a process in its network namespace, 0 if that is the master's own."""

    address: str
    pid: int = 0

    @property
    def prefix(self) -> tuple[str, ...]:
        """What makes a command run on it."""
        return ("nsenter", f"--net=/proc/{self.pid}/ns/net") if self.pid else ()


@dataclass(frozen=True, slots=True)
class Placed:
    """A worker that was started; ``pid`` leads its process group."""

    pid: int
    host: Host


class WorkerFolder:
    """What outlives a master: where each worker runs, the exit code of those that have ended, their temporary files."""

    def __init__(self, job_dir: JobDir) -> None:
        self._path = job_dir.path / "workers"
        self._path.mkdir(exist_ok=True)

    def placed(self) -> dict[int, Placed]:
        """All whose end no master has noted yet."""
        found = {}
        for file in self._path.glob("*.pid"):
            # One that has just ended or begun has not all of its files.
            with contextlib.suppress(FileNotFoundError, ValueError):
                host = Host(**json.loads(file.with_suffix(".host").read_text()))
                found[int(file.stem)] = Placed(int(file.read_text()), host)
        return dict(sorted(found.items()))

    def prepare(self, worker_id: int, host: Host) -> tuple[str, Path]:
        """Before it is started: what names its files, and the folder for its temporary ones."""
        write_aside(self._path / f"{worker_id}.host", json.dumps(asdict(host)))
        temporary = self._path / f"{worker_id}.tmp"
        temporary.mkdir()
        return str(self._path / str(worker_id)), temporary

    def dump_of(self, worker_id: int) -> Path:
        return self._path / f"{worker_id}.tmp" / "elasticdl-stacks"

    def take_code(self, worker_id: int) -> int:
        """The exit code of a worker that has ended; nothing of it is kept."""
        code_file = self._path / f"{worker_id}.code"
        text = code_file.read_text() if code_file.exists() else ""
        shutil.rmtree(self._path / f"{worker_id}.tmp", ignore_errors=True)
        for suffix in ("pid", "code", "host"):
            (self._path / f"{worker_id}.{suffix}").unlink(missing_ok=True)
        return int(text) if text else -signal.SIGKILL


class LastingLauncher:
    """See `elasticdl.places.base.Launcher`."""

    def __init__(self, job_dir: JobDir, command: Sequence[str], master: str, report: Report) -> None:
        self._folder = WorkerFolder(job_dir)
        self._job_dir = job_dir
        self._command = command
        self._master = master
        self._report = report
        self._hosts = read_hosts(job_dir)
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._running: dict[int, Placed] = {}
        self._empty = asyncio.Event()

    async def find(self, remembered: Mapping[int, str]) -> Sequence[FoundWorker]:
        there = self._folder.placed()
        for worker_id, placed in there.items():
            asyncio.get_running_loop().call_soon(self._watch, worker_id, placed)
        return [FoundWorker(worker_id, placed.host.address, placed.pid) for worker_id, placed in there.items()]

    async def launch(self, worker_id: int, away_from: Sequence[str] = ()) -> None:
        busy = Counter(placed.host for placed in self._running.values())
        host = min(self._hosts, key=lambda each: busy[each])
        environment = WorkerEnvironment(
            master=self._master,
            credentials=tls_folder(self._job_dir, Role.WORKER) if host.pid else Token(TOKEN),
            worker_id=worker_id,
            job_spec=str(self._job_dir.spec),
            host=host.address,
            interface="",  # that of the host's address
            master_timeout=MASTER_TIMEOUT,
        )
        name, temporary = self._folder.prepare(worker_id, host)
        with self._job_dir.worker_log(worker_id).open("ab") as log:
            child = self._children[worker_id] = subprocess.Popen(
                [*host.prefix, "sh", "-c", RUN_AND_KEEP_CODE, name, *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    **environment.to_env(),
                    "TMPDIR": str(temporary),
                    STACKS: str(self._folder.dump_of(worker_id)),
                },
                start_new_session=True,
            )
        placed = Placed(child.pid, host)
        self._report(WorkerPlaced(worker_id, host.address, child.pid))
        self._watch(worker_id, placed)

    def terminate(self, worker_id: int) -> None:
        self._signal(worker_id, signal.SIGTERM)

    def kill(self, worker_id: int) -> None:
        self._signal(worker_id, signal.SIGKILL)

    def read_stacks(self, worker_id: int) -> None:
        if placed := self._running.get(worker_id):
            self._report(look_at(worker_id, placed.pid, self._folder.dump_of(worker_id)))

    def read_log(self, worker_id: int) -> None:
        """What workers print is for who looks at the storm."""

    async def close(self) -> None:
        for worker_id in self._running:
            self.kill(worker_id)
        if self._running:
            await asyncio.wait_for(self._empty.wait(), CLOSE_SECONDS)

    async def detach(self) -> None:
        """Workers are left to the next master."""

    def _signal(self, worker_id: int, number: signal.Signals) -> None:
        if placed := self._running.get(worker_id):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(placed.pid, number)

    def _watch(self, worker_id: int, placed: Placed) -> None:
        try:
            descriptor = os.pidfd_open(placed.pid)
        except ProcessLookupError:
            self._report_exit(worker_id)
            return
        self._running[worker_id] = placed
        self._empty.clear()
        asyncio.get_running_loop().add_reader(descriptor, self._ended, worker_id, descriptor)

    def _ended(self, worker_id: int, descriptor: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        del self._running[worker_id]
        if child := self._children.pop(worker_id, None):
            child.wait()
        self._report_exit(worker_id)
        if not self._running:
            self._empty.set()

    def _report_exit(self, worker_id: int) -> None:
        code = self._folder.take_code(worker_id)
        cause, detail = judge_exit(code)
        self._report(WorkerExited(worker_id, cause, code, detail))


class FileStore(SnapshotStore):
    """See `elasticdl.master.shell.saver.SnapshotStore`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def load(self) -> Snapshot | None:
        return Snapshot.from_json(self._path.read_text()) if self._path.exists() else None

    async def save(self, memory: Snapshot) -> None:
        write_aside(self._path, memory.to_json())


def write_hosts(job_dir: JobDir, hosts: Sequence[Host]) -> None:
    write_aside(job_dir.path / "hosts.json", json.dumps([asdict(host) for host in hosts]))


def read_hosts(job_dir: JobDir) -> list[Host]:
    file = job_dir.path / "hosts.json"
    return [Host(**fields) for fields in json.loads(file.read_text())] if file.exists() else [Host(LOOPBACK)]


def tls_folder(job_dir: JobDir, role: Role) -> TlsFolder:
    return TlsFolder(job_dir.path / "tls" / role)


class LastingAccess:
    """See `elasticdl.master.shell.access.Access`: a token over loopback, certificates over everything else."""

    def __init__(self, job_dir: JobDir) -> None:
        tls = tls_folder(job_dir, Role.MASTER)
        self._token = TokenAccess(Token(TOKEN))
        self._tls = TlsAccess.load(tls) if tls.path.exists() else None

    @property
    def stranger(self) -> str:
        return self._token.stranger

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        access = self._token if self._tls is None or address.startswith(LOOPBACK) else self._tls
        return access.add_port(server, address)

    def roles(self, context: Context) -> frozenset[Role]:
        return self._token.roles(context) or (self._tls.roles(context) if self._tls else frozenset())


async def run(job_dir: JobDir, host: str, port: int) -> EndJob:
    spec = JobSpec.from_json(job_dir.spec.read_text())
    server = Server(LOOPBACK, LastingAccess(job_dir))
    address = MasterAddress(f"{LOOPBACK}:{server.bind(port)}", TOKEN, os.getpid())
    if host != LOOPBACK and not server.listen(host, port):
        raise UserError(f"port {port} of {host} is taken")

    @asynccontextmanager
    async def lifespan(post: Callable[[Event], None]) -> AsyncIterator[None]:
        job_dir.write_master(address)
        yield

    def make_launcher(report: Report, limits: Limits) -> Launcher:
        command = spec.command or (*RUN_MODULE, "elasticdl.worker.main")
        return LastingLauncher(job_dir, command, f"{host}:{port}", report)

    platform = Platform(server, make_launcher, FileStore(job_dir.path / "memory.json"), lifespan)
    return await serve(spec, job_dir, platform)


def main(job_dir: str, address: str) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    host, _, port = address.rpartition(":")
    return EXIT_CODES[asyncio.run(run(JobDir(Path(job_dir)), host, int(port))).phase]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
