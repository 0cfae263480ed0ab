"""The shell around a worker's core: its lock, its stream to the master and its store.

What may change the membership is posted as an event, from any thread. What the core tells the session to do is done here;
what it tells the training thread waits in one queue until that thread takes it. Training goes on without a master, since
only a change of the world needs one.

And the process's connection to its master, whose session it is.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from elasticdl.common.credentials import CONNECTED, WorkerEnvironment
from elasticdl.common.reason import one_line
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.training_step import WorkerState
from elasticdl.elastic.core.worker import WorkerCore
from elasticdl.elastic.link.store import Endpoint, Key, KvStore
from elasticdl.elastic.link.stream import MasterStream
from elasticdl.elastic.link.wire import to_event
from elasticdl.elastic.link.witness import DUMP_SHARE, TOLD_SECONDS, DumpTimer, SlowStart, Witness, stack_of
from elasticdl.job import messages as m
from elasticdl.job.messages import FACTS, MOST_FACTS
from elasticdl.job.spec import JobSpec
from elasticdl.proto import elasticdl_pb2 as pb

TICK_SECONDS = 0.2
CLOSE_SECONDS = 2.0
WELCOME_SECONDS = 5.0

log = logging.getLogger(__name__)


class Session:
    """One worker's session. Without a stream it is that of a script which runs alone."""

    def __init__(
        self,
        core: WorkerCore,
        stream: MasterStream | None = None,
        dump_timer: DumpTimer | None = None,
    ) -> None:
        """``dump_timer``: is put off as long as heartbeats are sent."""
        self.core = core
        self.store = KvStore(self._put)
        self.break_collective: Callable[[int], None] = lambda version: (
            None
        )  # from any thread: wakes who waits in that world
        self.witness = Witness()
        self.is_first_process = True  # of its worker
        self.welcome_seconds = WELCOME_SECONDS
        self._dump_timer = dump_timer
        self._stream = stream
        # A signal's handler may post while its own thread is at it: that event waits for its turn.
        self._changed = threading.Condition(threading.RLock())
        self._events: deque[p.Event] = deque()
        self._stepping = False
        self._orders: deque[p.Instruction] = deque()  # to the training thread
        self._welcome: pb.Welcome | None = None  # the master's latest
        self._start = SlowStart()
        self._closing = threading.Event()
        self._beat = threading.Thread(target=self._tick, name="elasticdl-heartbeat", daemon=True)

    def open(self) -> None:
        if self._stream is not None:
            self._stream.open(self)
            self._beat.start()

    def close(self) -> None:
        """Send what is still to be said, and end the conversation."""
        if self._stream is None:
            return
        self._closing.set()
        if self._beat.ident is not None:
            self._beat.join(timeout=CLOSE_SECONDS)
        if self._dump_timer is not None:
            self._dump_timer.close()
        self.post(p.Trigger.TICK)
        self._stream.close()

    # -- from any thread --

    def post(self, event: p.Event) -> None:
        """Something has happened."""
        for errand in self._step(event):
            self._carry_out(errand)

    def say(self, message: m.Notice | m.Finished | m.Failed) -> None:
        self.post(p.Said(message))

    def notify(self, event: str, **fields: Any) -> None:
        """For the job's journal: ``event`` and its fields as in `elasticdl.job.journal`."""
        json.dumps(fields)  # if they can't be sent it is the caller who must hear of it
        self.say(m.Notice(event, fields))

    # -- the training thread --

    def order(self) -> p.Instruction:
        """What the training thread is to do next, when it is known."""
        # No deadline of its own: waiting for enough workers is a state of the job, and shows in its status.
        with self._changed:
            while not self._orders:
                self._changed.wait(1.0)
            return self._orders.popleft()

    def jobs_place(self) -> tuple[int, int]:
        """Where training stands at least, as the master said when it was last reached: epochs that are over, and steps of
        the present one. Waits for its first word, but not long."""
        welcome = self._first_word()
        return welcome.epoch, welcome.epoch_steps

    def jobs_facts(self) -> bytes:
        """What rank 0 has told by `tell_facts`, if the job had trained when this worker came; else empty."""
        return self._first_word().facts

    def _first_word(self) -> pb.Welcome:
        with self._changed:
            if self._stream is not None:
                self._changed.wait_for(lambda: self._welcome is not None, self.welcome_seconds)
            return self._welcome or pb.Welcome()

    def tell_facts(self, facts: bytes) -> None:
        """On rank 0, in each world: for workers that come later. Too many are left out."""
        if len(facts) <= MOST_FACTS:
            self._put(self.core.world.version, FACTS, facts)

    # -- the stream's thread --

    def greet(self, unsent: Sequence[m.Message]) -> list[m.Message]:
        """A stream is open; returns its first messages: Hello, what is still true, and ``unsent``, before any last word."""
        with self._changed:
            greeting = self.core.step(p.SessionOpened(tuple(unsent)), time.monotonic())
        return [instruction.message for instruction in greeting if isinstance(instruction, p.Send)]

    def receive(self, message: pb.MasterMessage) -> None:
        if message.HasField("welcome"):
            with self._changed:
                self._welcome = message.welcome
                self._changed.notify_all()
        event = to_event(message)
        if event is not None:
            self.post(event)
        elif message.HasField("kv_entry"):
            entry = message.kv_entry
            self.store.receive(entry.world_version, (entry.scope, entry.key), entry.value)

    def lost(self, reason: str) -> None:
        """There is no master to be had; the stream has given up."""
        log.warning("this worker gives up: %s", reason)
        self.post(p.MasterLost(reason))

    @property
    def has_last_word(self) -> bool:
        """Whether the greeting brings something that the master must hear before this worker ends."""
        return self.core.last_word is not None

    # -- details --

    def _step(self, event: p.Event) -> list[p.Instruction]:
        """Returns what is to be done without the lock."""
        errands: list[p.Instruction] = []
        with self._changed:
            self._events.append(event)
            if self._stepping:
                return errands
            self._stepping = True
            try:
                while self._events:
                    for instruction in self.core.step(self._events.popleft(), time.monotonic()):
                        self._sort(instruction, errands)
            finally:
                self._stepping = False
        return errands

    def _sort(self, instruction: p.Instruction, errands: list[p.Instruction]) -> None:
        match instruction:
            case p.Send(message):
                if self._stream is not None:
                    self._stream.send(message)
                if isinstance(message, m.Finished | m.Failed):
                    errands.append(instruction)
            case p.RefuseMaster() | p.Command.DUMP_STACKS | p.BreakCollective():
                errands.append(instruction)
            case _:
                if instruction is p.Command.CONNECT:
                    self.store.open_world(self.core.world.version)
                self._orders.append(instruction)
                self._changed.notify_all()

    def _carry_out(self, errand: p.Instruction) -> None:
        match errand:
            case p.Send() if self._stream is not None:
                self._stream.wait_until_taken()
            case p.RefuseMaster(reason) if self._stream is not None:
                self._stream.refuse(reason)
            case p.Command.DUMP_STACKS:
                self.witness.look(lambda fields: self.notify("worker_stuck", **fields))
            case p.BreakCollective(version, reason, entered):
                self.store.break_world(version)
                if entered:
                    log.info("world %d is broken: %s", version, reason)
                    self.break_collective(version)

    def _put(self, world: int, key: Key, value: bytes) -> None:
        self.post(p.Said(m.KvPut(world, *key, value)))

    def _tick(self) -> None:
        try:
            while not self._closing.wait(min(TICK_SECONDS, self.core.reporting.interval)):
                if self._dump_timer is not None:
                    self._dump_timer.arm()
                if self._stream is not None:
                    self._stream.look()
                self.post(p.Trigger.TICK)
                self._look_at_start()
        except Exception as error:
            log.exception("the heartbeat has failed")
            self.lost(f"this worker's heartbeat has failed: {one_line(error)}")

    def _look_at_start(self) -> None:
        if self.core.state is not WorkerState.PREPARING:
            return
        if where := self._start.look(stack_of(self.witness.thread), time.monotonic()):
            log.info("not ready yet: this worker has waited for %.0f s at %s", TOLD_SECONDS, where)
            self.notify("worker_waits", where=where, seconds=TOLD_SECONDS)


# A worker's line to its master: session and store, open before anything is known of the framework.
#
# What comes between a worker's start and its first world (the framework, the user's module, the model) takes long and may
# fail; the master hears of it through the session. A context takes the link over when there is a collective.


class MasterConnection:
    """The session of one worker, to `open` and `close`."""

    def __init__(self, environment: WorkerEnvironment) -> None:
        core = WorkerCore(environment.worker_id)
        self._environment = environment
        timer = DumpTimer(os.environ, DUMP_SHARE * self.spec.heartbeat_timeout)
        self.session = Session(core, MasterStream(environment), timer)
        if environment.processes is not None:
            self.session.is_first_process = environment.processes.number == 0
            self.session.welcome_seconds = self.spec.start_timeout  # which comes once all of them have a session

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.session.store, self._environment.interface, self._environment.processes)

    @functools.cached_property
    def spec(self) -> JobSpec:
        return JobSpec.from_json(Path(self._environment.job_spec).read_text())

    def open(self) -> None:
        os.environ[CONNECTED] = self._environment.master
        self.session.open()

    def close(self) -> None:
        self.session.close()
