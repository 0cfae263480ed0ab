"""A worker's session with the master: what the training thread asks of it, and what the master tells it.

The training thread asks for worlds and reports steps; it waits for the master only in `join`. The stream's thread takes
what the master sends: a world to enter, a change to prepare for, a world to break at once, an order to leave. When the
stream breaks it is opened again; training goes on without a master meanwhile, since only a change of the world needs one.
What there is to tell then is told to the next.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from elasticdl.common.environment import WorkerEnvironment
from elasticdl.common.errors import UnreachableError
from elasticdl.elastic.collectives.store import Key, KvStore
from elasticdl.elastic.core.errors import Stopped
from elasticdl.elastic.core.world import ALONE, Member, World, horovod_host
from elasticdl.elastic.session.reports import Reports, StepReport
from elasticdl.elastic.session.stream import MasterStream
from elasticdl.proto import elasticdl_pb2 as pb

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """What a worker says of itself when it asks for the next world."""

    step: int
    has_state: bool
    broken: bool = False
    reason: str = ""
    epoch: int = 0


class Membership(Protocol):
    """What the elastic loop needs to know of the master; `Session` with one, `StandaloneMembership` without."""

    def join(self, standing: JoinRequest) -> World:
        """Leave the present world (if any), ask for the next and wait for it.

        Raises:
            Stopped: this worker is to leave for good.
            UnreachableError: there has been no master for too long.
        """

    @property
    def leaving(self) -> bool:
        """This worker's vote: whether the present world should be left after this step."""

    def drain(self, reason: str) -> None:
        """This worker was told to leave (SIGTERM): it finishes its step, and the others go on without it."""

    def linger(self, reason: str) -> None:
        """As `drain`, for the only member: it goes on until another has its state, and is then to be drained."""

    def advance(self, *, waiting: bool) -> None:
        """Something was done (a micro-batch, a collective begun): a worker that never does anything is stuck."""

    def reached(self, step: int) -> None:
        """So many steps have been applied; the master hears of it with the next heartbeat."""

    def report_step(self, report: StepReport) -> None:
        """Report a step that the world has made; rank 0's reports reach the master."""

    def say(self, message: pb.WorkerMessage) -> None:
        """Send any other report: a pause, a notice, the end of training."""

    def close(self) -> None:
        """Send what is still to be said and end the conversation."""


class StandaloneMembership:
    """The membership of a script that was not started by a launcher: one world of one worker."""

    def __init__(self) -> None:
        self._stopped: Stopped | None = None

    def join(self, standing: JoinRequest) -> World:
        if self._stopped is not None:
            raise self._stopped
        return ALONE

    @property
    def leaving(self) -> bool:
        return self._stopped is not None

    def drain(self, reason: str) -> None:
        self._stopped = Stopped(reason, checkpoint=True)

    def linger(self, reason: str) -> None:
        self.drain(reason)

    def advance(self, *, waiting: bool) -> None:
        """Nobody watches."""

    def reached(self, step: int) -> None:
        """Nobody watches."""

    def report_step(self, report: StepReport) -> None:
        """Nobody listens."""

    def say(self, message: pb.WorkerMessage) -> None:
        """Nobody listens."""

    def close(self) -> None:
        """Nothing was opened."""


def rank_entry(world: World) -> dict[Key, bytes]:
    """The entry by which Horovod's own elastic mode learns its place on a second ``init``."""
    return {("rank_and_size", f"{horovod_host(world)}:0"): f"{world.rank},{world.size},0,1,0,1".encode()}


