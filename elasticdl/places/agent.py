"""`python -m elasticdl.places.agent`: starts workers in the place that it is in, a pod or a job of a batch system, as its job's master
orders.

It is started with the environment of a worker, but for the number, and the place's id. It imports next to nothing itself,
as it stays beside its worker: what workers need is imported by the process that they are forked from.

Its worker goes on when the master ends, and what became of the worker is told to the next one. SIGTERM is passed on to
the worker; the agent ends once the worker's end is told.

Exit codes: 0 told to leave by the master, 1 no master for too long, or another agent has the place, 2 the user's mistake (one
line on stderr), 143 told to leave (SIGTERM).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from elasticdl.common.channel import NO_ANSWER, Silence, in_words, metadata, open_aio_channel, own_address
from elasticdl.common.credentials import HOST, LOGS, MASTER, NODE, PLACE, WORKER_ID, WorkerEnvironment
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.common.front_ends import RUN_MODULE, environment_of_workers
from elasticdl.common.retry import Background
from elasticdl.places.worker_process import InFile, MemoryKills, PassedOn, Spawner, WorkerRun
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as pb_grpc

# An agent's connection to its job's master: one stream, opened again when it breaks, also to the master's successor.
#
# Nothing is kept for the next stream: each begins with everything that a master has to know.


LOOK_SECONDS = 1.0
# What a master answers to an agent that it will never take.
REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
Outbox: TypeAlias = "asyncio.Queue[pb.AgentMessage]"
Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.AgentMessage, pb.AgentOrder]"
_link_log = logging.getLogger(__name__)


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
            UserError: the master will never take this agent, or the agent's certificate is no good.
        """
        looking = asyncio.create_task(self._look())
        try:
            while True:
                try:
                    await self._converse()
                    problem = "the master ended the stream"
                except grpc.aio.AioRpcError as error:
                    if error.code() in REFUSALS:
                        raise UserError(
                            f"the master at {self._environment.master} refuses: {error.details()}"
                        ) from None
                    if error.code() is grpc.StatusCode.ABORTED:  # the master has another agent for this place
                        return error.details() or ""
                    problem = in_words(error.details() or "")
                except asyncio.CancelledError:
                    if not self._stalled:  # it is this task that is cancelled
                        raise
                    problem = NO_ANSWER
                except UnreachableError as error:
                    problem = str(error)
                except UserError as error:  # if its certificate was good before, it may be read again
                    if not self._silence.met:
                        raise
                    problem = str(error)
                delay = self._silence.fail(problem)
                silence = self._silence.silence(self._clock())
                if silence > self._environment.master_timeout:
                    return f"no master at {self._environment.master} for {silence:.0f} s: {problem}"
                _link_log.debug("the stream to the master is interrupted: %s", problem)
                await asyncio.sleep(delay)
        finally:
            looking.cancel()

    async def _converse(self) -> None:
        """One stream, to its end."""
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
                        if order.welcome.generation < self._generation:
                            raise UnreachableError("an older master answers")
                        self._generation = order.welcome.generation
                    if line := self._silence.answer(self._clock()):
                        _link_log.warning("%s", line)
                    self._obey(order)
        finally:
            self._call = self._outbox = None
            if sending is not None:
                sending.cancel()
            self._silence.end(self._clock())

    async def _look(self) -> None:
        """Say so if the master is not reached, and end an attempt that leads nowhere."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = self._clock()
            if line := self._silence.look(now):
                _link_log.warning("%s", line)
            if self._call is not None and self._silence.stalls(now):
                self._stalled = self._call.cancel()


async def _send(call: Call, outbox: Outbox) -> None:
    with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # who reads the orders hears of it
        while True:
            await call.write(await outbox.get())


EXIT_LOST, EXIT_USER_ERROR, EXIT_TERMINATED = 1, 2, 128 + signal.SIGTERM
# For a worker to leave by itself when there is no master any more.
END_SECONDS = 60.0
# For the master to take a worker's end before the agent's own.
TELL_SECONDS = 5.0
_log = logging.getLogger("elasticdl.places.agent")  # by which its lines are told from those of its workers


class Agent:
    """``say``: sends a body of an `AgentMessage`, or nothing where there is no master."""

    def __init__(
        self,
        about: pb.AgentHello,
        environment: Mapping[str, str],
        spawner: asyncio.Future[Spawner],
        logs: Path | None,
        say: Callable[..., None],
    ) -> None:
        self._about = about
        self._environment = environment
        self._spawner = spawner
        self._logs = logs
        self._say = say
        self._runs: dict[int, WorkerRun] = {}  # the first has the place; one that follows waits until that is gone
        self._turn = asyncio.Lock()
        self._memory_kills = MemoryKills()
        self._untold: dict[int, pb.Ended] = {}
        self._leaving = ""
        self._background = Background("workers are looked after", self._fail)
        self.exit_code = 0
        self.over = asyncio.Event()

    def hello(self) -> pb.AgentHello:
        hello = pb.AgentHello(leaving=self._leaving, untold=self._untold.values())
        hello.MergeFrom(self._about)
        if run := next(iter(self._runs.values()), None):
            hello.running.CopyFrom(pb.Started(worker_id=run.worker_id, pid=run.process.pid if run.process else 0))
        return hello

    def obey(self, order: pb.AgentOrder) -> None:
        match order.WhichOneof("body"):
            case "start":
                self._start(order.start)
            case "end":
                if run := self._runs.get(order.end.worker_id):
                    run.end(order.end.grace if order.end.HasField("grace") else None)
            case "end_taken":
                self._untold.pop(order.end_taken.worker_id, None)
                self._end_if_over()
            case "read_stacks":
                if run := self._runs.get(order.read_stacks.worker_id):
                    self._background.start(self._tell_stacks(run))
            case "leave":
                self._untold.clear()  # this master needs to hear of no end, and none follows
                self.leave("the master gives the place back", 0, grace=0)

    def leave(self, reason: str, exit_code: int, grace: float | None = None) -> None:
        """Start nobody any more, and end when the worker has ended and that is told."""
        self.end_workers(grace)
        if not self._leaving:
            _log.info("leaving the place: %s", reason)
            self._leaving, self.exit_code = reason, exit_code
            self._say(leaving=pb.Leaving(reason=reason))
        self._end_if_over()

    def end_workers(self, grace: float | None) -> None:
        for run in self._runs.values():
            run.end(grace)

    async def close(self) -> None:
        """Until nothing of a worker is left, which may take as long as that is given."""
        await self._background.wait()

    def _end_if_over(self) -> None:
        if not self._leaving or self._runs:
            return
        if self._untold:
            asyncio.get_running_loop().call_later(TELL_SECONDS, self.over.set)
        else:
            self.over.set()

    def _start(self, order: pb.Start) -> None:
        worker_id = order.worker_id
        if worker_id in self._runs or worker_id in self._untold:
            return  # ordered again, by a master that did not know
        if self._leaving:
            self._tell_end(pb.Ended(worker_id=worker_id, code=-signal.SIGTERM))
        else:
            output = InFile(self._log(worker_id)) if self._logs else PassedOn()
            run = self._runs[worker_id] = WorkerRun(worker_id, output)
            if not self._spawner.done():
                _log.info("worker %d starts when what it needs is imported", worker_id)
            self._background.start(self._live(run, {**self._environment, **order.environment}))

    def _fail(self, why: str) -> None:
        """The place is given up: its worker's end could not be told."""
        self.exit_code = 1
        self.end_workers(0)
        self.over.set()

    async def _live(self, run: WorkerRun, environment: Mapping[str, str]) -> None:
        async with self._turn:
            # In a log that all workers share: what follows is its own.
            _log.info("starting worker %d", run.worker_id)

            def placed(pid: int) -> None:
                self._say(started=pb.Started(worker_id=run.worker_id, pid=pid))

            # The place outlives the worker, and what is left in it may hold the GPU of the next.
            self._tell_end(await run.ended(self._spawner, environment, placed, self._memory_kills, with_sessions=True))
        if run.left:
            await run.left

    def _tell_end(self, ended: pb.Ended) -> None:
        """Once for each worker, and again in each Hello until a master has taken it."""
        _log.info("worker %d has ended: %s", ended.worker_id, ended.problem or f"exit code {ended.code}")
        self._runs.pop(ended.worker_id, None)
        self._untold[ended.worker_id] = ended
        self._say(ended=ended)
        self._end_if_over()

    def _log(self, worker_id: int) -> Path:
        """Where what the worker prints goes to."""
        return self._logs / f"worker-{worker_id}.log" if self._logs else Path("/dev/stderr")

    async def _tell_stacks(self, run: WorkerRun) -> None:
        if found := await run.look(self._log(run.worker_id)):
            self._say(looked=pb.Looked(**asdict(found)))


