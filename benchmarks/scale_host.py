"""One process full of simulated workers: gRPC clients that speak the session's protocol and train nothing.

    python -m benchmarks.scale_host SOCKET LOG

Takes its orders from `benchmarks.scale_master`. Each worker is a task with a stream of its own, all over a few
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
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import grpc

from elasticdl.common.channel import TOKEN_KEY
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as pb_grpc

CHANNELS = 8  # the usual limit of 100 streams a connection does not hold for gRPC's own server
LOST_ONE_IN = 10

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
        self._world = 0
        self._progress = 0
        self._interval = 0.5

    async def run(self) -> None:
        """Returns when the master has told it to leave, or the session is over."""
        beats = asyncio.create_task(self._beat())
        call = self._stub.Session(self._messages(), metadata=self._metadata)
        try:
            async for message in call:
                if message.WhichOneof("body") in ("drain", "stop_work"):
                    return
                self._take(message)
        finally:
            beats.cancel()
            call.cancel()

    async def _messages(self) -> AsyncIterator[pb.WorkerMessage]:
        yield pb.WorkerMessage(hello=pb.Hello(worker_id=self._id, host="127.0.0.1", pid=os.getpid()))
        yield self._ask(broken=False)
        while True:
            yield await self._outbox.get()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            self._progress += 1
            beat = pb.Heartbeat(world_version=self._world, step=1, progress=self._progress)
            self._outbox.put_nowait(pb.WorkerMessage(heartbeat=beat))

    def _take(self, message: pb.MasterMessage) -> None:
        match message.WhichOneof("body"):
            case "welcome":
                self._interval = message.welcome.heartbeat_interval
            case "world":
                self._world = message.world.version
                self._note(self._world, len(message.world.members))
            case "change":
                self._leave(message.change.world_version, broken=False)
            case "broken":
                self._leave(message.broken.world_version, broken=True)

    def _leave(self, world: int, *, broken: bool) -> None:
        if world == self._world:
            self._outbox.put_nowait(self._ask(broken=broken))
            self._world = 0

    def _ask(self, *, broken: bool) -> pb.WorkerMessage:
        ask = pb.Ask(left_world=self._world, step=1, has_state=self._world > 0, broken=broken)
        return pb.WorkerMessage(ask=ask)


class Host:
    """The workers of this process."""

    def __init__(self, master: Mapping[str, str], writer: asyncio.StreamWriter, note: Note) -> None:
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(master["address"], options=options) for _ in range(CHANNELS)]
        self._stubs = itertools.cycle([pb_grpc.MasterStub(channel) for channel in channels])
        self._metadata = ((TOKEN_KEY, master["token"]),)
        self._writer = writer
        self._note = note
        self._workers: dict[int, asyncio.Task[None]] = {}

    def start(self, worker_id: int) -> None:
        if not self._workers:
            self._note(0, 0)
        worker = Worker(worker_id, next(self._stubs), self._metadata, self._note)
        self._workers[worker_id] = asyncio.create_task(worker.run())

    def end(self, worker_id: int) -> None:
        if task := self._workers.pop(worker_id, None):
            task.cancel()
            self._writer.write(json.dumps({"ended": worker_id}).encode() + b"\n")

    def end_some(self) -> None:
        for worker_id in sorted(self._workers)[::LOST_ONE_IN]:
            self.end(worker_id)

    async def close(self) -> None:
        for task in self._workers.values():
            task.cancel()
        await asyncio.gather(*self._workers.values(), return_exceptions=True)


async def serve(socket: str, log: Path) -> None:
    """Until the launcher closes the connection."""
    reader, writer = await asyncio.open_unix_connection(socket)
    with log.open("w", buffering=1) as lines:

        def note(version: int, size: int) -> None:
            lines.write(f"{time.monotonic():.6f} {version} {size}\n")

        host = Host(json.loads(await reader.readline()), writer, note)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, host.end_some)
        async for line in reader:
            order: Mapping[str, int] = json.loads(line)
            if "start" in order:
                host.start(order["start"])
            else:
                host.end(order["end"])
        await host.close()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2])))
