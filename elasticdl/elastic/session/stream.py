"""The gRPC stream beneath a session: opened, kept, opened again when it breaks."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import grpc

from elasticdl.common.channel import metadata, open_channel
from elasticdl.common.environment import WorkerEnvironment
from elasticdl.common.errors import UserError
from elasticdl.common.handshake import refusal
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as pb_grpc

RECONNECT_SECONDS = 0.2
# For the master to take what is still to be said; with a last word, as long as there may be no master at all.
CLOSE_SECONDS = 5.0
# Kinds of messages that the job's history would lack.
LASTING = ("notice", "pause")
# What a master answers to a worker that it will never take.
REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)

log = logging.getLogger(__name__)

Outbox = queue.SimpleQueue[pb.WorkerMessage | None]


class Listener(Protocol):
    """What a session does for its stream; called from the stream's thread."""

    def greeting(self, unsaid: Sequence[pb.WorkerMessage]) -> Sequence[pb.WorkerMessage]:
        """First messages of each new stream: Hello, what is still true, and ``unsaid``, before any last word."""

    def take(self, message: pb.MasterMessage) -> None:
        """A message from the master."""

    def lost(self, reason: str) -> None:
        """There is no master to be had; the stream has given up."""

    @property
    def has_last_word(self) -> bool:
        """Whether the greeting brings something that the master must hear before this worker ends."""


class MasterStream:
    """Sends and receives until closed.

    What is said while there is no master is for the next one if it is of lasting interest (``LASTING``); the rest is
    said anew, or old by then. What a breaking stream had taken already is lost with it.
    """

    def __init__(self, environment: WorkerEnvironment, listener: Listener) -> None:
        self._environment = environment
        self._listener = listener
        self._outbox: Outbox = queue.SimpleQueue()
        self._under_way: pb.WorkerMessage | None = None  # given to gRPC, which has not asked for another since
        self._unsaid: list[pb.WorkerMessage] = []
        self._awaited: pb.WorkerMessage | None = None
        self._handed = threading.Event()  # to the connection: what is awaited
        self._closing = threading.Event()
        self._last_contact = time.monotonic()
        self._met = False
        self._thread = threading.Thread(target=self._keep, name="elasticdl-session", daemon=True)

    def open(self) -> None:
        self._thread.start()

    def send(self, message: pb.WorkerMessage) -> None:
        self._outbox.put(message)

    def send_at_once(self, message: pb.WorkerMessage) -> None:
        """Send, and wait (bounded) until it is on its way: this process may end itself without another word."""
        self._handed.clear()
        self._awaited = message
        self.send(message)
        self._handed.wait(CLOSE_SECONDS)

    def close(self) -> None:
        """Send what is queued, end the stream and wait (bounded) for the master to take it.

        A last word is not given up because there is no master at the moment: without it a worker that has finished would
        be missed and replaced.
        """
        patience = self._environment.master_timeout if self._listener.has_last_word else 0.0
        self._closing.set()
        self._outbox.put(None)
        self._thread.join(timeout=CLOSE_SECONDS + patience)

    def _keep(self) -> None:
        while not self._closing.is_set() or self._listener.has_last_word:
            try:
                self._converse()
                if self._closing.is_set():
                    return
                problem = "the master ended the session"
            except (grpc.RpcError, UserError) as error:
                problem = error.details() or "" if isinstance(error, grpc.Call) else str(error)
                if refused := self._refusal(error):
                    self._listener.lost(f"no session with the master at {self._environment.master}: {refused}")
                    return
            silence = time.monotonic() - self._last_contact
            if silence > self._environment.master_timeout:
                self._listener.lost(f"no master at {self._environment.master} for {silence:.0f} s: {problem}")
                return
            log.debug("session with the master interrupted: %s", problem)
            if self._closing.is_set():
                time.sleep(RECONNECT_SECONDS)
            else:
                self._closing.wait(RECONNECT_SECONDS)

    def _refusal(self, error: Exception) -> str | None:
        """Why trying again is of no use, if it is not."""
        if isinstance(error, grpc.Call) and error.code() in REFUSALS:
            return error.details()
        if self._met:  # it worked before: certificates may be about to be renewed, and will match again
            return None
        return refusal(self._environment.master, self._environment.credentials)

    def _converse(self) -> None:
        outbox = self._outbox
        credentials = self._environment.credentials
        with open_channel(self._environment.master, credentials) as channel:
            call = pb_grpc.MasterStub(channel).Session(self._messages(outbox), metadata=metadata(credentials))
            spoken = False
            try:
                for message in call:
                    spoken = self._met = True
                    self._listener.take(message)
            finally:
                if spoken:  # until now there was a master, however little it had to say
                    self._last_contact = time.monotonic()
                # The old stream's sender may still wait on the old queue: it must not take the new one's messages.
                self._outbox = queue.SimpleQueue()
                if self._closing.is_set():
                    self._outbox.put(None)
                self._unsaid += [message for message in self._left(outbox) if message.WhichOneof("body") in LASTING]
                outbox.put(None)

    def _messages(self, outbox: Outbox) -> Iterator[pb.WorkerMessage]:
        unsaid = list(self._unsaid)
        yield from self._listener.greeting(unsaid)
        del self._unsaid[: len(unsaid)]
        while (message := outbox.get()) is not None:
            self._under_way = message
            yield message
            self._under_way = None
            if message is self._awaited:
                self._handed.set()

    def _left(self, outbox: Outbox) -> Iterator[pb.WorkerMessage]:
        """What a stream that is over has not sent."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            yield under_way
        with contextlib.suppress(queue.Empty):
            while True:
                if (message := outbox.get_nowait()) is not None:
                    yield message