async def prepare(job_spec: str, environment: Mapping[str, str]) -> Spawner:
    """Find out how workers are started, and begin to import what they need.

    Raises:
        UserError: the specification can't be read.
    """
    program = (*RUN_MODULE, "elasticdl.places.preload", job_spec)
    child = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE)
    try:
        printed, _ = await child.communicate()
    finally:
        if child.returncode is None:  # the agent ends
            child.kill()
            await child.wait()
    if child.returncode:
        raise UserError(f"can't tell how workers are started: {' '.join(program)} ended with code {child.returncode}")
    argv, modules, reason = json.loads(printed)
    return Spawner(argv, modules, reason, environment, sys.stderr.fileno())


async def attend(environ: Mapping[str, str]) -> int:
    """Until the place is over; returns the exit code.

    Raises:
        UserError: a variable is missing or wrong, or the master will never take this agent.
        UnreachableError: it is not known where the master is.
    """
    if environ.get(MASTER) and not environ.get(HOST):
        environ = {**environ, HOST: own_address(environ[MASTER])}
    environment = WorkerEnvironment.from_env({**environ, WORKER_ID: "0"})
    if environment is None or not environ.get(PLACE):
        missing = PLACE if environment else MASTER
        raise UserError(f"{missing} is not set: an agent is started by what provides the places of a job")
    about = pb.AgentHello(place=environ[PLACE], node=environ.get(NODE, ""), host=environment.host)
    base = {**environment_of_workers(environ), **environment.to_env()}
    spawner = asyncio.ensure_future(prepare(environment.job_spec, base))
    logs = Path(environ[LOGS]) if environ.get(LOGS) else None
    agent = Agent(about, base, spawner, logs, lambda **body: link.say(**body))
    link = Link(environment, agent.hello, agent.obey)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, partial(agent.leave, f"it got {number.name}", EXIT_TERMINATED))
    linked, over = asyncio.ensure_future(link.keep()), asyncio.ensure_future(agent.over.wait())
    awaited: set[asyncio.Future[Any]] = {linked, over, spawner}
    try:
        while not over.done():
            done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            awaited -= done
            if spawner in done:
                spawner.result()
            if linked in done:
                agent.leave(linked.result(), EXIT_LOST, END_SECONDS)
                break
    finally:
        for task in (linked, over):
            task.cancel()
        agent.end_workers(END_SECONDS)
        spawner.cancel()  # if it still looks how workers are started, which may never end
        await agent.close()
        with contextlib.suppress(UserError, asyncio.CancelledError):
            await (await spawner).close()
    return agent.exit_code


def main() -> int:
    name = os.environ.get(PLACE, "agent")
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s")
    try:
        return asyncio.run(attend(os.environ))
    except (UserError, UnreachableError) as error:
        print(f"elasticdl: {error}", file=sys.stderr)
        return EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_LOST


if __name__ == "__main__":
    sys.exit(main())
