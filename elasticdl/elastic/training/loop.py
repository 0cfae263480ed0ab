"""The training thread's driver: carries out what the worker's core tells it, and tells the core what came of it.

Everything is inside the retry, re-initialisation included: a second failure while the first is being mended is the same
event once more. (In Horovod's own loop a failure in ``reset()`` ends every survivor.)
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from elasticdl.elastic.collectives.port import Collective
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.errors import Stopped, WorldBroken, WorldChanged
from elasticdl.elastic.core.position import Position
from elasticdl.elastic.core.progress import Progress
from elasticdl.elastic.core.vote import Vote
from elasticdl.elastic.core.world import World
from elasticdl.elastic.session.session import Session

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class State(Protocol):
    """What the driver does with a training state; the twins implement it (`TorchState`)."""

    @property
    def progress(self) -> Progress: ...

    def take_part(self) -> None:
        """Be the state that the worker's core speaks of."""

    def save(self, part: p.Part) -> None: ...

    def restore(self) -> None: ...

    def sync(self, world: World) -> None: ...

    def cast_end_vote(self) -> Vote: ...


def _nothing(world: World) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Hooks:
    """Called in each world, once its collective has been started.

    ``before_sync``: rank 0 may still change its state, which the others are about to receive (a checkpoint).
    ``on_world``: all members stand at the same state.
    """

    before_sync: Callable[[World], None] = _nothing
    on_world: Callable[[World], None] = _nothing


class ElasticLoop:
    """Runs a training function through as many worlds as it takes."""

    def __init__(self, session: Session, collective: Collective) -> None:
        self._session = session
        self._collective = collective
        self._state: State | None = None
        self._next: deque[p.Instruction] = deque()  # of those that lead from world to world

    def adopt(self, state: State, position: Position, made: p.StateMade) -> Position:
        """From now on the core speaks of this state, except in a world, whose members train another.

        ``position``: the state's own so far. Returns that by which the core knows it.
        """
        core = self._session.core
        if core.position is not position:
            before = core.position
            self._session.post(made)
            if core.position is not before:
                self._state = state
        return core.position

    def post(self, event: p.Event) -> None:
        """Something has happened in the training function.

        Raises:
            WorldChanged: all members agreed to leave this world.
            RuntimeError: the script does what can't be made right.
        """
        self._tell(event)
        if self._next and isinstance(leave := self._next[0], p.LeaveWorld):
            raise WorldChanged(leave.reason)

    def run(self, train: Callable[[], Result], state: State, hooks: Hooks) -> Result:
        """Call ``train`` in each world, after the hooks, until it returns on all members.

        Raises:
            Stopped: this worker is to leave for good; the state is that of the last commit.
            JobFailedError: world after world broke without a step being made.
            UnreachableError: there has been no master for too long.
        """
        result: list[Result] = []

        def enter(world: World) -> p.Event:
            self._collective.start(world)
            return p.On.CONNECTED

        def synchronize(world: World) -> p.Event:
            hooks.before_sync(world)
            state.sync(world)
            return p.Synced(state.progress)

        def run_function(world: World) -> p.Event:
            step = state.progress.step
            log.info("world %d: rank %d of %d, step %d (%s)", world.version, world.rank, world.size, step, world.reason)
            hooks.on_world(world)
            result[:] = [train()]
            return p.On.RETURNED

        state.take_part()
        self._next.clear()
        try:
            self._tell(p.On.READY)
            while True:
                while not self._next:
                    self._carry_out(self._session.wait())
                match self._next.popleft():
                    case p.Connect(world):
                        self._attempt(enter, world)
                    case p.Synchronize(world):
                        self._attempt(synchronize, world)
                    case p.Train(world):
                        self._attempt(run_function, world)
                    case p.LeaveWorld():
                        self._collective.stop()
                        self._tell(p.On.CLOSED)
                    case p.Do.COMPLETE:
                        return result[0]
        finally:
            self._collective.stop()

    def _attempt(self, work: Callable[[World], p.Event], world: World) -> None:
        try:
            self._tell(work(world))
        except WorldChanged as change:
            self._tell(p.WorldLeft(str(change)))  # which the core knows, unless a hook has raised it
        except WorldBroken as failure:
            log.warning("%s", failure)
            self._tell(p.CollectiveFailed(str(failure)))

    def _tell(self, event: p.Event) -> None:
        self._carry_out(self._session.turn(event))

    def _carry_out(self, instructions: list[p.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case p.Save(part) if self._state:
                    self._state.save(part)
                case p.Restore() if self._state:
                    self._state.restore()
                case p.Warn(message):
                    warn(self._session, message)
                case p.Do.CAST_END_VOTE if self._state:
                    self._session.post(p.Advanced(waiting=True))
                    self._tell(p.Voted(self._state.cast_end_vote()))
                case p.LeaveJob(reason, checkpoint, drained):
                    raise Stopped(reason, checkpoint=checkpoint, drained=drained)
                case p.Fail(error, message):
                    raise error(message)
                case _:
                    self._next.append(instruction)


def warn(session: Session, message: str) -> None:
    """Into this worker's log and the job's journal."""
    log.warning("%s", message)
    session.notify("warning", message=message)
