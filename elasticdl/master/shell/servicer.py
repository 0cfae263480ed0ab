"""The master's gRPC service. Handlers only translate and post; nothing here decides."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import grpc
from pydantic import ValidationError

from elasticdl.common.channel import SERVER_OPTIONS, TOKEN_KEY, identify
from elasticdl.common.credentials import Identity, Role, TlsFolder, Token
from elasticdl.common.errors import UserError
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core import events
from elasticdl.master.core.values import Phase
from elasticdl.master.shell.agents import Agents
from elasticdl.master.shell.journal_file import Journal
from elasticdl.master.shell.loop import Mailbox, Outbox, SessionOutbox, Sessions, to_event
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as pb_grpc

# Who may call what: `ALLOWED` says it, and `Guard` applies it to every call.
#
# A caller has a role. On a cluster the caller's certificate says which. On this machine whoever holds the user's token has
# every role. All workers of a job share one certificate, so a worker may say Hello with the id of another: workers
# trust each other with the gradients already, and whoever has got into one worker can spoil the training, or end it by
# reporting an error, anyway. With a worker's certificate nobody can command or watch the job, or reach another job.
# A call that the table does not name is refused to all.

ALLOWED: Mapping[str, frozenset[Role]] = {
    "Session": frozenset({Role.WORKER}),
    "Attend": frozenset({Role.WORKER}),  # an agent holds what its workers hold
    "Status": frozenset({Role.OWNER}),
    "Watch": frozenset({Role.OWNER}),
    "Events": frozenset({Role.OWNER}),
    "Scale": frozenset({Role.OWNER}),
    "Stop": frozenset({Role.OWNER}),
}

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in its stubs only


@dataclass(frozen=True, slots=True)
class TokenAccess:
    """A job of this machine: whoever has the token holds every role. ``stranger``: what is told to a caller without a role."""

    token: Token
    stranger: str = "the job's token is missing or wrong: jobs are controlled by the user who started them"

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Listen at ``host:port``; returns the port taken, 0 (or RuntimeError) if it is not to be had."""
        host = address.rpartition(":")[0].strip("[]")
        if not ipaddress.ip_address(host).is_loopback:
            raise ValueError(f"a token must not travel in the clear, so not over {host}: use certificates")
        return server.add_insecure_port(address)

    def roles(self, context: Context) -> frozenset[Role]:
        given = dict(context.invocation_metadata() or ()).get(TOKEN_KEY, "")
        given_bytes = given if isinstance(given, bytes) else given.encode()
        right = hmac.compare_digest(given_bytes, self.token.value.encode())
        return frozenset(Role) if right else frozenset()


@dataclass(frozen=True, slots=True)
class TlsAccess:
    """A job on a cluster: mutual TLS. A caller without a certificate of this job gets no connection at all.

    gRPC speaks TLS 1.2 and newer only.
    """

    tls: TlsFolder  # the master's
    job: str
    stranger: str = "the certificate is of another job, or of no role in this one"

    @classmethod
    def load(cls, tls: TlsFolder) -> Self:
        """
        Raises:
            UserError: the certificate can't be read, or is of no job.
        """
        return cls(tls, identify(tls).job)

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        files = self.tls.read()
        credentials = grpc.ssl_server_credentials([(files.key, files.certificate)], files.ca, require_client_auth=True)
        return server.add_secure_port(address, credentials)

    def roles(self, context: Context) -> frozenset[Role]:
        names = context.auth_context().get("x509_subject_alternative_name", ())
        return frozenset(role for role in Role if Identity(role, self.job).dns_name.encode() in names)


