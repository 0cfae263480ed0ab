"""One process's part in a job: composes session, collective and batch policy, and runs the loop.

What differs between frameworks (device, data loader, training state) is added by the twins
(`elasticdl.elastic.torch.context`, `elasticdl.elastic.keras.context`).
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from elasticdl.common.environment import WorkerEnvironment
from elasticdl.common.errors import UserError
from elasticdl.common.reason import one_line
from elasticdl.elastic.collectives.horovod import HorovodCollective
from elasticdl.elastic.collectives.port import Endpoint
from elasticdl.elastic.core import messages as m
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.batch_plan import BatchPolicy
from elasticdl.elastic.core.errors import Stopped
from elasticdl.elastic.core.position import Position
from elasticdl.elastic.core.progress import Progress, SampleOrder
from elasticdl.elastic.core.worker import WorkerCore
from elasticdl.elastic.core.world import ALONE, World
from elasticdl.elastic.session.connection import MasterConnection, prepare_horovod
from elasticdl.elastic.session.session import Session
from elasticdl.elastic.training.handover import Handover
from elasticdl.elastic.training.loop import ElasticLoop, Hooks, State, warn
from elasticdl.elastic.training.record import SampleRecord
from elasticdl.elastic.training.state import TrainingState

log = logging.getLogger(__name__)

# Of the time in which a worker that was told to leave must have left; the rest is for writing the state.
LINGER_SHARE = 0.5

Result = TypeVar("Result")
CollectiveT = TypeVar("CollectiveT", bound=HorovodCollective)


class JobContext(Generic[CollectiveT]):
    """What a training script holds of its job, whatever the framework. Make it with `open_context`, and `close` it."""

    divides_batches: ClassVar[bool] = False  # scripts that ask for batch sizes do so to divide batches themselves

    def __init__(self, session: Session, collective: CollectiveT, policy: BatchPolicy, seed: int) -> None:
        self.session = session
        self.collective = collective
        self.policy = policy
        self.seed = seed
        self.record: SampleRecord | None = None
        self.handover: Handover | None = None  # none where checkpoints are written instead
        self._loop = ElasticLoop(session, collective)
        self._closers = contextlib.ExitStack()

    # -- facts --

    @property
    def world(self) -> World:
        return self.collective.world

    @property
    def under_master(self) -> bool:
        """Whether there may be other workers."""
        return self.session.core.under_master

    @property
    def has_world(self) -> bool:
        """Whether the number of workers is known by now."""
        return not self.under_master or self.world.version > ALONE.version

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def leaving(self) -> bool:
        """This worker's vote: whether the present world is to be left after this step."""
        return self.session.core.leaving

    @property
    def progress(self) -> Progress:
        """Where training stands."""
        return self.session.core.position.progress

    def order(self, data: Sized | int, *, shuffle: bool = True, drop_last: bool = False) -> SampleOrder:
        """``data``: the data set, or the number of its samples.

        Raises:
            UserError: there are none, or with ``drop_last`` not enough.
        """
        samples = data if isinstance(data, int) else len(data)
        if samples < 1:
            raise UserError(f"the data set has {samples} samples; expected at least one")
        order = SampleOrder(samples, self.policy, self.seed, shuffle, drop_last)
        order.require_step(workers=1)
        return order

    # -- training --

    def run(self, train: Callable[[], Result], state: TrainingState, hooks: Hooks | None = None) -> Result:
        """Train through as many worlds as it takes; see `ElasticLoop.run`. A SIGTERM means: finish the step, leave."""

        given = hooks or Hooks()

        def before_sync(world: World) -> None:
            given.before_sync(world)
            if world.is_first and world.rank == 0:
                self._take_over(state)

        def on_world(world: World) -> None:
            if world.is_first and world.rank == 0:
                self._warn_of_double_correction(state)
            given.on_world(world)

        with self._told_of_sigterm():
            try:
                return self._loop.run(train, state, Hooks(before_sync, on_world))
            except Stopped as stopped:
                if stopped.drained and state.has_state:
                    self._hand_over(state)
                raise

    def advance(self, *, waiting: bool) -> None:
        """Something is done, or begun that may last as long as another member takes."""
        self.session.post(p.Advanced(waiting))

    def adopt(self, state: State, position: Position, made: p.StateMade) -> Position:
        """As `ElasticLoop.adopt`."""
        return self._loop.adopt(state, position, made)

    def post(self, event: p.Event) -> None:
        """Something has happened in the training function; as `ElasticLoop.post`."""
        if self.record is not None and isinstance(event, p.BatchGiven):
            self.record.begin(self.world, event.plan)
        self._loop.post(event)
        if self.record is not None and isinstance(event, p.StepMade):
            self.record.commit(self.world, self.progress)

    def warn(self, message: str) -> None:
        """Into this worker's log and the job's journal."""
        warn(self.session, message)

    def finish(self, *, step: int, epochs: int, metrics: Mapping[str, float]) -> None:
        """Tell the master that training is complete, on all members of this worker's world."""
        if self.handover is not None and self.rank == 0:
            self.handover.remove()
        if self.rank != 0:  # whose reports of the last steps are perhaps still on their way
            epochs = 0
        self.session.say(m.Finished(step, epochs, metrics, together=True))

    def fail(self, message: str, traceback: str, *, users: bool = True) -> None:
        """Tell the master that this worker can't go on. ``users``: the user's code has raised."""
        self.session.say(m.failed(message, traceback, users=users))

    def on_close(self, close: Callable[[], Any]) -> None:
        self._closers.callback(close)

    def close(self) -> None:
        """Leave the job: the session and the store are closed. Further calls do nothing."""
        self._closers.close()

    # -- details --

    def _hand_over(self, state: TrainingState) -> None:
        """Leave the state for those who come, unless it is certain that others hold it."""
        alone = self.size == 1 or self.session.core.left_broken
        if self.handover is None or not (alone or self.rank == 0):
            return
        try:
            path = self.handover.write(state)
        except Exception as error:  # noqa: BLE001  a full disk is a RuntimeError of torch's; a value may not be picklable
            if alone:
                why = one_line(error.__context__ or error)
                self.warn(
                    f"the state after step {state.step} leaves with its last worker: {why}; give --checkpoint_dir"
                )
            return
        log.info("left the state after step %d in %s", state.step, path)

    def _take_over(self, state: TrainingState) -> None:
        path = self.handover.read(state) if self.handover is not None else None
        if path is not None:
            progress = state.progress
            where = {"step": progress.step, "epoch": progress.epoch, "samples": progress.samples}
            self.session.notify("resumed", **where, path=str(path))

    def _warn_of_double_correction(self, state: TrainingState) -> None:
        if state.rate is None:
            return
        warning = state.rate.double_correction(state.progress.epoch, self.collective.pretend_size(self.size + 1))
        if warning:
            self.warn(warning)

    @contextlib.contextmanager
    def _told_of_sigterm(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        told = p.Terminated("told to leave (SIGTERM)")
        before = signal.signal(signal.SIGTERM, lambda *_: self.session.post(told))
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


ContextT = TypeVar("ContextT", bound=JobContext[Any])


def open_context(
    make_context: Callable[[Session, CollectiveT], ContextT],
    make_collective: Callable[[Endpoint | None], CollectiveT],
    environ: Mapping[str, str],
    link: MasterConnection | None,
) -> ContextT:
    """The context of this process: under the master that the environment names, or alone.

    ``link``: the open link to that master, if there is one already; the context closes it. ``make_collective`` is given
    no endpoint when this process runs alone.

    Raises:
        UserError: the environment is unusable, or Horovod is missing.
    """
    environment = WorkerEnvironment.from_env(environ)
    if environment is None:
        return make_context(Session(WorkerCore(under_master=False)), make_collective(None))
    prepare_horovod(environ)
    opened = link is not None
    link = link or MasterConnection(environment)
    collective = make_collective(link.endpoint)
    context = make_context(link.session, collective)
    link.session.break_collective = collective.break_world
    if not opened:
        link.open()
    context.on_close(link.close)
    link.session.core.linger_seconds = LINGER_SHARE * link.spec.stop_grace
    context.handover = Handover(Path(environment.job_spec).parent)
    if folder := link.spec.sample_record:
        context.record = SampleRecord(Path(folder), environment.worker_id)
        context.on_close(context.record.close)
    return context
