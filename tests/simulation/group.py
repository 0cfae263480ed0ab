"""A worker of several processes: the process that speaks for them, with the real `GroupCore`, and what the processes agree upon among themselves.

Each process holds the shards of its number, and has collectives with its equals in the other workers alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elasticdl.elastic.core.protocol import ALONE
from elasticdl.master.core.events import ExitCause
from elasticdl.places import group_core as g
from elasticdl.proto import elasticdl_pb2 as pb
from tests.simulation.collectives import Collectives
from tests.simulation.lineage import Model, Violation
from tests.simulation.network import Stream

if TYPE_CHECKING:
    from tests.simulation.masters import Master
    from tests.simulation.process import Process
    from tests.simulation.site import Site

NOTICED = 0.02  # seconds until the end of a process is heard of
# ``alone``: more than a process takes to close its session.
WAITS = g.Waits(hold=0.1, alone=6.0, unsaid=0.3, ending=math.inf)
KEPT_WHOLE = "all processes of a worker keep the state, or none does"
END_TOGETHER = "the processes of a worker end together"
ONE_MOMENT = "the processes of a worker hold shards of one model"


class Group:
    """Its processes, from their start to the end of the last."""

    def __init__(self, site: Site, worker_id: int, make: Callable[[int, Group], Process]) -> None:
        self.site = site
        self.worker_id, self.number = worker_id, 0
        self.size = site.plan.processes
        self.processes = [make(number, self) for number in range(self.size)]
        self.core = g.GroupCore(self.size, WAITS)
        self.session = Relay(self)
        self.frozen = self.over = False
        self._held: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._inside = Collectives(site.clock, site.draw_network)
        self._world = replace(ALONE, version=1, size=self.size)  # of its processes among themselves
        self._end: tuple[ExitCause, int] | None = None  # of the first process that has failed
        self._due = math.inf

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Of its own process: a frozen one does it later."""
        if self.frozen:
            self._held.append((function, arguments))
        elif not self.over:
            function(*arguments)

    def freeze(self, seconds: float) -> None:
        if not self.frozen:
            self.frozen = True
            self.site.clock.after(seconds, self._thaw)

    def _thaw(self) -> None:
        self.frozen = False
        held, self._held = self._held, []
        for function, arguments in held:
            self.call(function, *arguments)

    def terminate(self) -> None:
        self.do(self.core.told_to_leave())

    def kill(self, cause: ExitCause, code: int) -> None:
        """It is gone, and takes what is left of its processes along."""
        if self.over:
            return
        self.over = True
        self.session.close()
        for process in self.processes:
            process.end(cause, code)
        self.site.cluster.process_ended(self.processes[0], cause, code)

    def ended(self, process: Process, cause: ExitCause, code: int) -> None:
        """One of the processes is gone."""
        if code:
            self._end = self._end or (cause, code)
        after = NOTICED * self.site.draw_network.random()
        self.site.clock.after(after, self.call, self._exited, process.number, code)

    def _exited(self, number: int, code: int) -> None:
        self.do(self.core.exited(number, code, self.site.clock.now))

    def do(self, actions: Iterable[g.Action]) -> None:
        for action in actions:
            match action:
                case g.Terminate(besides):
                    for process in self.processes:
                        if process.number != besides:
                            process.call(process.terminated)
                case g.Kill(besides):
                    self._end = self._end or (ExitCause.CRASHED, 1)
                    for process in self.processes:
                        if process.number != besides:
                            process.end(ExitCause.CRASHED, 1)
                case g.Finish(code):
                    self._finish(code)
                case _:
                    self.session.do(action)
        if self.core.due < self._due:
            self._due = self.core.due
            self.site.clock.after(self._due - self.site.clock.now, self.call, self._pass_time)

    def _pass_time(self) -> None:
        self._due = math.inf
        self.do(self.core.pass_time(self.site.clock.now))

    def _finish(self, code: int) -> None:
        on = [each.number for each in self.processes if each.alive]
        if code == 0 and len({each.kept for each in self.processes}) > 1:
            raise Violation(KEPT_WHOLE, f"worker {self.worker_id}: {[each.kept for each in self.processes]}")
        # One that is frozen, or cut off from this process, may have said in time that it would end.
        is_odd = any(
            each.has_frozen or (not each.alive and (each.to_raise or each.session.blocked_until))
            for each in self.processes
        )
        if code and not self._end and not is_odd:
            raise Violation(END_TOGETHER, f"worker {self.worker_id}: {on} go on, where others have ended")
        self.kill(*(self._end or ((ExitCause.CRASHED, code) if code else (ExitCause.CLEAN, 0))))

    def agree(self, process: Process, given: Any, combine: Callable[[Sequence[Any]], Any]) -> None:
        """All processes come here alike, and hold shards of one model. The process is resumed with what all have given."""

        def together(inputs: dict[int, tuple[Model, Any]]) -> Any:
            held = {id(model): model for model, _ in inputs.values()}
            if len(held) > 1:
                text = " and ".join(map(str, held.values()))
                raise Violation(ONE_MOMENT, f"worker {self.worker_id}: {text}")
            return combine([inputs[number][1] for number in range(self.size)])

        member, resume, given = process.number, process.next_value(), (process.state.weights, given)
        self._inside.take_part(member, resume, self._world, "inside", given, together)


