"""An agent's connection to its job's master: one stream, opened again when it breaks, also to the master's successor.

Nothing is kept for the next stream: each begins with everything that a master has to know.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc

from elasticdl.common.channel import metadata, open_aio_channel
from elasticdl.common.environment import WorkerEnvironment
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.common.silence import Silence, in_words
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as pb_grpc

LOOK_SECONDS = 1.0
# What a master answers to an agent that it will never take.
REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
Outbox: TypeAlias = "asyncio.Queue[pb.AgentMessage]"
Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.AgentMessage, pb.AgentOrder]"
_log = logging.getLogger(__name__)


class _ReplacedError(Exception):
    """The master has another agent for this place."""


class Link:
    """``hello``: makes the first message of a stream. ``obey``: is called with each order."""

    def __init__(
        self,
        environment: WorkerEnvironment,
        hello: Callable[[], pb.AgentHello],
        obey: Callable[[pb.AgentOrder], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._environment = environment
        self._hello = hello
        self._obey = obey
        self._clock = clock
        self._silence = Silence(environment.master, environment.master_timeout, "agent")
        self._generation = 0  # of the newest master that has answered
        self._outbox: Outbox | None = None
        self._call: Call | None = None
        self._stalled = False  # it was ended for its silence

    def say(self, **body: Any) -> None:
        """One message; without a stream it is lost, and the next Hello has to bring what is still true."""
        if self._outbox is not None:
            self._outbox.put_nowait(pb.AgentMessage(**body))

    async def keep(self) -> str:
        """Until there is no master to be had any more; returns why.

        Raises:
            UserError: the master will never take this agent.
        """
        looking = asyncio.create_task(self._look())
        try:
            while True:
                try:
                    problem = await self._attempt()
                except _ReplacedError as replaced:
                    return str(replaced)
                delay = self._silence.fail(problem)
                silence = self._silence.silence(self._clock())
                if silence > self._environment.master_timeout:
                    return f"no master at {self._environment.master} for {silence:.0f} s: {problem}"
                _log.debug("the stream to the master is interrupted: %s", problem)
                await asyncio.sleep(delay)
        finally:
            looking.cancel()

    async def _attempt(self) -> str:
        """One stream, to its end; returns why it ended."""
        try:
            await self._converse()
        except grpc.aio.AioRpcError as error:
            if error.code() in REFUSALS:
                raise UserError(f"the master at {self._environment.master} refuses: {error.details()}") from None
            if error.code() is grpc.StatusCode.ABORTED:
                raise _ReplacedError(error.details()) from None
            problem = in_words(error.details() or "")
        except asyncio.CancelledError:
            if not self._stalled:  # it is this task that is cancelled
                raise
            problem = in_words("")
        except UnreachableError as error:
            problem = str(error)
        except UserError as error:  # the own certificate is no good; if it worked before, it may be about to be renewed
            if not self._silence.met:
                raise UserError(f"no way to the master at {self._environment.master}: {error}") from None
            problem = str(error)
        else:
            problem = "the master ended the stream"
        return problem

    async def _converse(self) -> None:
        credentials = self._environment.credentials
        self._silence.begin(self._clock())
        sending = None
        try:
            async with open_aio_channel(self._environment.master, credentials) as channel:
                call: Call = pb_grpc.MasterStub(channel).Attend(metadata=metadata(credentials))
                self._call, self._stalled, self._outbox = call, False, asyncio.Queue()
                self.say(hello=self._hello())
                sending = asyncio.create_task(_send(call, self._outbox))
                async for order in call:
                    if order.HasField("welcome"):
                        self._refuse_older(order.welcome.generation)
                    if line := self._silence.answer(self._clock()):
                        _log.warning("%s", line)
                    self._obey(order)
        finally:
            self._call = self._outbox = None
            if sending is not None:
                sending.cancel()
            self._silence.end(self._clock())

    def _refuse_older(self, generation: int) -> None:
        if generation < self._generation:
            raise UnreachableError("an older master answers")
        self._generation = generation

    async def _look(self) -> None:
        """Say so if the master is not reached, and end an attempt that leads nowhere."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = self._clock()
            if line := self._silence.look(now):
                _log.warning("%s", line)
            if self._call is not None and self._silence.stalls(now):
                self._stalled = self._call.cancel()


async def _send(call: Call, outbox: Outbox) -> None:
    with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # who reads the orders hears of it
        while True:
            await call.write(await outbox.get())
