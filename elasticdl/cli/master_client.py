"""A client of one master: every call has a deadline, and a failed one is an error of this project."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from elasticdl.common.channel import grpc, metadata, open_channel
from elasticdl.common.credentials import Endpoint
from elasticdl.common.errors import RefusedError, UnreachableError, UserError
from elasticdl.common.silence import NO_HANDSHAKE, in_words
from elasticdl.job.spec import WorkerRange
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as rpc

CALL_TIMEOUT = 20.0  # seconds; the master answers from memory, but on a busy cluster the way to it takes its time

# What the master refuses with a reason that is meant for the person.
REFUSALS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}
# What it refuses because of who asks.
STRANGERS = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}

Reply = TypeVar("Reply")


class MasterClient:
    """The calls of the command line. Use `connect`, which closes the channel."""

    def __init__(self, channel: grpc.Channel, master: Endpoint) -> None:
        self._channel = channel
        self._stub = rpc.MasterStub(channel)
        self._master = master
        self._metadata = metadata(master.credentials)
        self._under_way: list[grpc.Future[pb.StopReply]] = []  # a call that nobody holds is cancelled

    def status(self) -> pb.JobStatus:
        status: pb.JobStatus = self._call(self._stub.Status, pb.StatusRequest())
        return status

    def scale(self, workers: WorkerRange) -> str:
        """Returns what the master says about it."""
        request = pb.ScaleRequest(min_workers=workers.minimum, max_workers=workers.maximum)
        reply: pb.ScaleReply = self._call(self._stub.Scale, request)
        return reply.message

    def stop(self, reason: str, checkpoint: bool = True, now: bool = False) -> None:
        self._call(self._stub.Stop, pb.StopRequest(reason=reason, checkpoint=checkpoint, now=now))

    def stop_soon(self, reason: str, now: bool = False) -> None:
        """As `stop`, without waiting for the answer; with a checkpoint unless it is to be ``now``."""
        request = pb.StopRequest(reason=reason, checkpoint=not now, now=now)
        self._under_way.append(self._stub.Stop.future(request, metadata=self._metadata, timeout=CALL_TIMEOUT))

    def watch(self) -> Iterator[pb.JobStatus]:
        """The status now and after each change, until the job has ended."""
        with self._translated():
            yield from self._stub.Watch(pb.StatusRequest(), metadata=self._metadata)

    def events(self, after: int = 0, *, follow: bool) -> Iterator[str]:
        """The lines of the journal so far and, when following, those to come until the job has ended; ``after``: of greater numbers."""
        timeout = None if follow else CALL_TIMEOUT
        request = pb.EventsRequest(follow=follow, after=after)
        with self._translated():
            for entry in self._stub.Events(request, metadata=self._metadata, timeout=timeout):
                yield entry.json

    def close(self) -> None:
        """Streams that still run end with UnreachableError."""
        self._channel.close()

    def _call(self, method: Callable[..., Reply], request: object) -> Reply:
        with self._translated():
            return method(request, metadata=self._metadata, timeout=CALL_TIMEOUT)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if code in REFUSALS:
                raise UserError(details) from error
            if code in STRANGERS:
                raise RefusedError(f"{self._master.title} refused: {details}") from error
            if code is grpc.StatusCode.UNAVAILABLE:
                words = in_words(details or "")
                kind = RefusedError if words == NO_HANDSHAKE else UnreachableError
                raise kind(f"{self._master.title} is not reached: {words}") from error
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise UnreachableError(
                    f"{self._master.title} did not answer in {CALL_TIMEOUT:g} s; it may have done what it was asked for"
                ) from error
            raise UnreachableError(f"{self._master.title} did not answer: {code.name.lower()}: {details}") from error


@contextmanager
def connect(master: Endpoint) -> Iterator[MasterClient]:
    """A client that is closed at the end."""
    with open_channel(master.address, master.credentials) as channel:
        yield MasterClient(channel, master)
