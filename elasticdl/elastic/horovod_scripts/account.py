"""What the master hears of a script's training: its commits, as steps, and its pauses."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from elasticdl.elastic.core.pause import PauseClock
from elasticdl.elastic.core.world import World
from elasticdl.elastic.session.membership import Membership
from elasticdl.elastic.session.notices import say_pause
from elasticdl.elastic.session.reports import StepReport


class Account:
    """Of one worker. ``step`` counts commits, on from those of the rank 0 whose state this worker has taken.

    A pause ends with the first ``commit()`` or ``check_host_updates()`` in the new world, whichever comes first, and what
    lies between two of them on an ordinary day is taken off.
    """

    def __init__(self, session: Membership, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._clock = clock
        self._pause = PauseClock()
        self._training = False  # in step with the other members of the present world
        self._size = 0  # of the last world trained in
        self._grew = False
        self._last_commit = 0.0
        self.step = 0
        self.has_state = False

    def left(self, *, broken: bool) -> None:
        """Training in the present world is over, or it won't come to it."""
        self._pause.left(self._clock(), broken=broken, torn=broken and self._training)
        self._training = False

    def mark(self, name: str) -> None:
        """As `PauseClock.mark`."""
        self._pause.mark(name, self._clock())

    def synced(self, world: World) -> None:
        """The state is now that of rank 0."""
        self.step = world.members[0].step
        self.has_state = self._training = True
        self._grew, self._size = world.size > self._size, world.size
        self._last_commit = self._clock()
        self._session.reached(self.step)
        self.mark("synced")

    def passed(self, world: World) -> None:
        """The script has come to a point between two steps."""
        pause = self._pause.step_done(self._clock(), world_version=world.version, grew=self._grew)
        if pause is not None:
            # The way to this point may be shorter than the ordinary one: the state was saved where the change was seen.
            say_pause(self._session, replace(pause, first_step=max(0.0, pause.first_step)))

    def committed(self, world: World) -> None:
        self.step += 1
        now = self._clock()
        seconds, self._last_commit = now - self._last_commit, now
        self._session.reached(self.step)
        # Of the script's samples, epochs and losses nothing is known.
        self._session.report_step(
            StepReport(
                step=self.step,
                epoch=0,
                loss=0.0,
                samples=0,
                learning_rate=0.0,
                seconds=seconds,
                world_version=world.version,
                total_samples=0,
                ends_epoch=False,
                total_steps=0,
                total_epochs=0,
            )
        )
