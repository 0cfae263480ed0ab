"""What is said to the master and by it: who may call, what messages mean, the open sessions, the gRPC service.

Nothing here decides: what is said becomes an event in the `Mailbox`, and `loop.py` says what is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeAlias, TypeVar

import grpc
from pydantic import ValidationError

from elasticdl.common.channel import SERVER_OPTIONS, TOKEN_KEY, identify
from elasticdl.common.credentials import Identity, Role, TlsFolder, Token
from elasticdl.common.errors import UserError, first_finding
from elasticdl.job import messages
from elasticdl.job.journal import KINDS
from elasticdl.job.messages import FACTS, MOST_FACTS, standing
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core import events
from elasticdl.master.core.job_core import Job
from elasticdl.master.core.values import Phase, World
from elasticdl.master.shell.journal_file import Journal
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


class Mailbox:
    """The queue of events: anybody posts, only `Loop` takes."""

    def __init__(self) -> None:
        # An asyncio.Event in the queue is set when all before it is acted upon.
        self.events: asyncio.Queue[events.Event | asyncio.Event] = asyncio.Queue()
        self._closed = False

    def post(self, event: events.Event) -> None:
        self.events.put_nowait(event)

    async def settled(self) -> bool:
        """Wait until everything that was posted before is acted upon and saved; False: it may never be."""
        if not self._closed:
            mark = asyncio.Event()
            self.events.put_nowait(mark)
            await mark.wait()
        return not self._closed

    def close(self) -> None:
        """No event is taken any more; whoever waits in `settled` goes on."""
        self._closed = True
        while not self.events.empty():
            if isinstance(event := self.events.get_nowait(), asyncio.Event):
                event.set()


# Messages of protobuf from and to the core's dataclasses, whose fields have the same names. The core sees no message.

_FORMS = {kind.name: kind.form for kind in KINDS.values() if kind.of_worker}
# Of each kind of message to a worker: the name of its field in `MasterMessage`.
_BODIES = {
    type(getattr(pb.MasterMessage(), name)).__name__: name for name in pb.MasterMessage.DESCRIPTOR.fields_by_name
}


def to_event(worker_id: int, message: pb.WorkerMessage) -> events.FromWorker:
    """What a message inside a session means.

    Raises:
        ValueError: the message means nothing here, or its notice is none that a worker may give.
    """
    body = message.WhichOneof("body")
    if body is None or body == "kv_put":
        raise ValueError(f"a session does not take {body or 'an empty message'} here")
    told = getattr(message, body)
    match told:
        case pb.Notice():
            return events.FromWorker(worker_id, messages.Notice(told.event, _notice(told), message.number))
        case pb.Heartbeat():
            given: dict[str, Any] = {"times": _copied(told.times) if told.HasField("times") else None}
        case pb.Progress():
            given = {"steps": tuple(map(_copied, told.steps))}
        case pb.Finished():
            given = {"metrics": dict(told.metrics)}
        case _:
            given = {}
    return events.FromWorker(worker_id, _copied(told, **given))


def to_message(order: messages.Order) -> pb.MasterMessage:
    """It is the same for all workers that are told."""
    return pb.MasterMessage(**{_BODIES[type(order).__name__]: _values(order)})


def to_status(job_name: str, job: Job, now: float, elapsed: float) -> pb.JobStatus:
    outcome, rendezvous, training = job.ending.outcome, job.rendezvous, job.training
    achieved = ("epoch", "total_epochs", "step", "total_steps", "loss", "samples", "metrics", "collective",
                "compared_step", "compared_workers")  # fmt: skip
    return pb.JobStatus(
        job_name=job_name,
        phase=job.phase,
        reason=job.reason,
        traceback=outcome.traceback if outcome else "",
        world_version=rendezvous.version,
        last_change=rendezvous.why_changed,
        advice=job.size.advice,
        decision="" if outcome else job.size.decision,
        **{name: getattr(training, name) for name in achieved},
        workers=[_values(worker) for worker in job.workers],
        samples_per_second=training.samples_per_second(now),
        time_left=training.time_left(now),
        elapsed=elapsed,
        min_workers=job.limits.minimum,
        max_workers=job.limits.maximum,
    )


def _copied(message: object, **given: object) -> Any:
    """The core's value of the same name; ``given``: fields that the message does not have so."""
    kind = getattr(messages, type(message).__name__)
    return kind(*[given[name] if name in given else getattr(message, name) for name in kind.__match_args__])


