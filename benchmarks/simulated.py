"""The master of `benchmarks.master_scale`, and processes full of simulated workers for it.

    python -m benchmarks.simulated master JOB_DIR
    python -m benchmarks.simulated host JOB_DIR LOG HOST HOSTS

The master is the real one, but for its launcher, which has a place for each of the first workers, and for no replacement. A
simulated worker is a task that speaks the session's protocol and trains nothing. Each has a stream of its own, all over a few
connections: what is measured is the master, not the number of sockets. Of HOSTS processes each has the workers of every
HOSTS-th id. On `BEGIN` the master launches all workers, and a process starts its own; on `LOSE` one worker in ten ends. Each
world that a worker receives is a line of the log: time, version, size; so is the start of the first worker: time, 0, 0.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import grpc

from elasticdl.common.channel import TOKEN_KEY
from elasticdl.job.jobdir import JobDir, MasterAddress
from elasticdl.job.spec import JobSpec
from elasticdl.master.core.events import ExitCause, FoundWorker, WorkerExited, WorkerPending, WorkerPlaced
from elasticdl.master.shell.serve import local_master
from elasticdl.places.base import Report
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as pb_grpc

CHANNELS = 128  # of each host: with thousands of streams in one connection the connection is what is measured
LOST_ONE_IN = 10
RETRY_SECONDS = 1.0
BEGIN, LOSE = signal.SIGHUP, signal.SIGUSR2

Metadata = tuple[tuple[str, str], ...]
Note = Callable[[int, int], None]  # told the version and the size of a world received


class Worker:
    """Asks for a world, beats in it, and leaves it when told, until it is ended."""

    def __init__(self, worker_id: int, stub: pb_grpc.MasterStub, metadata: Metadata, note: Note) -> None:
        self.id = worker_id
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
            print(f"worker {self.id}: {error.code()}", file=sys.stderr)
        finally:
            call.cancel()
            if beats:
                beats.cancel()
        return False

    async def _messages(self, outbox: asyncio.Queue[pb.WorkerMessage]) -> AsyncIterator[pb.WorkerMessage]:
        world = self._world.version
        yield pb.WorkerMessage(
            hello=pb.Hello(worker_id=self.id, host="127.0.0.1", pid=os.getpid(), world_version=world)
        )
        if not world:
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


def awaited(number: signal.Signals) -> asyncio.Event:
    """Is set once the signal has come."""
    event = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(number, event.set)
    return event


async def host(job_dir: JobDir, log: Path, first: int, hosts: int) -> None:
    """Some workers, until this process is killed. The log appears when they can begin."""
    begin, lose = awaited(BEGIN), awaited(LOSE)
    workers, master = (
        JobSpec.from_json(job_dir.spec.read_text()).num_workers.maximum,
        MasterAddress.read(job_dir.master),
    )
    assert master is not None
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(master.address, options=options) for _ in range(CHANNELS)]
    stubs = itertools.cycle([pb_grpc.MasterStub(channel) for channel in channels])
    metadata = ((TOKEN_KEY, master.token),)
    with log.open("w", buffering=1) as lines:

        def note(version: int, size: int) -> None:
            lines.write(f"{time.monotonic():.6f} {version} {size}\n")

        await begin.wait()
        note(0, 0)
        own = [Worker(number, next(stubs), metadata, note) for number in range(first, workers, hosts)]
        tasks = {worker.id: asyncio.create_task(worker.run()) for worker in own}
        await lose.wait()
        for number in tasks.keys() & lost(workers):
            tasks[number].cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


def lost(workers: int) -> range:
    """Those that end on `LOSE`."""
    return range(0, workers, LOST_ONE_IN)


class SimulatedLauncher:
    """See `elasticdl.places.base.Launcher`; that a worker runs is only claimed here."""

    def __init__(self, report: Report, workers: int, begin: asyncio.Event) -> None:
        """``workers``: how many there may be, ever."""
        self._report = report
        self._workers = workers
        self._begin = begin
        self._launched: set[int] = set()

    async def find(self, remembered: Mapping[int, str]) -> Sequence[FoundWorker]:
        """Returns when all hosts are there, so that starting them is no part of what is measured."""
        await self._begin.wait()
        asyncio.get_running_loop().add_signal_handler(LOSE, self._lose_some)
        return ()

    async def launch(self, worker_id: int, away_from: Sequence[str] = ()) -> None:
        self._launched.add(worker_id)
        if worker_id < self._workers:
            self._report(WorkerPlaced(worker_id, "127.0.0.1", 1))
        else:
            self._report(WorkerPending(worker_id, "the simulation has no more room"))

    def terminate(self, worker_id: int) -> None:
        self.kill(worker_id)

    def kill(self, worker_id: int) -> None:
        if worker_id in self._launched:
            self._launched.remove(worker_id)
            self._report(WorkerExited(worker_id, ExitCause.KILLED, -signal.SIGKILL, "SIGKILL"))

    def _lose_some(self) -> None:
        for worker_id in lost(self._workers):
            self.kill(worker_id)

    def read_stacks(self, worker_id: int) -> None:
        """Simulated workers have none."""

    async def close(self, *, keep: bool = False) -> None:
        """Nothing runs here."""


async def master(job_dir: JobDir) -> None:
    spec, begin = JobSpec.from_json(job_dir.spec.read_text()), awaited(BEGIN)
    workers = spec.num_workers.maximum
    await local_master(
        spec, job_dir, lambda address: lambda report, limits: SimulatedLauncher(report, workers, begin)
    ).run()


if __name__ == "__main__":
    role, where, *rest = sys.argv[1:]
    job = JobDir(Path(where))
    asyncio.run(master(job) if role == "master" else host(job, Path(rest[0]), int(rest[1]), int(rest[2])))
