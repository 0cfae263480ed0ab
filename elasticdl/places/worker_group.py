"""`python -m elasticdl.places.worker_group`: a worker of several processes, which share one model among themselves.

It is started as a worker is. It starts the processes, with the variables by which torch.distributed connects them (as torchrun does), and
speaks for them: each has a session with this process, which has one with the master. A change of the world reaches all of them, and
they ask for the next world when all are ready. When one of them ends otherwise than with status 0, the others are killed.

Exit codes: 0 all have ended with 0; that of the first process which has not, or 128 and the number of the signal that has killed it; 1 a process has
ended, and the others go on without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

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
from elasticdl.job.messages import FACTS
from elasticdl.job.spec import JobSpec
from elasticdl.places.preload import how_to_start
from elasticdl.places.worker_process import USAGE, Spawner
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as pb_grpc

MASTER = -1  # who is told, among the numbers of the processes
OF_ONE = "/"  # between the number of a process and the scope of its entry in the store
HOLD_SECONDS = 1.0  # a failure waits so long: its cause may be another process's death, which is heard a moment later
EPHEMERAL, FIRST_PORT = Path("/proc/sys/net/ipv4/ip_local_port_range"), 20000
ALONE_SECONDS = 30.0  # for the others, once one has ended with status 0
ENDING_SECONDS = 90.0  # for the others to come to the end of the script as well: one may have files to write
UNSAID_SECONDS = 2.0  # for the others, where the one that has ended had not said that it would
TAKEN_SECONDS = 5.0  # for the master to take a failure that no process has said itself
TOLD_OF_ALL = frozenset({"worker_stuck"})  # notices that count of each process; the others come from process 0 alone

_log = logging.getLogger("elasticdl.places.worker_group")

Said: TypeAlias = tuple[int, Any]  # who is told a message: of a worker's kind if that is the master, else of a master's


class Bundle:
    """What the processes of one worker say to the master as one, in one session, and what each of them is told. Pure.

    As soon as one of the streams breaks all are begun anew. So nothing is kept from session to session: each begins with everything that
    is still true (`elasticdl.elastic.core.worker.WorkerCore`).
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._asks: dict[int, pb.Ask] = {}
        self._beats: dict[int, pb.Heartbeat] = {}
        self._finished: dict[int, pb.Finished] = {}
        self._draining: list[pb.Draining] = []
        self._broken = 0  # newest world that one of them has found broken

    def hello(self, hellos: Sequence[pb.Hello]) -> pb.WorkerMessage:
        """``hellos``: of all processes. Where they are in different worlds the worker is in none."""
        versions = {each.world_version for each in hellos}
        hello = pb.Hello()
        hello.CopyFrom(hellos[0])
        hello.world_version = versions.pop() if len(versions) == 1 else 0
        hello.pid = os.getpid()
        return pb.WorkerMessage(hello=hello)

    def of_process(self, number: int, message: pb.WorkerMessage) -> list[Said]:
        """A process has said this. A failure is not passed on here: see `WorkerGroup`."""
        match message.WhichOneof("body"):
            case "ask":
                return self._ask(number, message.ask)
            case "heartbeat":
                return self._beat(number, message.heartbeat)
            case "draining":
                return self._drain(number, message.draining)
            case "finished":
                self._finished[number] = message.finished
                if len(self._finished) < self._size:
                    return []
                last = pb.Finished()
                last.CopyFrom(self._finished[0])
                last.together = all(each.together for each in self._finished.values())
                return [(MASTER, pb.WorkerMessage(finished=last))]
            case "kv_put":
                return self._put(number, message.kv_put)
            case "progress":
                return [(MASTER, message)] if number == 0 else []
            case "notice":
                return self._notice(number, message)
        return []

    def of_master(self, message: pb.MasterMessage) -> list[Said]:
        """The master has said this."""
        body = message.WhichOneof("body")
        if body == "saved":
            return [(0, message)]
        if body == "world":
            # It answers them: who has asked again in this session may be the only one that was not in it yet.
            self._asks = {each: ask for each, ask in self._asks.items() if ask.left_world >= message.world.version}
        if body != "kv_entry":
            return [(number, message) for number in range(self._size)]
        number, between, scope = message.kv_entry.scope.partition(OF_ONE)
        if not between:
            return []
        entry = pb.KvEntry()
        entry.CopyFrom(message.kv_entry)
        entry.scope = scope
        return [(int(number), pb.MasterMessage(kv_entry=entry))]

    def _ask(self, number: int, ask: pb.Ask) -> list[Said]:
        self._asks[number] = ask
        told: list[Said] = []
        if ask.broken and ask.left_world > self._broken:
            # The others need not wait for the master to hear of it.
            self._broken = ask.left_world
            broken = pb.MasterMessage(broken=pb.Broken(world_version=ask.left_world, reason=ask.reason))
            told = [(other, broken) for other in range(self._size) if other not in self._asks]
        if len(self._asks) == self._size:
            told.append((MASTER, pb.WorkerMessage(ask=_one_ask(list(self._asks.values())))))
            self._asks = {}
        return told

    def _beat(self, number: int, beat: pb.Heartbeat) -> list[Said]:
        """One beat of all: a process that is frozen, or makes no progress, is the whole worker's affair."""
        self._beats[number] = beat
        if len(self._beats) < self._size:
            return []
        beats, self._beats = self._beats, {}
        every = list(beats.values())
        one = pb.Heartbeat()
        one.CopyFrom(beats[0])
        one.step, one.progress = min(each.step for each in every), min(each.progress for each in every)
        one.waiting, one.ending = all(each.waiting for each in every), all(each.ending for each in every)
        return [(MASTER, pb.WorkerMessage(heartbeat=one))]

    def _drain(self, number: int, draining: pb.Draining) -> list[Said]:
        if draining in self._draining:
            return []
        self._draining.append(draining)
        told: list[Said] = [(MASTER, pb.WorkerMessage(draining=draining))]
        if not draining.lingers:
            drain = pb.MasterMessage(drain=pb.Drain(reason=draining.reason))
            told += [(other, drain) for other in range(self._size) if other != number]
        return told

    def _put(self, number: int, put: pb.KvPut) -> list[Said]:
        if (put.scope, put.key) == FACTS:
            return [(MASTER, pb.WorkerMessage(kv_put=put))] if number == 0 else []
        own = pb.KvPut()
        own.CopyFrom(put)
        own.scope = f"{number}{OF_ONE}{put.scope}"
        return [(MASTER, pb.WorkerMessage(kv_put=own))]

    def _notice(self, number: int, message: pb.WorkerMessage) -> list[Said]:
        if number == 0:
            return [(MASTER, message)]
        told: list[Said] = [(number, pb.MasterMessage(saved=pb.Saved(number=message.number)))]
        if message.notice.event in TOLD_OF_ALL:
            fields = json.loads(message.notice.fields_json)
            notice = pb.Notice(
                event=message.notice.event,
                fields_json=json.dumps({**fields, "where": f"process {number}: {fields['where']}"}),
            )
            told.append((MASTER, pb.WorkerMessage(notice=notice)))
        return told


