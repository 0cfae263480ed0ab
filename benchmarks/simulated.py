"""The master of `benchmarks.master_scale`, and processes full of simulated workers for it.

    python -m benchmarks.simulated master JOB_DIR HOSTS
    python -m benchmarks.simulated host SOCKET LOG

The master is the real one, but for its launcher, which deals the ids of the first workers out to HOSTS processes, in turn, through
a socket in the job's directory: one JSON line ``{"start": id}`` or ``{"end": id}``, after a greeting line with the master's
address and token. A host answers ``{"ended": id}`` when a worker has ended. For replacements of these there is no place.

A simulated worker is a task that speaks the session's protocol and trains nothing. Each has a stream of its own, all over a few
connections: what is measured is the master, not the number of sockets. On SIGUSR1 one worker in ten ends. Each world that
a worker receives is a line of the log: time, version, size; so is the first order: time, 0, 0.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import grpc

from elasticdl.common.channel import TOKEN_KEY
from elasticdl.job.jobdir import JobDir, MasterAddress
from elasticdl.job.spec import JobSpec
from elasticdl.master.shell.local_master import serve_here
from elasticdl.master.state.events import ExitCause, FoundWorker, WorkerExited, WorkerPending, WorkerPlaced
from elasticdl.places.base import Launcher, Limits, Report
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as pb_grpc

CHANNELS = 128  # of each host: with thousands of streams in one connection the connection is what is measured
LOST_ONE_IN = 10
RETRY_SECONDS = 1.0
SOCKET = "hosts.sock"

Metadata = tuple[tuple[str, str], ...]
Note = Callable[[int, int], None]  # told the version and the size of a world received


class Worker:
    """Asks for a world, beats in it, and leaves it when told, until it is ended."""

    def __init__(self, worker_id: int, stub: pb_grpc.MasterStub, metadata: Metadata, note: Note) -> None:
        self._id = worker_id
        self._note = note
        self._stub = stub
        self._metadata = metadata
        self._outbox: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()
        self._world = pb.World()  # the present one; version 0: none
        self._request = self._ask(broken=False)  # not answered yet, unless it is in a world
        self._progress = 0

    async def run(self) -> None:
        """Returns when the master has told it to leave. A session that is lost is opened again, as a real worker's is."""
        while not await self._is_over():
            await asyncio.sleep(RETRY_SECONDS)

    async def _is_over(self) -> bool:
        """One session. Returns False if it was lost."""
        self._outbox, beats = asyncio.Queue(), None
        call = self._stub.Session(self._messages(self._outbox), metadata=self._metadata)
        try:
            async for message in call:
                if message.WhichOneof("body") in ("drain", "stop_work"):
                    return True
                if message.WhichOneof("body") == "welcome":
                    beats = asyncio.create_task(self._beat(message.welcome.heartbeat_interval))
                self._take(message)
        except grpc.RpcError as error:
            print(f"worker {self._id}: {error.code()}", file=sys.stderr)
        finally:
            call.cancel()
            if beats:
                beats.cancel()
        return False

    async def _messages(self, outbox: asyncio.Queue[pb.WorkerMessage]) -> AsyncIterator[pb.WorkerMessage]:
        world = self._world
        place = {"world_version": world.version, "rank": world.rank, "size": world.size}
        yield pb.WorkerMessage(hello=pb.Hello(worker_id=self._id, host="127.0.0.1", pid=os.getpid(), **place))
        if not world.version:
            yield self._request
        while True:
            yield await outbox.get()

    async def _beat(self, interval: float) -> None:
        while True:
            await asyncio.sleep(interval)
            self._progress += 1
            beat = pb.Heartbeat(world_version=self._world.version, step=1, progress=self._progress)
            self._outbox.put_nowait(pb.WorkerMessage(heartbeat=beat))

    def _take(self, message: pb.MasterMessage) -> None:
        match message.WhichOneof("body"):
            case "world":
                self._world = message.world
                self._note(self._world.version, self._world.size)
            case "change":
                self._leave(message.change.world_version, broken=False)
            case "broken":
                self._leave(message.broken.world_version, broken=True)

    def _leave(self, world: int, *, broken: bool) -> None:
        if world == self._world.version:
            self._request, self._world = self._ask(broken=broken), pb.World()
            self._outbox.put_nowait(self._request)

    def _ask(self, *, broken: bool) -> pb.WorkerMessage:
        world = self._world.version
        ask = pb.Ask(left_world=world, step=1, has_state=world > 0, broken=broken)
        return pb.WorkerMessage(ask=ask)


