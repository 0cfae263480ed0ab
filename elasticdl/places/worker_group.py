"""`python -m elasticdl.places.worker_group`: a worker of several processes, which share one model among themselves.

It is started as a worker is. It starts the processes, with the variables by which torch.distributed connects them (as torchrun does), and
speaks for them: each has a session with this process, which has one with the master. A change of the world reaches all of them, and
they ask for the next world when all are ready. When one of them ends otherwise than with status 0, the others are killed.

Exit codes: 0 all have ended with 0; that of the first process which has not, or 128 and the number of the signal that has killed it; 1 a process has
failed and does not end, or the others go on behind the end of one; 2 one has ended without a word, and the others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from elasticdl.common.channel import SERVER_OPTIONS, TOKEN_KEY, metadata, open_aio_channel
from elasticdl.common.credentials import (
    LOOPBACK,
    PROCESS,
    PROCESSES,
    STACKS,
    TOKEN,
    Token,
    WorkerEnvironment,
    interface_of,
)
from elasticdl.common.credentials import MASTER as MASTER_VARIABLE
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.common.process_group import ProcessGroup
from elasticdl.job.spec import JobSpec
from elasticdl.places.group_core import (
    MASTER,
    Action,
    Begin,
    Break,
    Close,
    Finish,
    GroupCore,
    Kill,
    Say,
    Terminate,
    Waits,
)
from elasticdl.places.preload import how_to_start
from elasticdl.places.worker_process import USAGE, Spawner
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as pb_grpc

EPHEMERAL, FIRST_PORT = Path("/proc/sys/net/ipv4/ip_local_port_range"), 20000
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE

_log = logging.getLogger("elasticdl.places.worker_group")


@dataclass(slots=True, eq=False)
class _Stream:
    """Of one process."""

    outbox: asyncio.Queue[pb.MasterMessage | None] = field(default_factory=asyncio.Queue)
    is_closed: bool = False  # in peace
    why: tuple[grpc.StatusCode, str] = (UNAVAILABLE, "the session with the master has ended")


class Relay(pb_grpc.MasterServicer):
    """The sessions of the processes, and the one with the master, as the core wants them."""

    def __init__(
        self, environment: WorkerEnvironment, core: GroupCore, act: Callable[[Terminate | Kill], None]
    ) -> None:
        """``act``: do with the processes themselves what the core wants."""
        self.core = core
        self.tokens = [secrets.token_urlsafe() for _ in range(core.size)]
        self.over: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()
        self._act = act
        self._environment = environment
        self._streams: dict[int, _Stream] = {}
        self._upward: asyncio.Queue[pb.WorkerMessage | None] = asyncio.Queue()
        self._conversation: asyncio.Task[None] | None = None  # with the master
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Say(whom, message):
                    (self._upward if whom == MASTER else self._streams[whom].outbox).put_nowait(message)
                case Begin():
                    self._upward = asyncio.Queue()
                    self._conversation = asyncio.ensure_future(self._converse(self._upward))
                    self._conversation.add_done_callback(self._raise)
                case Close(whom):
                    if whom == MASTER:
                        self._upward.put_nowait(None)
                    else:
                        self._end(whom, is_closed=True)
                case Break(whom, why):
                    if whom == MASTER:
                        self.stop()
                    else:
                        self._end(whom, why=why)
                case Finish():
                    if not self.over.done():
                        self.over.set_result(action)
                case Terminate() | Kill():
                    self._act(action)
        self._set_timer()

    def stop(self) -> None:
        """Break off the session with the master."""
        if self._conversation is not None:
            self._conversation.cancel()
            self._conversation = None

    def _raise(self, conversation: asyncio.Task[None]) -> None:
        if not conversation.cancelled() and (error := conversation.exception()) and not self.over.done():
            self.over.set_exception(error)

    def _end(self, number: int, *, is_closed: bool = False, why: Any = None) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None:
            stream.is_closed, stream.why = is_closed, why or stream.why
            stream.outbox.put_nowait(None)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.core.due < math.inf:
            self._timer = asyncio.get_running_loop().call_at(self.core.due, self._pass_time)

    def _pass_time(self) -> None:
        self.do(self.core.pass_time(self.now()))

    # -- the processes --

    async def Session(self, messages: AsyncIterator[pb.WorkerMessage], context: Any) -> None:
        given = str(dict(context.invocation_metadata() or ()).get(TOKEN_KEY, ""))
        number = next((at for at, token in enumerate(self.tokens) if hmac.compare_digest(given, token)), None)
        first = None if number is None else await anext(aiter(messages), None)
        if number is None or first is None or first.WhichOneof("body") != "hello":
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "this is for the processes of one worker alone")
            return
        stream = _Stream()
        if number in self._streams:
            self._lose(number)
        self._streams[number] = stream
        self.do(self.core.came(number, first.hello, self.now()))
        reading = asyncio.ensure_future(self._read(number, stream, messages))
        try:
            while (message := await stream.outbox.get()) is not None:
                await context.write(message)
            if not stream.is_closed:
                await context.abort(*stream.why)
        finally:
            reading.cancel()
            if self._streams.get(number) is stream:
                self._lose(number)

    async def _read(self, number: int, stream: _Stream, messages: AsyncIterator[pb.WorkerMessage]) -> None:
        async for message in messages:
            if self._streams.get(number) is stream:
                self.do(self.core.heard(number, message, self.now()))
        if self._streams.get(number) is stream:
            self.do(self.core.said_all(number))

    def _lose(self, number: int) -> None:
        self._end(number)
        self.do(self.core.lost(number))

    # -- the master --

    async def _converse(self, upward: asyncio.Queue[pb.WorkerMessage | None]) -> None:
        """One session, which ends before this does: whoever has broken it off has cancelled this."""
        actions: Sequence[Action]
        try:
            await self._hear_master(upward)
            actions = self.core.master_closed()
        except grpc.aio.AioRpcError as error:
            actions = self.core.master_lost((error.code(), error.details() or ""))
        except (UnreachableError, UserError) as error:
            actions = self.core.master_lost((UNAVAILABLE, str(error)))
        self._conversation = None
        self.do(actions)

    async def _hear_master(self, upward: asyncio.Queue[pb.WorkerMessage | None]) -> None:
        credentials = self._environment.credentials
        async with open_aio_channel(self._environment.master, credentials) as channel:
            call = pb_grpc.MasterStub(channel).Session(metadata=metadata(credentials))
            sending = asyncio.ensure_future(self._send(call, upward))
            try:
                async for message in call:
                    self.do(self.core.heard_of_master(message))
            finally:
                sending.cancel()

    async def _send(self, call: Any, upward: asyncio.Queue[pb.WorkerMessage | None]) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # who reads hears of it
            while (message := await upward.get()) is not None:
                await call.write(message)
            await call.done_writing()


class WorkerGroup:
    """The processes, from their start to the end of the last."""

    def __init__(
        self, spec: JobSpec, environ: Mapping[str, str], environment: WorkerEnvironment, waits: Waits | None = None
    ) -> None:
        self._size = spec.processes_per_worker
        self._spec = spec
        self._environ = environ
        self._environment = environment
        self._processes: dict[int, ProcessGroup] = {}
        self._relay = Relay(environment, GroupCore(self._size, waits), self._act)
        self._is_told_to_leave = False

    async def run(self) -> int:
        """The exit code, when nothing of the processes is left."""
        server = grpc.aio.server(options=SERVER_OPTIONS)
        pb_grpc.add_MasterServicer_to_server(self._relay, server)
        port = server.add_insecure_port(f"{LOOPBACK}:0")
        await server.start()
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGTERM, lambda: self._relay.do(self._relay.core.told_to_leave())
        )
        folder = tempfile.mkdtemp(prefix="elasticdl-processes-")
        common = self._of_any(port, folder)
        spawner = Spawner(*how_to_start(self._spec, within=True), common, sys.stderr.fileno())
        ends: list[asyncio.Task[None]] = []
        try:
            for number in range(self._size):
                own = {**common, **self._own(number)}
                made = await spawner.spawn(own, sys.stdout.fileno(), sys.stderr.fileno(), lambda: True)
                assert made is not None, "it was wanted"
                self._processes[number] = made
                if self._is_told_to_leave:
                    made.signal(signal.SIGTERM)
            ends = [asyncio.ensure_future(self._wait(*each)) for each in self._processes.items()]
            finish = await self._relay.over
            # With code 2 the last line is the reason, which a process has said itself.
            if finish.log and finish.code != USAGE:
                _log.info("%s", finish.log)
            if finish.last_words:
                print(finish.last_words, file=sys.stderr)
            return finish.code
        finally:
            self._relay.stop()  # first: by the end of the session the master hears of it, and the others need not wait
            for end in ends:
                end.cancel()
            for process in self._processes.values():
                process.kill()
            for process in self._processes.values():
                await process.wait()
            await spawner.close()
            await server.stop(0)
            shutil.rmtree(folder, ignore_errors=True)

    async def _wait(self, number: int, process: ProcessGroup) -> None:
        await process.has_ended()
        code = process.code()
        assert code is not None, "it has ended"
        self._relay.do(self._relay.core.exited(number, code, self._relay.now()))

    def _act(self, action: Terminate | Kill) -> None:
        meant = [process for number, process in self._processes.items() if number != action.besides]
        if isinstance(action, Kill):
            for process in meant:
                process.kill()
            return
        self._is_told_to_leave = True  # also those that are yet to be started
        for process in meant:
            process.signal(signal.SIGTERM)

    def _of_any(self, port: int, folder: str) -> dict[str, str]:
        """The environment of all processes."""
        within = {
            "WORLD_SIZE": str(self._size),
            "LOCAL_WORLD_SIZE": str(self._size),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(_port()),
            "TORCHELASTIC_RUN_ID": self._spec.job_name,
            "GLOO_SOCKET_IFNAME": interface_of(LOOPBACK),
            PROCESSES: f"{self._size}:{folder}/meeting",
        }
        here = replace(self._environment, master=f"{LOOPBACK}:{port}", credentials=Token(""))
        return {**self._environ, **within, **here.to_env()}

    def _own(self, number: int) -> dict[str, str]:
        """What the environment of one process has beside."""
        own = {"RANK": str(number), "LOCAL_RANK": str(number), PROCESS: str(number), TOKEN: self._relay.tokens[number]}
        stacks = {STACKS: f"{self._environ[STACKS]}.{number}"} if STACKS in self._environ and number else {}
        return {**own, **stacks}


def _port() -> int:
    """A free one, at which process 0 will listen in some seconds: none that the kernel may give to somebody else till then, and another one in each
    process that asks at once."""
    low = int(EPHEMERAL.read_text().split()[0])
    for number in range(low - FIRST_PORT):
        port = FIRST_PORT + (os.getpid() + number) % (low - FIRST_PORT)
        with contextlib.suppress(OSError), socket.create_server((LOOPBACK, port)):
            return port
    raise UserError(
        f"no port from {FIRST_PORT} to {low - 1} is free on {LOOPBACK}, by which the processes of a worker meet"
    )


def main(waits: Waits | None = None) -> int:
    environment = WorkerEnvironment.from_env(os.environ)
    if environment is None:
        raise UserError(f"{MASTER_VARIABLE} is not set: a worker is started by a launcher")
    name = f"worker {environment.worker_id}"
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s")
    spec = JobSpec.from_json(Path(environment.job_spec).read_text())

    async def run() -> int:
        return await WorkerGroup(spec, os.environ, environment, waits).run()

    return asyncio.run(run())


if __name__ == "__main__":
    sys.exit(main())
