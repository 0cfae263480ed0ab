"""What a training loop tells its job in each step: plain fields of the worker's core, without a lock and without an event."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NoReturn

from elasticdl.common.errors import UserError
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.interruptions import WorldChanged
from elasticdl.elastic.core.lifecycle import WorkerState
from elasticdl.elastic.core.position import Position
from elasticdl.elastic.core.progress import Progress, StepPlan
from elasticdl.elastic.core.step_times import Activity
from elasticdl.elastic.core.vote import Vote
from elasticdl.elastic.core.world import World
from elasticdl.elastic.link.session import Session
from elasticdl.elastic.training.worker_files import SampleRecord
from elasticdl.elastic.training.worlds import Worlds


class Steps(ABC):
    """A part of a job. Only the training thread calls what is here, but for `advance` with ``ALIVE``."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.worlds = Worlds(session)
        self.record: SampleRecord | None = None
        self.failure: Exception | None = None  # for which no further step can be made
        self._core = session.core
        self._worked_at = time.monotonic()  # when the last step, evaluation or checkpoint was over

    @property
    @abstractmethod
    def world(self) -> World:
        """The present one."""

    @abstractmethod
    def warn(self, message: str) -> None: ...

    # -- facts --

    @property
    def worker_id(self) -> int:
        return self._core.worker_id

    @property
    def is_told_to_leave(self) -> bool:
        """This worker is to leave for good."""
        return self._core.stopping is not None

    @property
    def world_is_broken(self) -> bool:
        """The present world is known to be broken."""
        return self._core.broken

    @property
    def may_be_last(self) -> bool:
        """Of a worker that leaves: perhaps nobody else holds the state. Its world broke, or all others have left before it."""
        return self._core.left_broken or self._core.may_be_last

    @property
    def leaving(self) -> bool:
        """This worker's vote: whether the present world is to be left after this step."""
        return self._core.leaving

    @property
    def progress(self) -> Progress:
        """Where training stands."""
        return self._core.position.progress

    # -- a step --

    def bind_position(self, present: Position, made: Position) -> Position:
        """From now on the core speaks of the state with the ``present`` position; as ``made``, if it has spoken of another.

        Returns the position that the core speaks of: in a world that of another state, which its members train.
        """
        return present if present is self._core.position else self._core.bind(made)

    def begin(self, plan: StepPlan, settings_changed: Callable[[], bool] = lambda: False) -> None:
        """A batch is given. ``settings_changed``: whether what the optimizer is told differs from what was saved.

        Raises:
            WorldChanged: as `commit`; this worker's script has caught that, and goes on.
        """
        self._require_world()
        if self.record is not None:
            self.record.begin(self.world, plan)
        if warning := self._core.begin(plan, settings_changed):
            self.warn(warning)

    def voted(self, vote: Vote, remedy: str = "", device_seconds: float = 0.0, difference: str = "") -> None:
        """The gradients of all members have arrived, and with them their votes.

        ``remedy``: what a script should do that has made its step on too few samples. ``device_seconds``: from the
        batch's begin to the end of this worker's passes, by the device's own clock; 0 where host and device go together.
        ``difference``: between the batches of the members, in a line, if they are not the same.

        Raises:
            RuntimeError: the script does what can't be made right.
            UserError: members have other batches.
        """
        if not self._core.voted(vote, time.monotonic(), device_seconds=device_seconds):
            self._disagree(remedy, difference)

    def all_ended(self, vote: Vote) -> None:
        """All members have voted on a step to which this one, at least, has nothing to add.

        Raises:
            RuntimeError: others make that step.
        """
        self._core.voted(vote, time.monotonic())
        if vote.ended != self._core.world.size:
            self._disagree()

    def step_made(self, learning_rate: float, compared: int = 0) -> None:
        """The parameters have changed. ``compared``: members of whose states the vote has shown that they were one before."""
        self._worked_at = time.monotonic()
        if pause := self._core.step_made(learning_rate, self._worked_at, compared=compared):
            self.session.say(pause)
        if self.record is not None:
            self.record.commit(self.world, self.progress)

    def commit(self) -> None:
        """Everything up to here is safe.

        Raises:
            WorldChanged: all members agreed to leave this world.
        """
        self._require_world()
        if self._core.commit():
            self.worlds.tell(p.WorldLeft("the members voted to leave this world"))
            self._require_world()

    def loaded(self, progress: Progress) -> None:
        """The training state was loaded from a file, or came from another worker."""
        self._core.position.loaded(progress)

    def batches_over(self) -> None:
        """The loader has no further batch in this epoch."""
        self._core.position.batch = None

    def epoch_ended(self) -> None:
        """The training function goes on to the next epoch."""
        self._core.position.progress = self.progress.next_epoch()

    def advance(self, activity: Activity) -> None:
        """Something was done, and this is begun. Any thread may say that what was begun goes on (``ALIVE``)."""
        self._core.reporting.advance(activity, time.monotonic())

    @contextlib.contextmanager
    def waiting(self, then: Activity = Activity.UPDATE) -> Iterator[None]:
        """Around a collective, which may last as long as another member takes. ``then``: what goes on after it."""
        self.advance(Activity.WAIT)
        try:
            yield
        finally:
            self.advance(then)

    def resume_clock(self) -> None:
        """Training goes on after what is neither a step nor a pause, such as an evaluation."""
        self._core.reporting.resume_clock(time.monotonic())

    def plan_total(self, steps: int, epochs: int) -> None:
        """How much there is to do in all, as far as is known."""
        self._core.reporting.totals = steps, epochs

    def _require_world(self) -> None:
        if self._core.state is WorkerState.LEAVING:
            raise WorldChanged(self._core.left_because)

    def _disagree(self, remedy: str = "", difference: str = "") -> NoReturn:
        kind = UserError if difference else RuntimeError
        self.failure = kind(self._core.position.disagreement(self._core.world.size, remedy, difference))
        raise self.failure
