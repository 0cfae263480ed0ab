"""The elastic loop: join a world, start its collective, bring everybody to one state, train, and again.

Everything is inside the retry, re-initialisation included: a second failure while the first is being mended is the same
event once more. (In Horovod's own loop a failure in ``reset()`` ends every survivor.)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from elasticdl.common.errors import JobFailedError
from elasticdl.elastic.collectives.port import Collective
from elasticdl.elastic.core.errors import WorldBroken, WorldChanged
from elasticdl.elastic.core.pause import PauseClock
from elasticdl.elastic.core.world import World
from elasticdl.elastic.session.membership import JoinRequest, Membership

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# Worlds in a row that break before a single step has been made in them: by then it is not bad luck.
MAX_FRUITLESS_WORLDS = 20


class State(Protocol):
    """What the loop does with a training state; the twins implement it (`TorchState`)."""

    @property
    def step(self) -> int: ...

    def standing(self, *, broken: bool, reason: str) -> JoinRequest: ...

    def restore(self) -> None: ...

    def sync(self, world: World) -> None: ...


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

    def __init__(self, membership: Membership, collective: Collective, pause: PauseClock) -> None:
        self._membership = membership
        self._collective = collective
        self._pause = pause
        self.left_broken = False  # the last world was left because it broke

    def run(self, train: Callable[[], Result], state: State, hooks: Hooks) -> Result:
        """Call ``train`` in each world, after the hooks, until it returns.

        Raises:
            Stopped: this worker is to leave for good; the state is that of the last commit.
            JobFailedError: world after world broke without a step being made.
        """
        standing = state.standing(broken=False, reason="ready")
        fruitless = 0
        while True:
            self.left_broken = standing.broken
            world = self._membership.join(standing)
            self._pause.mark("joined", time.monotonic())
            entered_at, entered = state.step, False
            try:
                self._enter(world, state, hooks)
                entered_at, entered = state.step, True
                return train()
            except WorldChanged as change:
                self._pause.left(time.monotonic(), broken=False, torn=False)
                standing = state.standing(broken=False, reason=str(change))
                fruitless = 0
            except WorldBroken as failure:
                self._pause.left(time.monotonic(), broken=True, torn=entered)
                log.warning("%s", failure)
                self._collective.break_world()
                state.restore()
                standing = state.standing(broken=True, reason=str(failure))
                fruitless = 0 if state.step > entered_at else fruitless + 1
                if fruitless >= MAX_FRUITLESS_WORLDS:
                    raise JobFailedError(
                        f"{fruitless} worlds in a row broke before a step; the last: {failure}"
                    ) from failure
            finally:
                self._collective.stop()
                self._pause.mark("stopped", time.monotonic())

    def _enter(self, world: World, state: State, hooks: Hooks) -> None:
        self._collective.start(world)
        self._pause.mark("started", time.monotonic())
        hooks.before_sync(world)
        state.sync(world)
        hooks.on_world(world)
        self._pause.mark("synced", time.monotonic())
        log.info(
            "world %d: rank %d of %d, step %d (%s)", world.version, world.rank, world.size, state.step, world.reason
        )