async def host(socket: str, log: Path) -> None:
    """The workers of this process, until the launcher closes the connection."""
    reader, writer = await asyncio.open_unix_connection(socket)
    master: Mapping[str, str] = json.loads(await reader.readline())
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(master["address"], options=options) for _ in range(CHANNELS)]
    stubs = itertools.cycle([pb_grpc.MasterStub(channel) for channel in channels])
    workers: dict[int, asyncio.Task[None]] = {}

    def end(worker_id: int) -> None:
        if task := workers.pop(worker_id, None):
            task.cancel()
            _tell(writer, {"ended": worker_id})

    def end_some() -> None:
        for worker_id in sorted(workers)[::LOST_ONE_IN]:
            end(worker_id)

    with log.open("w", buffering=1) as lines:

        def note(version: int, size: int) -> None:
            lines.write(f"{time.monotonic():.6f} {version} {size}\n")

        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, end_some)
        async for line in reader:
            order: Mapping[str, int] = json.loads(line)
            if "end" in order:
                end(order["end"])
                continue
            if not workers:
                note(0, 0)
            worker = Worker(order["start"], next(stubs), ((TOKEN_KEY, master["token"]),), note)
            workers[order["start"]] = asyncio.create_task(worker.run())
        for task in workers.values():
            task.cancel()
        await asyncio.gather(*workers.values(), return_exceptions=True)


class SimulatedLauncher:
    """See `elasticdl.places.base.Launcher`; a worker's place is a task in some host process."""

    def __init__(self, master: MasterAddress, report: Report, socket: Path, hosts: int, workers: int) -> None:
        """``workers``: how many there may be, ever."""
        self._master = master
        self._report = report
        self._socket = socket
        self._wanted = hosts
        self._workers = workers
        self._hosts: list[asyncio.StreamWriter] = []
        self._placed: dict[int, asyncio.StreamWriter] = {}
        self._complete = asyncio.Event()

    async def find(self, remembered: Mapping[int, str]) -> Sequence[FoundWorker]:
        """Returns once all hosts are there, so that starting them is no part of what is measured."""
        self._server = await asyncio.start_unix_server(self._serve, self._socket)
        await self._complete.wait()
        return ()

    async def launch(self, worker_id: int, away_from: Sequence[str] = ()) -> None:
        if worker_id >= self._workers:
            self._report(WorkerPending(worker_id, "the simulation has no more room"))
            return
        self._placed[worker_id] = self._hosts[worker_id % len(self._hosts)]
        _tell(self._placed[worker_id], {"start": worker_id})
        self._report(WorkerPlaced(worker_id, "127.0.0.1", 1))

    def terminate(self, worker_id: int) -> None:
        self.kill(worker_id)

    def kill(self, worker_id: int) -> None:
        if host := self._placed.get(worker_id):
            _tell(host, {"end": worker_id})
        elif worker_id >= self._workers:
            self._report(WorkerExited(worker_id, ExitCause.KILLED, -signal.SIGKILL, "it had no place"))

    def read_stacks(self, worker_id: int) -> None:
        """Simulated workers have none."""

    def read_log(self, worker_id: int) -> None:
        """Likewise."""

    async def detach(self) -> None:
        await self.close()

    async def close(self) -> None:
        self._server.close()
        for host in self._hosts:
            host.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _tell(writer, asdict(self._master))
        self._hosts.append(writer)
        if len(self._hosts) == self._wanted:
            self._complete.set()
        async for line in reader:
            worker_id = json.loads(line)["ended"]
            if self._placed.pop(worker_id, None):
                self._report(WorkerExited(worker_id, ExitCause.KILLED, -signal.SIGKILL, "SIGKILL"))


def _tell(peer: asyncio.StreamWriter, message: Mapping[str, object]) -> None:
    peer.write(json.dumps(message).encode() + b"\n")


async def master(job_dir: JobDir, hosts: int) -> None:
    spec = JobSpec.from_json(job_dir.spec.read_text())
    socket, workers = job_dir.path / SOCKET, spec.num_workers.maximum

    def prepare(address: MasterAddress) -> Callable[[Report, Limits], Launcher]:
        return lambda report, limits: SimulatedLauncher(address, report, socket, hosts, workers)

    await serve_here(spec, job_dir, prepare)


if __name__ == "__main__":
    role, where, what = sys.argv[1:]
    asyncio.run(master(JobDir(Path(where)), int(what)) if role == "master" else host(where, Path(what)))