class Session:
    """Membership under a master. `open` it, and `close` it when training is over."""

    def __init__(self, environment: WorkerEnvironment) -> None:
        self.environment = environment
        self.store = KvStore(self._publish)
        self._on_broken: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._world: World | None = None  # published, not yet entered
        self._inside = 0  # version of the world this worker is in; 0 between worlds
        self._members: tuple[Member, ...] = ()  # of that world
        self._puts: list[pb.WorkerMessage] = []  # into the store of that world
        self._broken = 0  # version of the newest world known to be broken
        self._change = 0  # version of the world to leave after the step
        self._ask: pb.WorkerMessage | None = None  # not yet answered
        self._last_word: pb.WorkerMessage | None = None
        self._stopped: Stopped | None = None
        self._draining: pb.WorkerMessage | None = None
        self._lost: str | None = None
        self._stream = MasterStream(environment, self)
        self._reports = Reports(self._stream.send)

    def open(self, on_broken: Callable[[], None]) -> None:
        """``on_broken`` is called from the stream's thread when a member of the present world is gone."""
        self._on_broken = on_broken
        self._stream.open()
        self._reports.open()

    def close(self) -> None:
        self._reports.close()
        self._stream.close()

    # -- the training thread --

    def join(self, standing: JoinRequest) -> World:
        self._reports.flush()
        with self._changed:
            left, self._inside = self._inside, 0
            self._reports.enter(0, speaks=False)
            self._send_ask(left, standing)
            # No deadline of its own: waiting for enough workers is a state of the job, and shows in its status.
            while self._stopped is None and self._lost is None:
                world, self._world = self._world, None
                if world is not None and world.version > max(left, self._broken):
                    self._inside, self._members, self._ask = world.version, world.members, None
                    self._puts.clear()
                    self._reports.enter(world.version, speaks=world.rank == 0)
                    self.store.open_world(world.version, rank_entry(world))
                    return world
                if world is not None and world.version == self._broken:
                    self._send_ask(world.version, standing)  # it broke before this worker had entered it
                self._changed.wait(1.0)
            raise self._stopped or UnreachableError(self._lost or "")

    @property
    def leaving(self) -> bool:
        return self._stopped is not None or self._lost is not None or self._change == self._inside != 0

    def drain(self, reason: str) -> None:
        # May come from a signal handler while this very thread holds the lock; a Condition's lock is re-entrant.
        with self._changed:
            if self._stopped is None:
                self._stopped = Stopped(reason, checkpoint=False, drained=True)
                self._draining = pb.WorkerMessage(draining=pb.Draining(reason=reason))
                self._stream.send(self._draining)
                self._changed.notify_all()

    def linger(self, reason: str) -> None:
        with self._changed:
            if self._stopped is None and self._draining is None:
                self._draining = pb.WorkerMessage(draining=pb.Draining(reason=reason, lingers=True))
                self._stream.send(self._draining)

    def advance(self, *, waiting: bool) -> None:
        self._reports.advance(waiting=waiting)

    def reached(self, step: int) -> None:
        self._reports.step = step

    def report_step(self, report: StepReport) -> None:
        self._reports.add(report)

    def say(self, message: pb.WorkerMessage) -> None:
        self._reports.flush()
        if message.WhichOneof("body") in ("finished", "failed"):
            self._last_word = message
            self._stream.send_at_once(message)
        else:
            self._stream.send(message)

    def _send_ask(self, left: int, standing: JoinRequest) -> None:
        self._ask = pb.WorkerMessage(
            ask=pb.Ask(
                left_world=left,
                step=standing.step,
                has_state=standing.has_state,
                broken=standing.broken,
                reason=standing.reason,
                epoch=standing.epoch,
            )
        )
        self._stream.send(self._ask)

    def _publish(self, world: int, key: Key, value: bytes) -> None:
        put = pb.WorkerMessage(kv_put=pb.KvPut(world_version=world, scope=key[0], key=key[1], value=value))
        with self._changed:
            if world == self._inside:
                self._puts.append(put)
        self._stream.send(put)

    # -- the stream's thread --

    def greeting(self, unsaid: Sequence[pb.WorkerMessage] = ()) -> Sequence[pb.WorkerMessage]:
        with self._changed:
            hello = pb.Hello(
                worker_id=self.environment.worker_id,
                host=self.environment.host,
                pid=os.getpid(),
                world_version=self._inside,
                step=self._reports.step,
                members=[
                    pb.Member(worker_id=m.worker_id, host=m.host, step=m.step, has_state=m.has_state, epoch=m.epoch)
                    for m in (self._members if self._inside else ())
                ],
            )
            puts = self._puts if self._inside else []
            again = [*puts, self._ask, self._reports.again(), self._draining, *unsaid, self._last_word]
        return [pb.WorkerMessage(hello=hello), *(message for message in again if message is not None)]

    @property
    def has_last_word(self) -> bool:
        return self._last_word is not None

    def lost(self, reason: str) -> None:
        with self._changed:
            self._lost = reason
            self._changed.notify_all()

    def take(self, message: pb.MasterMessage) -> None:
        kind = message.WhichOneof("body")
        if kind == "kv_entry":
            entry = message.kv_entry
            self.store.receive(entry.world_version, (entry.scope, entry.key), entry.value)
        elif kind == "broken":
            self._take_broken(message.broken)
        elif kind == "welcome":
            self._reports.set_interval(message.welcome.heartbeat_interval)
        elif kind == "dump_stacks":
            print("elasticdl: the master asks for the stacks of all threads", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(all_threads=True)
        else:
            with self._changed:
                self._take_order(message)
                self._changed.notify_all()

    def _take_broken(self, broken: pb.Broken) -> None:
        with self._changed:
            self._broken = max(self._broken, broken.world_version)
            concerned = self._inside == broken.world_version
            self._changed.notify_all()
        self.store.break_world(broken.world_version)
        if concerned:
            log.info("world %d is broken: %s", broken.world_version, broken.reason)
            self._on_broken()

    def _take_order(self, message: pb.MasterMessage) -> None:
        kind = message.WhichOneof("body")
        if kind == "change":
            self._change = message.change.world_version
        elif kind == "world":
            self._world = self._convert(message.world)
        elif kind == "drain":
            self.drain(message.drain.reason)
        elif kind == "stop_work" and not (self._stopped and self._stopped.checkpoint):
            self._stopped = Stopped(message.stop_work.reason, checkpoint=message.stop_work.checkpoint)

    def _convert(self, world: pb.World) -> World:
        members = tuple(Member(m.worker_id, m.host, m.step, m.has_state, m.epoch) for m in world.members)
        rank = [member.worker_id for member in members].index(self.environment.worker_id)
        return World(version=world.version, members=members, rank=rank, reason=world.reason)
