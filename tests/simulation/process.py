"""One worker's process: its core, what carries out the core's instructions, and what may befall it."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any

from elasticdl.common.credentials import Token, WorkerEnvironment
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.core.training_step import WorkerState
from elasticdl.elastic.core.worker import WorkerCore
from elasticdl.job import messages as m
from elasticdl.master.core.events import ExitCause
from tests.simulation.adapter import LINGER_SECONDS
from tests.simulation.checks import Unchecked
from tests.simulation.collectives import CONNECT_TIMEOUT
from tests.simulation.job_invariants import check_worker
from tests.simulation.lineage import State, Violation
from tests.simulation.network import Session

if TYPE_CHECKING:
    from tests.simulation.group import Group
    from tests.simulation.network import Answerer, Link
    from tests.simulation.site import Site

Steps = Generator[None, Any, None]
_ORDERS_TO_LEAVE = (m.Drain, m.StopWork, p.Terminated)
ONE_MOMENT = "weights, buffers and the user's values are of one moment"


def order_in(event: p.Event) -> object:
    """The master's, or the event itself."""
    return event.order if isinstance(event, p.Ordered) else event


class DiedError(Exception):
    """The process is gone in the midst of something."""


class Process:
    """Everything that happens to it comes through `call`, which a frozen process answers later and a dead one never."""

    def __init__(
        self, site: Site, worker_id: int, life: Callable[[Process], Steps], number: int, group: Group | None
    ) -> None:
        """``group``: it is the process of this number of a worker of several; what the checks know of a worker they know of process 0."""
        self.site = site
        self.worker_id = worker_id
        self.host = f"h{worker_id}"
        self.number = number
        self.group = group
        self.checks = Unchecked(site) if number else site.checks
        self.collectives = site.collectives[number]
        self.draw = random.Random(site.plan.seed * 1000 + worker_id + number * 500)
        self.environment = WorkerEnvironment("master:1", Token(""), worker_id, "", self.host)
        self.core = WorkerCore(worker_id, linger_seconds=LINGER_SECONDS)
        self.session = Session(self)
        self.state = State(site.origin, site.origin, site.origin)
        self.saved = self.state.copy()
        self.orders: deque[p.Instruction] = deque()
        self.alive = True
        self.frozen = self.has_frozen = False
        self.doomed = False  # the launcher was told to end it
        self.last_word: m.Message | None = None
        self.asked_at = 0.0  # for a world
        self.told_at: float | None = None  # to leave
        self.held_up = 0.0  # seconds since then in which it could not: it, or another of its world, was frozen
        self.held_when_told = False  # a state
        self.steps_since_told = 0
        self.disturbed = False  # by a fault
        self.to_raise = ""  # what the user's code does next: raise, crash or exit
        self.fuse: int | None = None  # instructions to its death
        self.left_broken = False
        self.kept: bool | None = None  # the state, for those who come; none: it has not come to that
        self.order = site.order  # of the samples that it has read
        self.is_unlike = False  # these are others than the job's
        self.compared_in = (0, -1)  # world and epoch in which it has looked whether the others hold the same model
        self._held: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._entries: dict[int, set[str]] = {}
        self._ticket = 0
        self._running = self._awaits_order = self._awaits_close = False
        self._closed = False
        self._broken = 0  # the newest world whose entries are not waited for
        self._awaits_entries = -1  # the ticket
        self._life = life(self)

    # ---- what happens to it ----

    def start(self) -> None:
        self.session.open()
        self._tick()
        self._run(None)

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        if self.frozen:
            self._held.append((function, arguments))
        elif self.alive:
            with contextlib.suppress(DiedError):
                function(*arguments)

    def resume(self, ticket: int, value: Any) -> None:
        self.call(self._resume, ticket, value)

    def freeze(self, seconds: float) -> None:
        if self.alive and not self.frozen:
            self.frozen = self.disturbed = self.has_frozen = True
            self.site.clock.after(seconds, self.thaw, seconds)

    def thaw(self, seconds: float) -> None:
        self.frozen = False
        now = self.site.clock.now
        for each in self.site.cluster.processes:  # the others of its world could make no step without it, nor leave
            waited = each.worker_id == self.worker_id or self.core.world.version == each.core.world.version > 0
            if waited and each.told_at is not None:
                each.held_up += min(seconds, now - each.told_at - each.held_up)
        held, self._held = self._held, []
        for function, arguments in held:
            self.call(function, *arguments)

    def terminated(self) -> None:
        """SIGTERM; a process that has no handler yet dies of it."""
        if self.core.state is WorkerState.PREPARING and self.draw.random() < 0.5:
            self.end(ExitCause.KILLED, -15)
        else:
            self.tell(p.Terminated("told to leave (SIGTERM)"))

    def end(self, cause: ExitCause, code: int) -> None:
        """The process is gone, whatever the reason."""
        if not self.alive:
            return
        self.alive, self.frozen = False, False
        if code:
            self.checks.dies(self)
        if self.session.stream is not None:
            self.session.stream.close()
        self.collectives.lose(self.worker_id)
        if self.group is None:
            self.site.cluster.process_ended(self, cause, code)
        else:
            self.group.ended(self, cause, code)

    def vanish(self, seconds: float) -> None:
        """The worker is gone, and no connection to it closes. The launcher learns of its end so many seconds later."""
        if not self.alive:
            return
        self.checks.dies(self)
        for process in self.group.processes if self.group else [self]:
            process.alive, process.frozen = False, False
            if process.session.stream is not None:
                process.session.stream.broken = True
        if self.to_master.stream is not None:
            self.to_master.stream.broken = True
        if self.group is not None:
            self.group.over = True
        self.site.clock.after(seconds, self.site.cluster.process_ended, self, ExitCause.KILLED, -9)

    # ---- its worker ----

    @property
    def name(self) -> str:
        return f"{self.worker_id}.{self.number}" if self.group else f"{self.worker_id}"

    @property
    def to_master(self) -> Link:
        """What keeps the worker's session with the master."""
        return self.group.session if self.group else self.session

    def answerer(self) -> Answerer | None:
        """Whom it opens a stream to."""
        if self.group is None:
            return self.site.master_for()
        return self.group.session if self.group.session.alive else None

    @property
    def is_preparing(self) -> bool:
        """The worker is, as long as one of its processes is."""
        processes = self.group.processes if self.group else [self]
        return any(each.core.state is WorkerState.PREPARING for each in processes)

    def end_worker(self, cause: ExitCause, code: int) -> None:
        if self.group is None:
            self.end(cause, code)
        else:
            self.group.kill(cause, code)

    def terminate_worker(self) -> None:
        """SIGTERM to it."""
        if self.group is None:
            self.call(self.terminated)
        else:
            self.group.call(self.group.terminate)

    # ---- the core ----

    def tell(self, event: p.Event) -> None:
        """Let the core know, and do what it wants."""
        site = self.site
        site.trace.event(self, event)
        if event in (p.Trigger.READY, p.Trigger.CLOSED):
            self.asked_at = site.clock.now
        elif isinstance(event, p.Said):
            self.last_word = event.message
        elif self.told_at is None and isinstance(order_in(event), _ORDERS_TO_LEAVE):
            self.told_at, self.held_when_told = site.clock.now, self.core.position.has_state
        instructions = self.core.step(event, site.clock.now)
        check_worker(self.core)
        for instruction in instructions:
            self._burn()
            self._carry_out(instruction)
        if self.orders and self._awaits_order and not self._running:
            self._run(None)

    def advance(self, activity: Activity) -> None:
        self.core.reporting.advance(activity, self.site.clock.now)

    def has_done(self, what: str) -> None:
        """A part of a step, of which the core is told without an event."""
        check_worker(self.core)
        self.site.trace.step(self, what)
        self._burn()

    def _burn(self) -> None:
        if self.fuse is None:
            return
        self.fuse -= 1
        if self.fuse < 0:
            self.end(ExitCause.KILLED, -9)
            raise DiedError

    def _carry_out(self, instruction: p.Instruction) -> None:
        match instruction:
            case p.Send(message):
                self.session.send(message)
            case p.BreakCollective(version, _, entered):
                self._broken = max(self._broken, version)
                if entered:
                    self.collectives.break_world(version)
                if not self._running:
                    self._resume(self._awaits_entries, None)
            case p.RefuseMaster():
                self.session.end_stream()
            case p.Command.DUMP_STACKS:
                fields = {"where": "train.py:1 in train", "stack": ["train.py:1 in train"], "moves": False}
                self.tell(p.Said(m.Notice("worker_stuck", {**fields, "collectives": 0, "last_collectives": []})))
            case _:
                self.site.trace.order(self, instruction)
                self.orders.append(instruction)

    def save(self, scope: p.SaveScope) -> None:
        if scope is p.SaveScope.WITH_PARAMETERS:
            self.saved.buffers = self.state.buffers
        else:
            self.saved.values, self.saved.counted = self.state.values, self.state.counted

    def restore(self) -> None:
        self.state.buffers, self.state.values = self.saved.buffers, self.saved.values
        self.state.counted = self.saved.counted
        self.require_one_moment(self.core.position.progress.step, "after a torn step")

    def require_one_moment(self, step: int, when: str) -> None:
        state = self.state
        if not (state.weights is state.buffers is state.values) or state.weights.step != step:
            held = ", ".join(f"{name} of step {getattr(state, name).step}" for name in ("weights", "buffers", "values"))
            raise Violation(ONE_MOMENT, f"worker {self.worker_id} {when}: {held}, progress says step {step}")

    def _tick(self) -> None:
        self.tell(p.Trigger.TICK)
        if self.alive:
            self.site.clock.after(0.2, self.call, self._tick)

    # ---- its main thread ----

    def sleep(self, seconds: float) -> Steps:
        self.site.clock.after(seconds, self.resume, self.new_ticket(), None)
        yield

    def next_order(self) -> Generator[None, Any, p.Instruction]:
        while not self.orders:
            self.new_ticket()
            self._awaits_order = True
            yield
            self._awaits_order = False
        return self.orders.popleft()

    def entries(self, version: int, count: int) -> Generator[None, Any, bool]:
        """Wait for so many entries of other members; False if they don't come."""
        late = self.site.clock.now + CONNECT_TIMEOUT
        while len(self._entries.setdefault(version, set())) < count:
            if version <= self._broken or self.site.clock.now >= late:
                return False
            self._awaits_entries = self.new_ticket()
            self.site.clock.after(CONNECT_TIMEOUT, self.resume, self._awaits_entries, None)
            yield
        return version > self._broken

    def entry_came(self, version: int, key: str) -> None:
        self._entries.setdefault(version, set()).add(key)
        self._resume(self._awaits_entries, None)

    def close(self, code: int) -> Steps:
        """The last thing it does."""
        self.new_ticket()
        self.session.close()
        if not self._closed:
            self._awaits_close = True
            yield
        self.end(ExitCause.CLEAN if code == 0 else ExitCause.CRASHED, code)
        raise DiedError

    def session_over(self) -> None:
        self._closed = True
        if self._awaits_close:
            self._awaits_close = False
            self._run(None)

    def next_value(self) -> Callable[[Any], None]:
        """Resumes the main thread, if it still waits for that."""
        return partial(self.resume, self.new_ticket())

    def new_ticket(self) -> int:
        """For what the main thread waits for next; what an earlier ticket stands for comes too late."""
        self._ticket += 1
        return self._ticket

    def _resume(self, ticket: int, value: Any) -> None:
        if ticket == self._ticket and not self._awaits_order:
            self._run(value)

    def _run(self, value: Any) -> None:
        self._running = True
        try:
            self._life.send(value)
        except StopIteration:
            pass
        finally:
            self._running = False
