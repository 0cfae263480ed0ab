"""The gRPC stream beneath a session: opened, kept, opened again when it breaks."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import grpc

from elasticdl.common.channel import Silence, in_words, metadata, open_channel
from elasticdl.common.credentials import WorkerEnvironment
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.common.reason import one_line
from elasticdl.elastic.link.wire import to_proto
from elasticdl.job import messages as m
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as pb_grpc

# For the master to take what is still to be said; with a last word, as long as there may be no master at all.
CLOSE_SECONDS = 5.0
MOST_KEPT = 10_000  # notices, for masters that never save
# What a master answers to a worker that it will never take.
REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)

log = logging.getLogger(__name__)

Outbox = queue.SimpleQueue[m.Message | None]


class Kept:
    """The notices of this worker, which the job's history would lack, by number, until a master has saved them. Of too many the oldest goes."""

    def __init__(self) -> None:
        self._messages: deque[m.Notice] = deque(maxlen=MOST_KEPT)
        self._last = 0
        self._lock = threading.Lock()

    def add(self, message: m.Notice) -> m.Message:
        with self._lock:
            self._last += 1
            self._messages.append(replace(message, number=self._last))
            return self._messages[-1]

    def saved(self, number: int) -> None:
        """All up to this number."""
        with self._lock:
            while self._messages and self._messages[0].number <= number:
                self._messages.popleft()

    def unsaved(self) -> list[m.Message]:
        with self._lock:
            return list(self._messages)


class Listener(Protocol):
    """At the worker's end; called from the stream's thread."""

    def greet(self, unsent: Sequence[m.Message]) -> list[m.Message]:
        """A stream is open; returns its first messages. ``unsent``: what no master is known to have saved."""

    def receive(self, message: pb.MasterMessage) -> None: ...

    def lost(self, reason: str) -> None:
        """There is no master to be had; the stream has given up."""

    @property
    def has_last_word(self) -> bool:
        """Whether the greeting brings something that the master must hear before this worker ends."""


class MasterStream:
    """Sends and receives until closed.

    A notice is kept, and sent again over each new stream, until a master has saved it. The rest is sent anew by the core, or old
    by then.
    """

    def __init__(self, environment: WorkerEnvironment, clock: Callable[[], float] = time.monotonic) -> None:
        self._environment = environment
        self._listener: Listener
        self._outbox: Outbox = queue.SimpleQueue()
        self._kept = Kept()
        self._last_word_taken = threading.Event()
        self._refused = ""  # why the present connection is to end
        self._closing = threading.Event()
        self._clock = clock
        self._silence = Silence(environment.master, environment.master_timeout)
        self._call: grpc.Call | None = None  # the present one
        self._thread = threading.Thread(target=self._run, name="elasticdl-session", daemon=True)

    def open(self, listener: Listener) -> None:
        self._listener = listener
        self._thread.start()

    def send(self, message: m.Message) -> None:
        self._outbox.put(self._kept.add(message) if isinstance(message, m.Notice) else message)

    def wait_until_taken(self) -> None:
        """For the master to take a last word (bounded): this process may end itself without another.

        That it was sent is not enough: gRPC drops what its server has not read when the connection breaks.
        """
        self._last_word_taken.wait(CLOSE_SECONDS)

    def refuse(self, reason: str) -> None:
        """End the present connection, and look for the master again; called from the stream's own thread."""
        self._refused = reason

    def look(self) -> None:
        """Say so if the master is not reached, and end an attempt that leads nowhere; to be called regularly."""
        now = self._clock()
        if line := self._silence.look(now):
            log.warning("%s", line)
        call = self._call
        if call is not None and self._silence.stalls(now):
            call.cancel()  # type: ignore[no-untyped-call]  # of gRPC

    def close(self) -> None:
        """Send what is queued, end the stream and wait (bounded) for the master to take it.

        A last word is not given up because there is no master at the moment: without it a worker that has finished would
        be missed and replaced.
        """
        patience = self._environment.master_timeout if self._listener.has_last_word else 0.0
        self._closing.set()
        self._outbox.put(None)
        self._thread.join(timeout=CLOSE_SECONDS + patience)

    def _run(self) -> None:
        try:
            self._keep()
        except Exception as error:
            log.exception("the session with the master has failed")
            self._listener.lost(f"the session with the master has failed: {one_line(error)}")

    def _keep(self) -> None:
        while not self._closing.is_set() or self._listener.has_last_word:
            try:
                self._converse()
                if self._closing.is_set() and (self._last_word_taken.is_set() or not self._listener.has_last_word):
                    return
                problem = "the master ended the session"
            except (grpc.RpcError, UserError, UnreachableError) as error:
                problem = in_words(error.details() or "") if isinstance(error, grpc.Call) else str(error)
                if refused := self._refusal(error):
                    self._listener.lost(f"no session with the master at {self._environment.master}: {refused}")
                    return
            delay = self._silence.fail(problem)
            silence = self._silence.silence(self._clock())
            if silence > self._environment.master_timeout:
                self._listener.lost(f"no master at {self._environment.master} for {silence:.0f} s: {problem}")
                return
            log.debug("session with the master interrupted: %s", problem)
            if self._closing.is_set():
                time.sleep(delay)
                self.look()  # nobody else does so any more
            else:
                self._closing.wait(delay)

    def _refusal(self, error: Exception) -> str | None:
        """Why trying again is of no use, if it is not."""
        if isinstance(error, grpc.Call) and error.code() in REFUSALS:
            return error.details()
        # The own certificate is no good. If it worked before, it may only not be readable at the moment.
        return str(error) if isinstance(error, UserError) and not self._silence.met else None

    def _converse(self) -> None:
        outbox = self._outbox
        credentials = self._environment.credentials
        self._silence.begin(self._clock())
        with open_channel(self._environment.master, credentials) as channel:
            call = pb_grpc.MasterStub(channel).Session(self._messages(outbox), metadata=metadata(credentials))
            self._call, self._refused = call, ""
            try:
                for message in call:
                    if message.HasField("last_word_taken"):
                        self._last_word_taken.set()
                    self._kept.saved(message.saved.number)
                    self._listener.receive(message)
                    if self._refused:
                        raise UnreachableError(self._refused)
                    if line := self._silence.answer(self._clock()):
                        log.warning("%s", line)
            finally:
                self._call = None
                self._silence.end(self._clock())
                # The old stream's sender may still wait on the old queue: it must not take the new one's messages.
                self._outbox = queue.SimpleQueue()
                if self._closing.is_set():
                    self._outbox.put(None)
                outbox.put(None)

    def _messages(self, outbox: Outbox) -> Iterator[pb.WorkerMessage]:
        yield from (to_proto(message, self._environment) for message in self._listener.greet(self._kept.unsaved()))
        while (message := outbox.get()) is not None:
            yield to_proto(message, self._environment)