Access: TypeAlias = TokenAccess | TlsAccess


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # as above
    """Lets a call reach its handler, a coroutine function, only if the caller has a role for which the table allows it."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler  # no such call: gRPC says so
        name = handler_call_details.method.rpartition("/")[2]
        streams = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if streaming else "unary" for streaming in streams)
        behaviour, make = getattr(handler, kind), getattr(grpc, f"{kind}_rpc_method_handler")

        async def guarded(request: Any, context: Context) -> Any:
            roles, allowed = self._access.roles(context), ALLOWED.get(name, frozenset())
            if not roles:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, self._access.stranger)
            if not roles & allowed:
                text = f"{_listed(roles)} may not call {name}: it takes the certificate of {_listed(allowed)}"
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)
            return await behaviour(request, context)

        made: Handler = make(guarded, handler.request_deserializer, handler.response_serializer)
        return made


def _listed(roles: frozenset[Role]) -> str:
    return " or ".join(f"the {role}" for role in sorted(roles)) or "nobody"


WATCH_SECONDS = 0.25
# How long open calls may take to bring their last messages across.
CLOSE_SECONDS = 2.0
# What somebody asks for is done and saved by then, or told to wait; less than callers wait for an answer.
SETTLE_SECONDS = 10.0
LAST_WORDS = ("finished", "failed")
_LEFT = "this master leaves the job to another one: ask again"


@dataclass(frozen=True, slots=True)
class Servicer(pb_grpc.MasterServicer):
    mailbox: Mailbox
    sessions: Sessions
    status: Callable[[], pb.JobStatus]
    ended: asyncio.Event  # the status will not change any more
    journal: Journal
    welcome: Callable[[], pb.Welcome]
    why_not: Callable[[WorkerRange], str]  # a job may not have so many workers; empty if it may
    agents: Agents | None = None  # None: workers are started without any

    async def Session(self, request_iterator: AsyncIterator[pb.WorkerMessage], context: Context) -> None:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("body") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a session begins with Hello")
        worker_id = first.hello.worker_id
        outbox = self.sessions.open(worker_id)
        outbox.put(pb.MasterMessage(welcome=self.welcome()))
        self.sessions.replay(worker_id)
        self.mailbox.post(to_event(worker_id, first))
        try:
            newer = f"a newer session of worker {worker_id} has begun"
            await _converse(outbox, self._read(worker_id, request_iterator, outbox), context, newer)
        finally:
            if self.sessions.close(worker_id, outbox):
                self.mailbox.post(events.WorkerDisconnected(worker_id))

    async def _read(self, worker_id: int, messages: AsyncIterator[pb.WorkerMessage], outbox: SessionOutbox) -> bool:
        """Post what the worker says, and answer its last word.

        Returns whether this master has acted upon all of it. Else the worker must say it to the next master.
        """
        async for message in messages:
            body = message.WhichOneof("body")
            if body == "kv_put":
                self.sessions.put(worker_id, message.kv_put)
                continue
            if body == "hello":
                raise ValueError("a session does not take hello again")
            self.mailbox.post(to_event(worker_id, message))
            if body in LAST_WORDS and await self._settled():
                outbox.put(pb.MasterMessage(last_word_taken=pb.LastWordTaken()))
        return await self._settled()  # a worker may end once its session has

    async def Attend(self, request_iterator: AsyncIterator[pb.AgentMessage], context: Context) -> None:
        messages = aiter(request_iterator)
        first, agents = await anext(messages, None), self.agents
        if first is None or first.WhichOneof("body") != "hello" or not first.hello.place:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "an agent begins with AgentHello, with its place")
        if agents is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this job's workers are started without agents")
        line, place = agents.open(first.hello, self.mailbox.settled), first.hello.place
        line.put(pb.AgentOrder(welcome=self.welcome()))

        async def listen() -> bool:
            await agents.begun.wait()
            agents.greet(line, first.hello)
            async for message in messages:
                agents.hear(line, place, message)
            return True

        try:
            await _converse(line, listen(), context, f"a newer agent of place {place} has come")
        finally:
            agents.closed(line, place)

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.JobStatus:
        return self.status()

    async def Watch(self, request: pb.StatusRequest, context: Context) -> None:
        """The status, again after each change, and at last as it is when the job has ended."""
        seen = None
        while not self.ended.is_set():
            status = self.status()
            if (shown := _without_clock(status)) != seen:
                seen = shown
                await context.write(status)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), WATCH_SECONDS)
        await context.write(self.status())

    async def Events(self, request: pb.EventsRequest, context: Context) -> None:
        async for line in self.journal.entries(request.after, follow=request.follow):
            await context.write(pb.JournalEntry(json=line))

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.ScaleReply:
        status = self.status()
        if status.phase in ("stopping", "succeeded", "failed", "stopped"):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"the job is {status.phase}")
        try:
            workers = WorkerRange(minimum=request.min_workers, maximum=request.max_workers)
        except ValidationError:
            text = f"{request.min_workers}-{request.max_workers} workers: write MIN-MAX with 1 <= MIN <= MAX, as in 2-4"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        if why := self.why_not(workers):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
        before = WorkerRange(minimum=status.min_workers, maximum=status.max_workers)
        self.mailbox.post(events.ScaleRequested(workers))
        await self._require_settled(context)
        status = self.status()  # of a job that waits the minimum is not raised
        workers = WorkerRange(minimum=status.min_workers, maximum=status.max_workers)
        return pb.ScaleReply(message=f"{status.job_name}: workers now {workers}, before {before}")

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.StopReply:
        reason = request.reason or "told to stop"
        self.mailbox.post(events.StopRequested(reason, checkpoint=request.checkpoint, now=request.now))
        await self._require_settled(context)
        return pb.StopReply()

    async def _settled(self) -> bool:
        """Wait until all that was posted is acted upon and saved; False: another master must be told again."""
        return await self.mailbox.settled() or Phase(self.status().phase).final

    async def _require_settled(self, context: Context) -> None:
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                settled = await self._settled()
        except TimeoutError:
            await context.abort(grpc.StatusCode.ABORTED, f"it was told, and {self.status().reason or 'is busy'}")
        if not settled:
            await context.abort(grpc.StatusCode.UNAVAILABLE, _LEFT)


async def _converse(line: Outbox[Any], listen: Coroutine[Any, Any, bool], context: Context, newer: str) -> None:
    """Send what is put into the line, while ``listen`` hears the other end; it returns whether this master has acted upon all of it.
    ``newer``: why this stream ends, if another one of the same caller has begun."""
    listening = asyncio.create_task(listen)
    listening.add_done_callback(lambda _: line.close())
    try:
        async for message in line.messages():
            await context.write(message)
        if line.replaced:
            await context.abort(grpc.StatusCode.ABORTED, newer)
        if listening.done() and not listening.cancelled():
            if isinstance(error := listening.exception(), ValueError | RecursionError):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            if not listening.result():  # raises: a mistake there is not to pass unseen
                await context.abort(grpc.StatusCode.UNAVAILABLE, _LEFT)
    finally:
        listening.cancel()


class Server:
    """The listening socket with the service behind it."""

    def __init__(self, host: str, access: Access) -> None:
        self._host = host
        self._access = access
        self._server = grpc.aio.server(interceptors=[Guard(access)], options=SERVER_OPTIONS)

    def bind(self, port: int) -> int:
        """Take the port, 0 for any free one; returns the port taken.

        Raises:
            UserError: it is not to be had.
        """
        bound = self.listen(self._host, port)
        if bound == 0:
            raise UserError(f"port {port} of {self._host} is taken: choose another --port, or 0 for any free one")
        return bound

    def listen(self, host: str, port: int) -> int:
        """At this address, too; returns the port taken, 0 if it is not to be had."""
        try:
            return self._access.add_port(self._server, f"{host}:{port}")
        except RuntimeError:
            return 0

    async def start(self, servicer: Servicer) -> None:
        pb_grpc.add_MasterServicer_to_server(servicer, self._server)
        await self._server.start()

    async def close(self) -> None:
        await self._server.stop(CLOSE_SECONDS)


def _without_clock(status: pb.JobStatus) -> bytes:
    """The status without the numbers that change as time passes; in bytes a loss that is none is like itself."""
    copy = pb.JobStatus()
    copy.CopyFrom(status)
    for name in ("elapsed", "time_left", "samples_per_second"):
        copy.ClearField(name)
    return copy.SerializeToString(deterministic=True)