def _values(said: object) -> dict[str, Any]:
    """The fields of one of the core's values."""
    return {name: getattr(said, name) for name in said.__match_args__}  # type: ignore[attr-defined]


def _notice(notice: pb.Notice) -> dict[str, Any]:
    if notice.event not in _FORMS:
        raise ValueError(f"a worker has no notice {notice.event!r} to give")
    # A file's name may have bytes that are no UTF-8. Python keeps such a byte as a lone surrogate, which can't be sent on.
    encodable = json.dumps(json.loads(notice.fields_json or "{}"), ensure_ascii=False).encode(errors="replace")
    try:
        form = _FORMS[notice.event].model_validate(json.loads(encodable))
    except ValidationError as error:
        raise ValueError(f"notice {notice.event}: {first_finding(error)}") from None
    return form.model_dump(exclude_unset=True)


# The open sessions: a queue of outgoing messages for each worker, and the key-value entries that workers share.

Message = TypeVar("Message")


class Outbox(Generic[Message]):
    """Messages that are yet to be sent over one stream."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[Message | None] = asyncio.Queue()
        self.replaced = False

    def put(self, message: Message) -> None:
        self.waiting.put_nowait(message)

    def close(self, *, replaced: bool = False) -> None:
        self.replaced = self.replaced or replaced
        self.waiting.put_nowait(None)

    async def messages(self) -> AsyncIterator[Message]:
        """Until it is closed."""
        while (message := await self.waiting.get()) is not None:
            yield message


SessionOutbox: TypeAlias = Outbox[pb.MasterMessage]


class Sessions:
    """A worker has at most one session; a newer one ends the older.

    An entry that a member puts into the key-value store of its world is passed on to the other members. A later world
    does not see it.
    """

    def __init__(self, taken: Mapping[int, int] | None = None) -> None:
        """``taken``: by worker, the number of its last message that an earlier master has taken and saved."""
        self._outboxes: dict[int, SessionOutbox] = {}
        self.taken = dict(taken or {})
        self._unsaved: set[int] = set()  # workers that wait to hear that what they have said is saved
        self._world = World(0, (), "")
        self._ranks: dict[int, int] = {}  # of its members
        self._alike = pb.World()  # what all of them are told of it: with many members it takes long to make
        self._entries: dict[tuple[str, str], pb.MasterMessage] = {}  # by scope and key
        # Put before a world was known, as a new master first listens.
        self._early: list[tuple[int, pb.KvPut]] = []
        self.facts = b""  # see `FACTS`; workers that come later are given it

    def open(self, worker_id: int) -> SessionOutbox:
        if older := self._outboxes.get(worker_id):
            older.close(replaced=True)
        outbox = self._outboxes[worker_id] = SessionOutbox()
        return outbox

    def close(self, worker_id: int, outbox: SessionOutbox) -> bool:
        """End this session; returns whether it was the worker's present one."""
        present = self._outboxes.get(worker_id) is outbox
        if present:
            del self._outboxes[worker_id]
        return present

    def send(self, worker_ids: Iterable[int], message: pb.MasterMessage) -> None:
        """A worker without a session misses it; the core sends it again when the worker reconnects."""
        for worker_id in worker_ids:
            if outbox := self._outboxes.get(worker_id):
                outbox.put(message)

    def take(self, worker_id: int, number: int) -> bool:
        """Whether a message of this number is new; 0 is no number. A worker repeats a message until it is saved."""
        if number == 0:
            return True
        self._unsaved.add(worker_id)
        last = self.taken.get(worker_id, 0)
        self.taken[worker_id] = max(number, last)
        return number > last

    @property
    def has_unsaved(self) -> bool:
        return bool(self._unsaved)

    def tell_when(self, saved: asyncio.Future[None]) -> None:
        """Tell the workers what of their messages is saved, once that is."""
        numbers, self._unsaved = {worker_id: self.taken[worker_id] for worker_id in self._unsaved}, set()

        def tell(saved: asyncio.Future[None]) -> None:
            if not saved.cancelled() and saved.exception() is None:
                for worker_id, number in numbers.items():
                    self.send((worker_id,), pb.MasterMessage(saved=pb.Saved(number=number)))

        if numbers:
            saved.add_done_callback(tell)

    def begin_world(self, world: World) -> None:
        """From now on entries are those of this world."""
        if world.version == self._world.version:
            return
        self._world, self._entries, members = world, {}, world.members
        self._ranks = {member.worker_id: rank for rank, member in enumerate(members)}
        root, stand = _values(members[0]), standing(members)
        self._alike = pb.World(version=world.version, reason=world.reason, size=len(members), standing=stand, root=root)
        early, self._early = self._early, []
        for worker_id, put in early:
            self.put(worker_id, put)

    def tell_world(self, worker_ids: Collection[int]) -> None:
        """The world that has begun, to these members."""
        for worker_id in worker_ids:
            rank = self._ranks[worker_id]
            message = pb.MasterMessage(world=self._alike)
            message.world.MergeFrom(pb.World(rank=rank, own=_values(self._world.members[rank])))
            self.send((worker_id,), message)
            if len(worker_ids) == 1:  # told again: it may also have missed entries
                self.replay(worker_id)

    def put(self, worker_id: int, put: pb.KvPut) -> None:
        """In a new session a member puts everything again; an entry that is known is not passed on twice."""
        if self._world.version == 0:
            self._early.append((worker_id, put))
        if put.world_version != self._world.version or worker_id not in self._ranks:
            return
        if (put.scope, put.key) == FACTS:
            self.facts = put.value if len(put.value) <= MOST_FACTS else b""
            return
        entry = pb.KvEntry(world_version=put.world_version, scope=put.scope, key=put.key, value=put.value)
        message, name = pb.MasterMessage(kv_entry=entry), (put.scope, put.key)
        if self._entries.get(name) != message:
            self._entries[name] = message
            self.send((other for other in self._ranks if other != worker_id), message)

    def replay(self, worker_id: int) -> None:
        """Send every entry again to a member that has reconnected, as it may have missed some."""
        if worker_id in self._ranks:
            for message in self._entries.values():
                self.send((worker_id,), message)