def _one_ask(asks: Sequence[pb.Ask]) -> pb.Ask:
    """Where one of them stands behind the others, or holds no state, the worker does."""
    least = min(asks, key=lambda ask: (ask.has_state, ask.step, ask.epoch, ask.synced_in))
    one = pb.Ask()
    one.CopyFrom(least)
    if broken := next((ask for ask in asks if ask.broken), None):
        one.broken, one.reason = True, broken.reason
    return one


@dataclass(slots=True, eq=False)
class _Stream:
    """Of one process."""

    number: int
    hello: pb.Hello
    outbox: asyncio.Queue[pb.MasterMessage | None]
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # the session with the master
    ended: bool = False  # it says no more
    why: tuple[grpc.StatusCode, str] = (grpc.StatusCode.UNAVAILABLE, "the session with the master has ended")


class Relay(pb_grpc.MasterServicer):
    """The sessions of the processes, and the one with the master."""

    def __init__(self, environment: WorkerEnvironment, size: int) -> None:
        self.tokens = [secrets.token_urlsafe() for _ in range(size)]
        # The process of this number was told to leave by a signal.
        self.terminate_others: Callable[[int], None] = lambda number: None
        # The process of this number has failed, and has said so.
        self.kill_others: Callable[[int], None] = lambda number: None
        # Last words of processes that can't go on, in the order in which they came.
        self.failed: dict[int, pb.WorkerMessage] = {}
        self.has_failed = asyncio.Event()
        self.ends_apart = False  # the script has ended in some processes, and goes on in others
        self.may_end: set[int] = set()  # processes that have said that they end, or were told to
        self._environment = environment
        self._size = size
        self._streams: dict[int, _Stream] = {}
        self._tells_failure = False  # the time for that has come, in this session and each that follows
        self._is_failure_taken = False
        self._all_here = asyncio.Event()
        self._upward: asyncio.Queue[pb.WorkerMessage | None] = asyncio.Queue()
        self._call: Any = None  # with the master
        self._is_dropped = False  # that call, as a process has gone or comes again
        self._bundle = Bundle(size)
        self._ending: dict[int, bool] = {}  # whether a process has come to the end of its script
        self._ends_apart_since = math.inf  # some have, and others have not

    # -- the processes --

    async def Session(self, messages: AsyncIterator[pb.WorkerMessage], context: Any) -> None:
        given = str(dict(context.invocation_metadata() or ()).get(TOKEN_KEY, ""))
        number = next((at for at, token in enumerate(self.tokens) if hmac.compare_digest(given, token)), None)
        first = await anext(aiter(messages), None)
        if number is None or first is None or first.WhichOneof("body") != "hello":
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "this is for the processes of one worker alone")
            return
        stream = _Stream(number, first.hello, asyncio.Queue())
        self._drop_all()  # if a session is under way, it has lost a process
        self._streams[number] = stream
        if len(self._streams) == self._size:
            self._all_here.set()
        reading = asyncio.ensure_future(self._read(stream, messages))
        try:
            while (message := await stream.outbox.get()) is not None:
                await context.write(message)
            if not stream.ended:
                await context.abort(*stream.why)
        finally:
            reading.cancel()
            if self._streams.get(number) is stream:
                del self._streams[number]
                self._drop_all()

    async def _read(self, stream: _Stream, messages: AsyncIterator[pb.WorkerMessage]) -> None:
        async for message in messages:
            body = message.WhichOneof("body")
            if body == "failed":
                self.failed.setdefault(stream.number, message)
                self.has_failed.set()
                continue
            await stream.begun.wait()
            if body in ("draining", "finished"):
                self.may_end.add(stream.number)
            if body == "draining" and message.draining.lingers:
                self.terminate_others(stream.number)
            if body == "heartbeat":
                self._look_at_end(stream.number, message.heartbeat.ending)
            self._pass_on(self._bundle.of_process(stream.number, message))
        stream.ended = True
        self._end_failed()
        if self.failed and not self._is_failure_taken:
            return  # it is yet to be told
        if all(each.ended for each in self._streams.values()) and len(self._streams) == self._size:
            self._upward.put_nowait(None)

    def _end_failed(self) -> None:
        """Who has failed ends once the master has taken its word. The others would wait for it, or say that it is gone."""
        if not self._is_failure_taken:
            return
        first = next(iter(self.failed))
        for stream in list(self._streams.values()):
            if stream.ended and stream.number in self.failed:
                if stream.number == first:  # else two that have failed kill each other, and nobody's exit code counts
                    self.kill_others(first)
                stream.outbox.put_nowait(None)

    def _look_at_end(self, number: int, is_ending: bool) -> None:
        self._ending[number] = is_ending
        now, ending = asyncio.get_running_loop().time(), sorted(each for each, ends in self._ending.items() if ends)
        if not 0 < len(ending) < self._size:
            self._ends_apart_since = math.inf
            return
        self._ends_apart_since = min(self._ends_apart_since, now)
        if now - self._ends_apart_since > ENDING_SECONDS:
            others = [each for each in range(self._size) if each not in ending]
            text = f"the script has ended here, and goes on in processes {others}: let all processes of a worker make the same steps"
            self.failed.setdefault(
                ending[0], pb.WorkerMessage(failed=pb.Failed(message=text, users=True, trained=True))
            )
            self.ends_apart = True
            self.has_failed.set()

    def _pass_on(self, said: Sequence[Said]) -> None:
        for whom, message in said:
            if whom == MASTER:
                self._upward.put_nowait(message)
            elif whom in self._streams:
                self._streams[whom].outbox.put_nowait(message)

    def _drop_all(self) -> None:
        """If a session is under way, it is over; the processes come again."""
        if not self._all_here.is_set():
            return
        if self._call is not None:
            self._is_dropped = True
            self._call.cancel()
        self._end(list(self._streams.values()))

    def _end(self, streams: Sequence[_Stream]) -> None:
        self._all_here.clear()
        for stream in streams:
            if self._streams.get(stream.number) is stream:
                del self._streams[stream.number]
            stream.outbox.put_nowait(None)

    # -- the master --

    async def keep(self) -> None:
        """One session after another, until it is cancelled."""
        while True:
            await self._all_here.wait()
            if not self._all_here.is_set():  # one has gone in the moment in which the last came
                continue
            streams = [self._streams[number] for number in range(self._size)]
            code, why = grpc.StatusCode.UNAVAILABLE, "the master ended the session"
            try:
                await self._converse(streams)
                for stream in streams:
                    stream.ended = True
            except grpc.aio.AioRpcError as error:
                code, why = error.code(), error.details() or ""
            except asyncio.CancelledError:
                if not self._is_dropped:  # it is this task that is cancelled
                    raise
            except (UnreachableError, UserError) as error:
                why = str(error)
            if not self._is_dropped:
                for stream in streams:
                    stream.why = code, why
                self._end(streams)

    async def _converse(self, streams: Sequence[_Stream]) -> None:
        self._bundle, self._upward, self._is_dropped = Bundle(self._size), asyncio.Queue(), False
        self._upward.put_nowait(self._bundle.hello([stream.hello for stream in streams]))
        for stream in streams:
            stream.begun.set()
        if self._tells_failure:
            self.tell_failure()
        credentials = self._environment.credentials
        async with open_aio_channel(self._environment.master, credentials) as channel:
            self._call = call = pb_grpc.MasterStub(channel).Session(metadata=metadata(credentials))
            sending = asyncio.ensure_future(self._send(call, self._upward))
            try:
                async for message in call:
                    if message.WhichOneof("body") in ("drain", "stop_work"):
                        self.may_end.update(range(self._size))
                    self._pass_on(self._bundle.of_master(message))
                    if message.HasField("last_word_taken") and self._tells_failure:
                        self._is_failure_taken = True
                        self._end_failed()
            finally:
                self._call = None
                sending.cancel()

    async def _send(self, call: Any, upward: asyncio.Queue[pb.WorkerMessage | None]) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # who reads hears of it
            while (message := await upward.get()) is not None:
                await call.write(message)
            await call.done_writing()

    def tell_failure(self) -> None:
        """Pass on the last word of the process that has failed first."""
        self._tells_failure = True
        number, message = next(iter(self.failed.items()))
        told = pb.WorkerMessage()
        told.CopyFrom(message)
        told.failed.message = f"process {number} of the worker: {message.failed.message}"
        self._upward.put_nowait(told)


