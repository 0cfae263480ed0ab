"""The master's end of the agents: a `Starter` whose workers are started by whoever is in the place (`elasticdl.places.agent`).

| what happens                                 | what follows                                                                 |
| -------------------------------------------- | ---------------------------------------------------------------------------- |
| a worker is to start, no agent is there yet  | the agent gets the order when it has said Hello; if that is late, the worker is pending |
| an agent says Hello                          | what it has not heard is ordered again; what it says of workers is news      |
| its stream breaks                            | nothing: the worker may go on, and the agent comes back, or the place is lost |
| it says that a worker has ended              | reported once; the agent may forget it when that is acted upon and saved     |
| it has a worker that nobody knows            | `WorkerPlaced`: an earlier master's, which the launcher ends                 |
| its worker is gone, as the agent is another  | the worker has ended with the agent before                                   |
| a place is lost                              | its worker is forgotten; an agent that shows itself there is told to leave   |
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from elasticdl.common.retry import Background, until
from elasticdl.master.core.events import (
    ExitCause,
    FoundWorker,
    LauncherFailed,
    StacksFound,
    WorkerExited,
    WorkerPending,
    WorkerPlaced,
)
from elasticdl.master.shell.calls import Context, Outbox, converse
from elasticdl.places.base import STACKS_SECONDS, Place, PlaceEnding, PlaceState, StarterReport
from elasticdl.places.worker_process import judge_process
from elasticdl.proto import elasticdl_pb2 as pb

Settled = Callable[[], Awaitable[bool]]
_LEAVE = pb.AgentOrder(leave=pb.Leave())


# What is yet to be sent to one agent.
Line: TypeAlias = Outbox[pb.AgentOrder]


@dataclass(slots=True)
class Tenant:
    """A worker that was started in a place, or found there, and whose end is not reported."""

    worker_id: int
    place: str
    start: pb.Start | None = None  # the order; None: another master's
    ordered: bool = False  # an agent may have had it
    placed: bool = False
    end: pb.End | None = None


class Agents:
    # For the agents that an earlier master has left to come. An agent looks for its master every second, but the new one's address may
    # have to be known on its node first.
    find_seconds = 30.0
    # For the agents of the other places: who is in these the earlier master has remembered. By then most agents have come.
    soon_seconds = 3.0
    late_seconds = 10.0  # so long an agent may take to come without anybody being told
    close_seconds = 15.0  # for workers to be gone

    def __init__(self) -> None:
        self._report: StarterReport = lambda event: None
        self._lines: dict[str, Line] = {}  # by place, of the agents that are connected
        self._hellos: dict[str, pb.AgentHello] = {}  # by place, of the last agent
        self._tenants: dict[int, Tenant] = {}
        self._lost: set[str] = set()
        self._looks: dict[
            int, asyncio.TimerHandle
        ] = {}  # by worker whose agent is asked where it stands, until it answers or is late
        self._background = Background("ends of workers are taken", lambda why: self._report(LauncherFailed(why)))
        self._changed = asyncio.Event()  # somebody has said Hello, or a worker has ended
        self._closed = self._detached = False
        # What agents say is heard from then on: it must not come before what is found.
        self.begun = asyncio.Event()

    def reporting_to(self, report: StarterReport) -> Agents:
        """A `StarterFactory`."""
        self._report = report
        return self

    # ---- from agents ----

    async def attend(
        self,
        messages: AsyncIterator[pb.AgentMessage],
        context: Context,
        settled: Settled,
        welcome: Callable[[], pb.Welcome],
    ) -> None:
        """See `elasticdl.master.shell.calls.Attending`."""
        first = await anext(messages, None)
        if first is None or first.WhichOneof("body") != "hello" or not first.hello.place:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "an agent begins with AgentHello, with its place")
        line, place = self.open(first.hello, settled), first.hello.place
        line.put(pb.AgentOrder(welcome=welcome()))

        async def listen() -> bool:
            await self.begun.wait()
            self.greet(line, first.hello)
            async for message in messages:
                self.hear(line, place, message)
            return True

        try:
            await converse(line, listen(), context, f"a newer agent of place {place} has come")
        finally:
            self.closed(line, place)

    def open(self, hello: pb.AgentHello, settled: Settled) -> Line:
        """A new stream, and how it begins; of two agents in one place the newer stays.

        ``settled``: waits until all that was reported is acted upon and saved; False: it may never be.
        """
        if older := self._lines.get(hello.place):
            older.close(replaced=True)
        line, self._settled = Line(), settled
        if self._detached:
            line.close()
            return line
        self._lines[hello.place] = line
        self._hellos[hello.place] = hello
        self._changed.set()
        return line

    def greet(self, line: Line, hello: pb.AgentHello) -> None:
        """What it has said first; once `begun` is set."""
        place = hello.place
        if self._lines.get(place) is not line:
            return
        if place in self._lost:
            line.put(_LEAVE)
            return
        if hello.leaving:
            self._ending(place)
        for ended in hello.untold:
            self._ended(line, ended)
        running = hello.running.worker_id if hello.HasField("running") else None
        if running is not None:
            self._know(running, place)
        for tenant in self._in(place):
            if tenant.worker_id == running:
                self._placed(tenant, hello.running.pid)
                self._order_end(tenant)
            elif tenant.start is not None and not tenant.placed:
                self._order_start(tenant)
            else:
                self._gone(tenant, "the agent that had started it is gone")
        if self._closed:
            line.put(_LEAVE)

    def hear(self, line: Line, place: str, message: pb.AgentMessage) -> None:
        """Nothing that a replaced agent says is news, nor what is said of a lost place."""
        if self._lines.get(place) is not line or place in self._lost:
            return
        match message.WhichOneof("body"):
            case "started":
                self._placed(self._know(message.started.worker_id, place), message.started.pid)
            case "ended":
                self._ended(line, message.ended)
            case "leaving":
                self._ending(place)
            case "looked":
                looked = message.looked
                if timer := self._looks.pop(looked.worker_id, None):
                    timer.cancel()
                self._report(StacksFound(looked.worker_id, looked.text, looked.state, looked.has_session))

    def closed(self, line: Line, place: str) -> None:
        """This stream is over."""
        if self._lines.get(place) is line:
            del self._lines[place]

    # ---- the port ----

    async def found(self, places: Sequence[Place], remembered: Mapping[int, str]) -> Sequence[FoundWorker]:
        held = {place.id: place for place in places if place.state in (PlaceState.READY, PlaceState.ENDING)}
        known = set(remembered.values())
        # Places in which there may be a worker of which only the agent knows.
        unsure = {each.id for each in held.values() if each.state is PlaceState.READY and "" in known} - known
        await until(lambda: unsure <= self._hellos.keys(), self._changed, self.find_seconds)
        await until(lambda: held.keys() <= self._hellos.keys(), self._changed, self.soon_seconds)
        asyncio.get_running_loop().call_soon(self.begun.set)
        heard = [found for each in sorted(held.keys() & self._hellos) for found in self._found(self._hellos[each])]
        silent = held.keys() - self._hellos.keys()
        late = [self._remember(number, held[each]) for number, each in sorted(remembered.items()) if each in silent]
        return [*heard, *late]

    def start(self, worker_id: int, place: Place) -> None:
        if self._closed:
            return
        order = pb.Start(worker_id=worker_id, environment=dict(place.environment))
        tenant = self._tenants[worker_id] = Tenant(worker_id, place.id, order)
        if place.id in self._lines:
            self._order_start(tenant)
        else:
            asyncio.get_running_loop().call_later(self.late_seconds, self._is_late, tenant, place.node)

    def _is_late(self, tenant: Tenant, node: str) -> None:
        if self._tenants.get(tenant.worker_id) is tenant and not tenant.ordered:
            self._report(WorkerPending(tenant.worker_id, "the agent of its place has not come yet", node))

    def end(self, worker_id: int, grace: float | None) -> None:
        if tenant := self._tenants.get(worker_id):
            tenant.end = pb.End(worker_id=worker_id, grace=grace)
            if tenant.ordered:
                self._order_end(tenant)
            else:
                self._gone(tenant, "it was not started yet")

    def lost(self, place_id: str) -> None:
        self._lost.add(place_id)
        self._hellos.pop(place_id, None)
        for tenant in self._in(place_id):
            del self._tenants[tenant.worker_id]
        if line := self._lines.get(place_id):
            line.put(_LEAVE)
        self._changed.set()

    def read_stacks(self, worker_id: int) -> None:
        tenant = self._tenants.get(worker_id)
        if tenant is None or not tenant.placed:
            return
        line = self._lines.get(tenant.place)
        if line:
            line.put(pb.AgentOrder(read_stacks=pb.ReadStacks(worker_id=worker_id)))
        if worker_id not in self._looks:
            later = asyncio.get_running_loop().call_later
            self._looks[worker_id] = later(STACKS_SECONDS if line else 0.0, self._saw_nothing, worker_id)

    async def close(self, *, keep: bool = False) -> None:
        """Agents that are to keep their workers look for the next master as soon as they miss this one."""
        if keep:
            self._detached = True
            self._report = lambda event: None  # timers may still run
            for line in self._lines.values():
                line.close()
            self._lines.clear()
            return
        self._closed = True
        for worker_id in list(self._tenants):
            self.end(worker_id, 0)
        await until(lambda: not self._tenants, self._changed, self.close_seconds)
        for line in self._lines.values():
            line.put(_LEAVE)

    # ---- what both need ----

    def _found(self, hello: pb.AgentHello) -> Iterator[FoundWorker]:
        for ended in hello.untold:
            yield self._adopt(hello, ended.worker_id, 0, over=True)
        if hello.HasField("running"):
            yield self._adopt(hello, hello.running.worker_id, hello.running.pid)

    def _adopt(self, hello: pb.AgentHello, worker_id: int, pid: int, *, over: bool = False) -> FoundWorker:
        self._tenants[worker_id] = Tenant(worker_id, hello.place, ordered=True, placed=bool(pid))
        return FoundWorker(worker_id, hello.host, pid, over=over, node=hello.node, place=hello.place)

    def _remember(self, worker_id: int, place: Place) -> FoundWorker:
        """The agent of its place is late. Whether the worker still runs, the agent will say when it comes."""
        self._tenants[worker_id] = Tenant(worker_id, place.id, ordered=True)
        return FoundWorker(worker_id, place.node or place.id, node=place.node, place=place.id)

    def _in(self, place: str) -> list[Tenant]:
        return [tenant for tenant in self._tenants.values() if tenant.place == place]

    def _know(self, worker_id: int, place: str) -> Tenant:
        """A worker that an agent has, be it another master's."""
        return self._tenants.setdefault(worker_id, Tenant(worker_id, place, ordered=True))

    def _order_start(self, tenant: Tenant) -> None:
        tenant.ordered = True
        self._lines[tenant.place].put(pb.AgentOrder(start=tenant.start))
        self._order_end(tenant)

    def _order_end(self, tenant: Tenant) -> None:
        if tenant.end is not None and (line := self._lines.get(tenant.place)):
            line.put(pb.AgentOrder(end=tenant.end))

    def _saw_nothing(self, worker_id: int) -> None:
        del self._looks[worker_id]
        if worker_id in self._tenants:
            self._report(StacksFound(worker_id, "", "the agent of its place does not answer"))

    def _placed(self, tenant: Tenant, pid: int) -> None:
        if pid and not tenant.placed:
            tenant.placed = True
            about = self._hellos[tenant.place]
            self._report(WorkerPlaced(tenant.worker_id, about.host, pid, about.node))

    def _ended(self, line: Line, ended: pb.Ended) -> None:
        if tenant := self._tenants.get(ended.worker_id):
            self._tell_end(tenant, judge_process(ended))
        self._background.start(self._take_if_settled(line, ended.worker_id))

    async def _take_if_settled(self, line: Line, worker_id: int) -> None:
        """The agent may forget a worker's end, once a master that follows this one would know of it; or none follows."""
        if self._closed or await self._settled():
            line.put(pb.AgentOrder(end_taken=pb.EndTaken(worker_id=worker_id)))

    def _ending(self, place: str) -> None:
        if not self._closed:  # else it was told so here
            self._report(PlaceEnding(place))

    def _gone(self, tenant: Tenant, detail: str) -> None:
        self._tell_end(tenant, WorkerExited(tenant.worker_id, ExitCause.KILLED, -signal.SIGKILL, detail))

    def _tell_end(self, tenant: Tenant, exited: WorkerExited) -> None:
        del self._tenants[tenant.worker_id]
        self._report(exited)
        self._changed.set()
