"""A master that may be killed and started again, as on a cluster: it listens at one address with one token, its memory is
in a file, and its workers outlive it. `python lasting_master.py JOB_DIR PORT`
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

from elasticdl.common.credentials import Token
from elasticdl.common.environment import WorkerEnvironment
from elasticdl.common.jobdir import JobDir, MasterAddress, write_aside
from elasticdl.common.spec import JobSpec
from elasticdl.master.core.events import FoundWorker, WorkerExited, WorkerPlaced
from elasticdl.master.core.snapshot import Snapshot
from elasticdl.master.launchers.local import judge_exit
from elasticdl.master.service.access import TokenAccess
from elasticdl.master.service.entry import EXIT_CODES
from elasticdl.master.service.serve import Platform, serve
from elasticdl.master.service.servicer import Server

HOST = "127.0.0.1"
TOKEN = "of-this-test"
# Runs a command and leaves its exit code in a file, for whoever is master then.
KEEP_CODE = '"$@"; code=$?; echo $code > "$0.tmp"; mv "$0.tmp" "$0"'


class FileStore:
    """See `elasticdl.master.service.saver.SnapshotStore`."""

    def __init__(self, path):
        self._path = path

    async def load(self):
        return Snapshot.from_json(self._path.read_text()) if self._path.exists() else None

    async def save(self, memory):
        write_aside(self._path, memory.to_json())


class LastingLauncher:
    """See `elasticdl.master.launchers.base.Launcher`. A worker's pid is in a file, and its exit code when it has ended."""

    def __init__(self, job_dir, command, address, report):
        self._folder = job_dir.path / "workers"
        self._folder.mkdir(exist_ok=True)
        self._job_dir = job_dir
        self._command = command
        self._address = address
        self._report = report
        self._children = {}
        self._pids = {}

    async def find(self):
        there = {int(path.stem): int(path.read_text()) for path in self._folder.glob("*.pid")}
        for worker_id, pid in there.items():
            asyncio.get_running_loop().call_soon(self._watch, worker_id, pid)
        return [FoundWorker(worker_id, HOST, pid) for worker_id, pid in sorted(there.items())]

    async def launch(self, worker_id):
        environment = WorkerEnvironment(
            self._address.address, Token(TOKEN), worker_id, str(self._job_dir.spec), master_timeout=120.0
        )
        with self._job_dir.worker_log(worker_id).open("ab") as log:
            child = self._children[worker_id] = subprocess.Popen(
                ["sh", "-c", KEEP_CODE, str(self._folder / f"{worker_id}.code"), *self._command],
                stdout=log,
                stderr=log,
                env={**os.environ, **environment.to_env()},
                start_new_session=True,
            )
        (self._folder / f"{worker_id}.pid").write_text(str(child.pid))
        self._report(WorkerPlaced(worker_id, HOST, child.pid))
        self._watch(worker_id, child.pid)

    def terminate(self, worker_id):
        self._signal(worker_id, signal.SIGTERM)

    def kill(self, worker_id):
        self._signal(worker_id, signal.SIGKILL)

    async def detach(self):
        await self.close()

    async def close(self):
        for worker_id in list(self._pids):
            self.kill(worker_id)

    def _signal(self, worker_id, number):
        if pid := self._pids.get(worker_id):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)

    def _watch(self, worker_id, pid):
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended(worker_id)
            return
        self._pids[worker_id] = pid
        asyncio.get_running_loop().add_reader(descriptor, self._seen, worker_id, descriptor)

    def _seen(self, worker_id, descriptor):
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        del self._pids[worker_id]
        if child := self._children.pop(worker_id, None):
            child.wait()
        self._ended(worker_id)

    def _ended(self, worker_id):
        code_file = self._folder / f"{worker_id}.code"
        code = int(code_file.read_text()) if code_file.exists() else -signal.SIGKILL
        (self._folder / f"{worker_id}.pid").unlink()
        cause, detail = judge_exit(code)
        self._report(WorkerExited(worker_id, cause, code, detail))


async def run(job_dir, port):
    spec = JobSpec.from_json(job_dir.spec.read_text())
    server = Server(HOST, TokenAccess(Token(TOKEN)))
    address = MasterAddress(f"{HOST}:{server.bind(port)}", TOKEN, os.getpid())

    @asynccontextmanager
    async def lifespan(post):
        job_dir.write_master(address)
        yield

    def make_launcher(report):
        return LastingLauncher(job_dir, spec.command, address, report)

    return await serve(
        spec, job_dir, Platform(server, make_launcher, FileStore(job_dir.path / "memory.json"), lifespan)
    )


if __name__ == "__main__":
    end = asyncio.run(run(JobDir(Path(sys.argv[1])), int(sys.argv[2])))
    sys.exit(EXIT_CODES[end.phase])