class Relay:
    """As `elasticdl.places.worker_group.Relay`, which is asyncio's and gRPC's: to the processes it is a master, to the master a worker."""

    generation = 0

    def __init__(self, group: Group) -> None:
        self.alive = True
        self.blocked_until = 0.0
        self.stream: Stream | None = None  # to the master
        self.cut_from: dict[int, float] = {}
        self._group = group
        self._streams: dict[int, Stream] = {}  # of processes, once they have said hello
        self._was_replaced = False

    def close(self) -> None:
        self.alive = False
        if self.stream is not None:
            self.stream.close()

    def do(self, action: g.Action) -> None:
        match action:
            case g.Say(whom, message):
                self._send(whom, message.SerializeToString())
            case g.Begin():
                self._begin()
            case g.Close(whom):
                self._send(whom, None)
                if whom != g.MASTER:
                    self._streams.pop(whom).replaced = self._was_replaced
            case g.Break(whom):
                stream = self.stream if whom == g.MASTER else self._streams.pop(whom)
                if whom == g.MASTER:
                    self.stream = None
                if stream is not None:
                    stream.close()

    def _send(self, whom: int, data: bytes | None) -> None:
        if whom != g.MASTER:
            self._streams[whom].send_down(data)
        elif self.stream is not None:
            self.stream.send_up(data)

    def _begin(self) -> None:
        group = self._group
        is_free = group.site.clock.now >= self.blocked_until
        master: Master | None = group.site.master_for() if is_free else None
        self.stream = None if master is None else Stream(group, master)
        if master is None:
            group.site.clock.after(0.0, group.call, self._lose_master)

    def _lose_master(self) -> None:
        if self.stream is None:
            self._group.do(self._group.core.master_lost(None))

    # ---- as streams know it ----

    def hear(self, stream: Stream, data: bytes | None) -> None:
        self._group.call(self._hear_master if stream is self.stream else self._hear_process, stream, data)

    def lose(self, stream: Stream) -> None:
        self._group.call(self._lose, stream)

    def _hear_process(self, stream: Stream, data: bytes | None) -> None:
        group, core, number = self._group, self._group.core, stream.process.number
        message, now = pb.WorkerMessage.FromString(data or b""), group.site.clock.now
        if not stream.greeted:
            stream.greeted = True
            if number in self._streams:
                self._lose(self._streams[number])
            self._streams[number] = stream
            group.do(core.came(number, message.hello, now))
        elif self._streams.get(number) is stream:
            group.do(core.said_all(number) if data is None else core.heard(number, message, now))

    def _hear_master(self, stream: Stream, data: bytes | None) -> None:
        core = self._group.core
        if stream is not self.stream:
            return
        if data is not None:
            self._group.do(core.heard_of_master(pb.MasterMessage.FromString(data)))
            return
        self.stream, stream.broken = None, True
        self._was_replaced = stream.replaced
        self._group.do(core.master_closed())
        self._was_replaced = False

    def _lose(self, stream: Stream) -> None:
        number = stream.process.number
        if stream is self.stream:
            self.stream = None
            self._group.do(self._group.core.master_lost(None))
        elif self._streams.get(number) is stream:
            del self._streams[number]
            self._group.do(self._group.core.lost(number))
