"""The master of `benchmarks.master_scale`: the real one, but for its launcher, whose workers are simulated.

    python -m benchmarks.scale_master JOB_DIR HOSTS

The launcher deals the ids of the first workers out to HOSTS processes, in turn, through a socket in the job's directory:
one JSON line ``{"start": id}`` or ``{"end": id}``, after a greeting line with the master's address and token. A host
answers ``{"ended": id}`` when a worker has ended. For replacements of these there is no place.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from elasticdl.job.jobdir import JobDir, MasterAddress
from elasticdl.job.spec import JobSpec
from elasticdl.master.shell.local_master import serve_here
from elasticdl.master.state.events import ExitCause, FoundWorker, WorkerExited, WorkerPending, WorkerPlaced
from elasticdl.places.base import Launcher, Limits, Report

SOCKET = "hosts.sock"


@dataclass(frozen=True, slots=True)
class Room:
    """Where workers go and how many there may be, ever."""

    socket: Path
    hosts: int
    workers: int


class SimulatedLauncher:
    """See `elasticdl.places.base.Launcher`; a worker's place is a task in some host process."""

    def __init__(self, master: MasterAddress, report: Report, room: Room) -> None:
        self._master = master
        self._report = report
        self._room = room
        self._hosts: list[asyncio.StreamWriter] = []
        self._waiting: list[int] = []
        self._placed: dict[int, asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None

    async def find(self, remembered: Mapping[int, str]) -> Sequence[FoundWorker]:
        return ()

    async def launch(self, worker_id: int, away_from: Sequence[str] = ()) -> None:
        if self._server is None:
            self._server = await asyncio.start_unix_server(self._serve, self._room.socket)
        if worker_id >= self._room.workers:
            self._report(WorkerPending(worker_id, "the simulation has no more room"))
            return
        self._waiting.append(worker_id)
        self._place()

    def terminate(self, worker_id: int) -> None:
        self.kill(worker_id)

    def kill(self, worker_id: int) -> None:
        if host := self._placed.get(worker_id):
            _tell(host, {"end": worker_id})
        elif worker_id >= self._room.workers:
            self._report(WorkerExited(worker_id, ExitCause.KILLED, -signal.SIGKILL, "it had no place"))

    def read_stacks(self, worker_id: int) -> None:
        """Simulated workers have none."""

    def read_log(self, worker_id: int) -> None:
        """Likewise."""

    async def detach(self) -> None:
        await self.close()

    async def close(self) -> None:
        if self._server:
            self._server.close()
        for host in self._hosts:
            host.close()

    def _place(self) -> None:
        """Only once all hosts are there, so that starting them is no part of what is measured."""
        while self._waiting and len(self._hosts) >= self._room.hosts:
            worker_id = self._waiting.pop(0)
            host = self._hosts[worker_id % len(self._hosts)]
            self._placed[worker_id] = host
            _tell(host, {"start": worker_id})
            self._report(WorkerPlaced(worker_id, "127.0.0.1", 1))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _tell(writer, asdict(self._master))
        self._hosts.append(writer)
        self._place()
        async for line in reader:
            worker_id = json.loads(line)["ended"]
            if self._placed.pop(worker_id, None):
                self._report(WorkerExited(worker_id, ExitCause.KILLED, -signal.SIGKILL, "SIGKILL"))


def _tell(host: asyncio.StreamWriter, message: Mapping[str, object]) -> None:
    host.write(json.dumps(message).encode() + b"\n")


def main() -> None:
    job_dir, hosts = JobDir(Path(sys.argv[1])), int(sys.argv[2])
    spec = JobSpec.from_json(job_dir.spec.read_text())

    def prepare(master: MasterAddress) -> Callable[[Report, Limits], Launcher]:
        room = Room(job_dir.path / SOCKET, hosts, spec.num_workers.maximum)
        return lambda report, limits: SimulatedLauncher(master, report, room)

    asyncio.run(serve_here(spec, job_dir, prepare))


if __name__ == "__main__":
    main()
