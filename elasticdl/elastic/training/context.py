"""One process's part in a job: composes session, collective and batch policy, and runs the loop.

What differs between frameworks (device, data loader, training state) is added by the twins
(`elasticdl.elastic.torch.context`, `elasticdl.elastic.keras.context`).
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from elasticdl.common.environment import WorkerEnvironment
from elasticdl.common.errors import UserError
from elasticdl.common.reason import one_line
from elasticdl.elastic.collectives.horovod import HorovodCollective
from elasticdl.elastic.collectives.port import Endpoint
from elasticdl.elastic.core.batch_plan import BatchPolicy
from elasticdl.elastic.core.errors import Stopped
from elasticdl.elastic.core.pause import PauseClock
from elasticdl.elastic.core.progress import Progress, SampleOrder, StepPlan
from elasticdl.elastic.core.vote import Vote
from elasticdl.elastic.core.world import ALONE, World
from elasticdl.elastic.session.connection import MasterConnection, prepare_horovod
from elasticdl.elastic.session.membership import Membership, StandaloneMembership
from elasticdl.elastic.session.notices import notify, say_failure, say_pause
from elasticdl.elastic.session.reports import StepReport
from elasticdl.elastic.training.handover import Handover
from elasticdl.elastic.training.loop import ElasticLoop, Hooks
from elasticdl.elastic.training.record import SampleRecord
from elasticdl.elastic.training.state import TrainingState
from elasticdl.proto import elasticdl_pb2 as pb

log = logging.getLogger(__name__)

# Of the time in which a worker that was told to leave must have left; the rest is for writing the state.
LINGER_SHARE = 0.5

Result = TypeVar("Result")
CollectiveT = TypeVar("CollectiveT", bound=HorovodCollective)


class JobContext(Generic[CollectiveT]):
    """What a training script holds of its job, whatever the framework. Make it with `open_context`, and `close` it."""

    divides_batches: ClassVar[bool] = False  # scripts that ask for batch sizes do so to divide batches themselves

    def __init__(self, membership: Membership, collective: CollectiveT, policy: BatchPolicy, seed: int) -> None:
        self.membership = membership
        self.collective = collective
        self.policy = policy
        self.seed = seed
        self.total_epochs = 0
        self.total_steps = 0
        self.record: SampleRecord | None = None
        self.handover: Handover | None = None  # none where checkpoints are written instead
        self._pause = PauseClock()
        self._loop = ElasticLoop(membership, collective, self._pause)
        self.linger_seconds = 0.0  # that the last worker, told to leave, waits for its replacement
        self._lingers = ""  # why it is to leave
        self._last_size = 0
        self._grew = False
        self._last_step_at = time.monotonic()
        self._closers = contextlib.ExitStack()

    # -- facts --

    @property
    def world(self) -> World:
        return self.collective.world

    @property
    def has_world(self) -> bool:
        """Whether the number of workers is known by now."""
        return isinstance(self.membership, StandaloneMembership) or self.world.version > ALONE.version

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def leaving(self) -> bool:
        return self.membership.leaving

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

        def enter(world: World) -> None:
            self._grew = world.size > self._last_size
            self._last_size = world.size
            if self._lingers and world.size > 1:
                self.membership.drain(self._lingers)
            if world.is_first and world.rank == 0:
                self._warn_of_double_correction(state)
            given.on_world(world)

        with self._drain_on_sigterm():
            try:
                return self._loop.run(train, state, Hooks(before_sync, enter))
            except Stopped as stopped:
                if stopped.drained and state.has_state:
                    self._hand_over(state)
                raise

    def advance(self, *, waiting: bool) -> None:
        self.membership.advance(waiting=waiting)

    def record_samples(self, plan: StepPlan) -> None:
        if self.record is not None:
            self.record.begin(self.world, plan)

    def resume_clock(self) -> None:
        """Training goes on after something that is no step (an evaluation): its time is in no step and no pause."""
        self._pause.resume(time.monotonic())
        self._last_step_at = time.monotonic()

    def step_done(self, progress: Progress, vote: Vote, learning_rate: float, *, ends_epoch: bool) -> None:
        now = time.monotonic()
        seconds, self._last_step_at = now - self._last_step_at, now
        self.membership.reached(progress.step)
        if self.record is not None:
            self.record.commit(self.world, progress)
        pause = self._pause.step_done(now, world_version=self.world.version, grew=self._grew)
        if pause is not None:
            say_pause(self.membership, pause)
        self.membership.report_step(
            StepReport(
                step=progress.step,
                epoch=progress.epoch,
                loss=vote.loss,
                samples=vote.samples,
                learning_rate=learning_rate,
                seconds=seconds,
                world_version=self.world.version,
                total_samples=progress.samples,
                ends_epoch=ends_epoch,
                total_steps=self.total_steps,
                total_epochs=self.total_epochs,
            )
        )

    def warn(self, message: str) -> None:
        """Into this worker's log and the job's journal."""
        log.warning("%s", message)
        notify(self.membership, "warning", message=message)

    def finish(self, *, step: int, epochs: int, metrics: Mapping[str, float]) -> None:
        """Tell the master that training is complete, on all members of this worker's world."""
        if self.handover is not None and self.rank == 0:
            self.handover.remove()
        if self.rank != 0:  # whose reports of the last steps are perhaps still on their way
            epochs = 0
        finished = pb.Finished(step=step, epochs=epochs, metrics=metrics, together=True)
        self.membership.say(pb.WorkerMessage(finished=finished))

    def fail(self, message: str, traceback: str) -> None:
        """Tell the master that the user's code has raised."""
        say_failure(self.membership, pb.Failed.USER, message, traceback)

    def on_close(self, close: Callable[[], Any]) -> None:
        self._closers.callback(close)

    def close(self) -> None:
        """Leave the job: the session and the store are closed. Further calls do nothing."""
        self._closers.close()

    # -- details --

    def _hand_over(self, state: TrainingState) -> None:
        """Leave the state for those who come, unless it is certain that others hold it."""
        alone = self.size == 1 or self._loop.left_broken
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
            notify(self.membership, "resumed", **where, path=str(path))

    def _warn_of_double_correction(self, state: TrainingState) -> None:
        if state.rate is None:
            return
        warning = state.rate.double_correction(state.progress.epoch, self.collective.pretend_size(self.size + 1))
        if warning:
            self.warn(warning)

    @contextlib.contextmanager
    def _drain_on_sigterm(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, lambda *_: self._leave("told to leave (SIGTERM)"))
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _leave(self, reason: str) -> None:
        if self.size > 1:  # others hold the state
            self.membership.drain(reason)
        elif not self._lingers:
            self._lingers = reason
            self.membership.linger(reason)
            latest = threading.Timer(self.linger_seconds, self.membership.drain, [reason])
            latest.daemon = True
            latest.start()
            self._closers.callback(latest.cancel)


ContextT = TypeVar("ContextT", bound=JobContext[Any])


def open_context(
    make_context: Callable[[Membership, CollectiveT], ContextT],
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
        return make_context(StandaloneMembership(), make_collective(None))
    prepare_horovod(environ)
    opened = link is not None
    link = link or MasterConnection(environment)
    collective = make_collective(link.endpoint)
    context = make_context(link.session, collective)
    link.attach(collective.break_world)
    if not opened:
        link.open()
    context.on_close(link.close)
    context.linger_seconds = LINGER_SHARE * link.spec.stop_grace
    context.handover = Handover(Path(environment.job_spec).parent)
    if folder := link.spec.sample_record:
        context.record = SampleRecord(Path(folder), environment.worker_id)
        context.on_close(context.record.close)
    return context
