"""A worker of several processes: the process that speaks for them, with the real `Bundle`, and what the processes agree upon among themselves.

Each process holds the shards of its number, and has collectives with its equals in the other workers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elasticdl.elastic.core.protocol import ALONE
from elasticdl.master.core.events import ExitCause
from elasticdl.places.worker_group import MASTER, Bundle, Said
from elasticdl.proto import elasticdl_pb2 as pb
from tests.simulation.collectives import Collectives
from tests.simulation.lineage import Model, Violation
from tests.simulation.network import Stream

if TYPE_CHECKING:
    from tests.simulation.masters import Master
    from tests.simulation.process import Process
    from tests.simulation.site import Site

NOTICED = 0.02  # seconds until the end of a process is heard of
HOLD_SECONDS = 0.1  # of a failure, whose cause may be another process's death
UNSAID_SECONDS = 0.3  # for the others, where one has ended without a word
ALONE_SECONDS = 6.0  # more than a process takes to close its session
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
        self.session = Relay(self)
        self.frozen = False
        self._held: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._inside = Collectives(site.clock, site.draw_network)
        self._world = replace(ALONE, version=1, size=self.size)  # of its processes among themselves
        self._end: tuple[ExitCause, int] | None = None  # of the first process that has failed

    @property
    def alive(self) -> bool:
        return any(process.alive for process in self.processes)

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Of its own process: a frozen one does it later."""
        if self.frozen:
            self._held.append((function, arguments))
        elif self.alive:
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

    def terminate(self, besides: int | None = None) -> None:
        for process in self.processes:
            if process.number != besides:
                process.call(process.terminated)

    def kill(self, cause: ExitCause, code: int, besides: int | None = None) -> None:
        self._end = self._end or (cause, code)
        for process in self.processes:
            if process.number != besides:
                process.end(cause, code)

    def ended(self, process: Process, cause: ExitCause, code: int) -> None:
        """One of the processes is gone."""
        if not self.alive:
            cause, code = self._end or (cause, code)
            if code == 0 and len({each.kept for each in self.processes}) > 1:
                raise Violation(KEPT_WHOLE, f"worker {self.worker_id}: {[each.kept for each in self.processes]}")
            self.session.close()
            self.site.cluster.process_ended(self.processes[0], cause, code)
            return
        clock = self.site.clock
        if code:
            self._end = self._end or (cause, code)
            clock.after(NOTICED * self.site.draw_network.random(), self.call, self.kill, cause, code)
        else:
            patience = ALONE_SECONDS if process.last_word or process.core.stopping else UNSAID_SECONDS
            clock.after(patience, self.call, self._end_others, process)

    def _end_others(self, ended: Process) -> None:
        """They go on, where one has come to the end of its script."""
        if not ended.to_raise and not any(each.has_frozen for each in self.processes):
            others = [each.number for each in self.processes if each.alive]
            raise Violation(END_TOGETHER, f"worker {self.worker_id}: {others} go on without {ended.number}")
        self.kill(ExitCause.CRASHED, 1)

    def agree(self, process: Process, ticket: int, given: Any, combine: Callable[[Sequence[Any]], Any]) -> None:
        """All processes come here alike, and hold shards of one model. The process is resumed with what all have given."""

        def together(inputs: dict[int, tuple[Model, Any]]) -> Any:
            held = {id(model): model for model, _ in inputs.values()}
            if len(held) > 1:
                text = " and ".join(map(str, held.values()))
                raise Violation(ONE_MOMENT, f"worker {self.worker_id}: {text}")
            return combine([inputs[number][1] for number in range(self.size)])

        member, weights = _Within(process), process.state.weights
        self._inside.take_part(member, ticket, self._world, "inside", (weights, given), together)


class _Within:
    """A process among those of its worker."""

    def __init__(self, process: Process) -> None:
        self.worker_id = process.number
        self.resume = process.resume