class WorkerGroup:
    """The processes, from their start to the end of the last."""

    def __init__(self, spec: JobSpec, environ: Mapping[str, str], environment: WorkerEnvironment) -> None:
        self._size = spec.processes_per_worker
        self._spec = spec
        self._environ = environ
        self._environment = environment
        self._processes: dict[int, ProcessGroup] = {}
        self.relay = Relay(environment, self._size)
        self.relay.terminate_others = self._terminate_others
        self.relay.kill_others = self._kill_others
        self._killed = set[int]()  # because another has failed
        self._is_told_to_leave = False

    async def run(self) -> int:
        """The exit code, when nothing of the processes is left."""
        server = grpc.aio.server(options=SERVER_OPTIONS)
        pb_grpc.add_MasterServicer_to_server(self.relay, server)
        port = server.add_insecure_port(f"{LOOPBACK}:0")
        await server.start()
        keeping = asyncio.ensure_future(self.relay.keep())
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._terminate_others, None)
        folder = tempfile.mkdtemp(prefix="elasticdl-processes-")
        common = self._of_any(port, folder)
        spawner = Spawner(*how_to_start(self._spec, within=True), common, sys.stderr.fileno())
        try:
            for number in range(self._size):
                own = {**common, **self._own(number)}
                made = await spawner.spawn(own, sys.stdout.fileno(), sys.stderr.fileno(), lambda: True)
                assert made is not None, "it was wanted"
                self._processes[number] = made
                if self._is_told_to_leave:
                    made.signal(signal.SIGTERM)
            return await self._watch(keeping)
        finally:
            keeping.cancel()  # first: by the end of the session the master hears of it, and the others need not wait
            for process in self._processes.values():
                process.kill()
            for process in self._processes.values():
                await process.wait()
            await spawner.close()
            await server.stop(0)
            shutil.rmtree(folder, ignore_errors=True)

    async def _watch(self, keeping: asyncio.Future[None]) -> int:
        """Until all have ended, or one otherwise than with status 0. ``keeping``: the session, which lasts as long."""
        ends: dict[asyncio.Future[Any], int] = {
            asyncio.ensure_future(each.has_ended()): number for number, each in self._processes.items()
        }
        failing = asyncio.ensure_future(self._tell_failure())
        patience: float | None = None
        try:
            while ends:
                awaited: set[asyncio.Future[Any]] = {*ends, keeping}
                done, _ = await asyncio.wait(awaited, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                if keeping in done:
                    keeping.result()
                if not done:
                    others = sorted(ends.values())
                    print(
                        f"elasticdl: processes {others} of this worker go on, where another's script has ended: end all alike",
                        file=sys.stderr,
                    )
                    return 1
                for end in done:
                    number = ends.pop(end)
                    if number in self._killed:
                        continue
                    code = self._processes[number].code()
                    if code:
                        name = f"signal {-code}" if code < 0 else f"exit code {code}"
                        if code != USAGE:  # the last line is the reason, which the process has said itself
                            _log.info(
                                "process %d of this worker has ended with %s: the others are killed", number, name
                            )
                        return code if code > 0 else 128 - code
                    patience = ALONE_SECONDS if number in self.relay.may_end else UNSAID_SECONDS
            return 0
        finally:
            failing.cancel()
            for end in ends:
                end.cancel()

    async def _tell_failure(self) -> None:
        await self.relay.has_failed.wait()
        await asyncio.sleep(HOLD_SECONDS)
        self.relay.tell_failure()
        if self.relay.ends_apart:  # they wait for each other, and for nobody else
            await asyncio.sleep(TAKEN_SECONDS)
            for process in self._processes.values():
                process.kill()

    def _terminate_others(self, number: int | None) -> None:
        self._is_told_to_leave = True  # also those that are yet to be started
        for other, process in self._processes.items():
            if other != number:
                process.signal(signal.SIGTERM)

    def _kill_others(self, number: int) -> None:
        for other, process in self._processes.items():
            if other != number:
                self._killed.add(other)
                process.kill()

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
        own = {"RANK": str(number), "LOCAL_RANK": str(number), PROCESS: str(number), TOKEN: self.relay.tokens[number]}
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


def main() -> int:
    environment = WorkerEnvironment.from_env(os.environ)
    if environment is None:
        raise UserError(f"{MASTER_VARIABLE} is not set: a worker is started by a launcher")
    name = f"worker {environment.worker_id}"
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s")
    spec = JobSpec.from_json(Path(environment.job_spec).read_text())
    return asyncio.run(WorkerGroup(spec, os.environ, environment).run())


if __name__ == "__main__":
    sys.exit(main())