WATCH_SECONDS = 0.25
# How long open calls may take to bring their last messages across.
CLOSE_SECONDS = 2.0
# What somebody asks for is done and saved by then, or told to wait; less than callers wait for an answer.
SETTLE_SECONDS = 10.0
LAST_WORDS = ("finished", "failed")
_LEFT = "this master leaves the job to another one: ask again"


class Attending(Protocol):
    """Who speaks with the agents of the job's places."""

    async def attend(
        self,
        messages: AsyncIterator[pb.AgentMessage],
        context: Context,
        settled: Callable[[], Awaitable[bool]],
        welcome: Callable[[], pb.Welcome],
    ) -> None:
        """Serve one stream of an agent to its end. ``settled``: see `Mailbox.settled`."""


@dataclass(frozen=True, slots=True)
class Servicer(pb_grpc.MasterServicer):
    mailbox: Mailbox
    sessions: Sessions
    status: Callable[[], pb.JobStatus]
    ended: asyncio.Event  # the status will not change any more
    journal: Journal
    welcome: Callable[[], pb.Welcome]
    why_not: Callable[[WorkerRange], str]  # a job may not have so many workers; empty if it may
    agents: Attending | None = None  # None: workers are started without any

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
            await converse(outbox, self._read(worker_id, request_iterator, outbox), context, newer)
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
        if self.agents is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this job's workers are started without agents")
        await self.agents.attend(aiter(request_iterator), context, self.mailbox.settled, self.welcome)

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


async def converse(line: Outbox[Any], listen: Coroutine[Any, Any, bool], context: Context, newer: str) -> None:
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