class Relay:
    """As `elasticdl.places.worker_group.Relay`, which is asyncio's and gRPC's: to the processes it is a master, to the master a worker."""

    generation = 0

    def __init__(self, group: Group) -> None:
        self.alive = True
        self.blocked_until = 0.0
        self.stream: Stream | None = None  # to the master
        self.cut_from: dict[int, float] = {}
        self._group = group
        self._bundle = Bundle(group.size)
        self._streams: dict[int, Stream] = {}  # of processes, once they have said hello
        self._hellos: dict[int, pb.Hello] = {}
        self._early: list[tuple[Stream, pb.WorkerMessage]] = []  # until the session with the master begins
        self._ended: set[int] = set()  # processes that say no more
        self._failed: dict[int, pb.WorkerMessage] = {}
        self._tells_failure = self._is_failure_taken = False

    def close(self) -> None:
        self.alive = False
        if self.stream is not None:
            self.stream.close()

    # ---- as streams know it ----

    def hear(self, stream: Stream, data: bytes | None) -> None:
        self._group.call(self._hear_master if stream is self.stream else self._hear_process, stream, data)

    def lose(self, stream: Stream) -> None:
        self._group.call(self._lose, stream)

    # ---- the processes ----

    def _hear_process(self, stream: Stream, data: bytes | None) -> None:
        number = stream.process.number
        if not stream.greeted:
            stream.greeted = True
            self._drop_all()
            self._streams[number] = stream
            self._hellos[number] = pb.WorkerMessage.FromString(data or b"").hello
            if len(self._streams) == self._group.size:
                self._begin()
        elif self._streams.get(number) is stream:
            if data is None:
                self._end_of(stream)
                return
            message = pb.WorkerMessage.FromString(data)
            if message.WhichOneof("body") == "failed":
                self._failed.setdefault(number, message)
                self._group.site.clock.after(HOLD_SECONDS, self._group.call, self._tell_failure)
            elif self.stream is None:
                self._early.append((stream, message))
            else:
                self._say(stream, message)

    def _say(self, stream: Stream, message: pb.WorkerMessage) -> None:
        number = stream.process.number
        if message.WhichOneof("body") == "draining" and message.draining.lingers:
            self._group.terminate(number)
        self._pass_on(self._bundle.of_process(number, message))

    def _end_of(self, stream: Stream) -> None:
        """It says no more."""
        self._ended.add(stream.process.number)
        self._end_failed()
        is_told = not self._failed or self._is_failure_taken
        if is_told and len(self._ended) == self._group.size and self.stream is not None:
            self.stream.send_up(None)

    def _end_failed(self) -> None:
        for number in sorted(self._ended & self._failed.keys()) if self._is_failure_taken else ():
            if number == next(iter(self._failed)):
                self._group.kill(ExitCause.CRASHED, 1, number)
            if number in self._streams:
                self._streams[number].send_down(None)

    def _pass_on(self, said: Sequence[Said]) -> None:
        for whom, message in said:
            stream = self.stream if whom == MASTER else self._streams.get(whom)
            if stream is not None:
                (stream.send_up if whom == MASTER else stream.send_down)(message.SerializeToString())

    def _drop_all(self) -> None:
        """If a session is under way it is over, and the processes come again."""
        if self.stream is not None:
            stream, self.stream = self.stream, None
            stream.close()
            self._end_all()

    def _end_all(self) -> None:
        streams, self._streams, self._early = self._streams, {}, []
        for each in streams.values():
            each.close()

    # ---- the master ----

    def _begin(self) -> None:
        group = self._group
        is_free = group.site.clock.now >= self.blocked_until
        master: Master | None = group.site.master_for() if is_free else None
        self._ended.clear()
        if master is None:
            self._end_all()
            return
        self.stream, self._bundle = Stream(group, master), Bundle(group.size)
        hello = self._bundle.hello([self._hellos[number] for number in range(group.size)])
        self.stream.send_up(hello.SerializeToString())
        if self._tells_failure:
            self._tell_failure()
        early, self._early = self._early, []
        for stream, message in early:
            if self._streams.get(stream.process.number) is stream:
                self._say(stream, message)

    def _tell_failure(self) -> None:
        self._tells_failure = True
        if self.stream is not None:
            self.stream.send_up(next(iter(self._failed.values())).SerializeToString())

    def _hear_master(self, stream: Stream, data: bytes | None) -> None:
        if data is not None:
            message = pb.MasterMessage.FromString(data)
            self._pass_on(self._bundle.of_master(message))
            if message.HasField("last_word_taken") and self._tells_failure:
                self._is_failure_taken = True
                self._end_failed()
            return
        self.stream, stream.broken = None, True
        streams, self._streams, self._early = self._streams, {}, []
        for each in streams.values():
            each.replaced = stream.replaced
            each.send_down(None)

    def _lose(self, stream: Stream) -> None:
        if stream is self.stream:
            self.stream = None
            self._end_all()
        elif self._streams.get(stream.process.number) is stream:
            del self._streams[stream.process.number]
            self._drop_all()
