"""One process's part in a job: composes session, collective, device and batch policy, and runs the loop."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sized
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset

from elasticdl.common.environment import WorkerEnvironment
from elasticdl.common.errors import UserError
from elasticdl.elastic.batch_plan import BatchPolicy
from elasticdl.elastic.link import Link, prepare_horovod
from elasticdl.elastic.loop import ElasticLoop, Hooks
from elasticdl.elastic.notices import notify
from elasticdl.elastic.pause import Pause, PauseClock
from elasticdl.elastic.progress import Progress, SampleOrder, StepPlan
from elasticdl.elastic.record import SampleRecord
from elasticdl.elastic.reports import StepReport
from elasticdl.elastic.session import Alone, Membership
from elasticdl.elastic.torch.collective import TorchCollective, import_horovod
from elasticdl.elastic.torch.device import can_reduce_on_gpu, choose_device
from elasticdl.elastic.torch.loader import ElasticDataLoader, LoaderOptions
from elasticdl.elastic.torch.reducer import Vote
from elasticdl.elastic.torch.sampler import ElasticSampler
from elasticdl.elastic.torch.state import TorchState
from elasticdl.elastic.world import World
from elasticdl.proto import elasticdl_pb2 as pb

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class ElasticContext:
    """What a training script holds of its job. Make it with `connect`, and `close` it."""

    def __init__(self, membership: Membership, collective: TorchCollective, policy: BatchPolicy, seed: int) -> None:
        self.membership = membership
        self.collective = collective
        self.policy = policy
        self.seed = seed
        self.device = choose_device()
        self.total_epochs = 0
        self.total_steps = 0
        self.record: SampleRecord | None = None
        self._pause = PauseClock()
        self._loop = ElasticLoop(membership, collective, self._pause)
        self._last_size = 0
        self._grew = False
        self._last_step_at = time.monotonic()
        self._closers = contextlib.ExitStack()

    # -- facts --

    @property
    def world(self) -> World:
        return self.collective.world

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def leaving(self) -> bool:
        return self.membership.leaving

    # -- making things that belong to the job --

    def sampler(self, data: Sized | int, *, shuffle: bool = True) -> ElasticSampler:
        """``data``: the data set, or the number of its samples."""
        samples = data if isinstance(data, int) else len(data)
        if samples < 1:
            raise UserError(f"the data set has {samples} samples; expected at least one")
        return ElasticSampler(SampleOrder(samples, self.policy, self.seed, shuffle), self)

    def loader(
        self, dataset: Dataset[Any], *, shuffle: bool = True, options: LoaderOptions | None = None
    ) -> ElasticDataLoader:
        sampler = self.sampler(dataset, shuffle=shuffle)  # type: ignore[arg-type]
        return ElasticDataLoader(dataset, sampler, options or LoaderOptions(), self.device)

    def state(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        data: ElasticDataLoader | ElasticSampler | None,
        values: dict[str, Any],
        *,
        snapshot: bool = False,
    ) -> TorchState:
        return TorchState(self, model, optimizer, data, values, snapshot=snapshot)

    # -- training --

    def run(self, train: Callable[[], Result], state: TorchState, hooks: Hooks | None = None) -> Result:
        """Train through as many worlds as it takes; see `ElasticLoop.run`. A SIGTERM means: finish the step, leave."""

        given = hooks or Hooks()

        def enter(world: World) -> None:
            self._grew = world.size > self._last_size
            self._last_size = world.size
            if world.is_first and world.rank == 0:
                self._warn_of_double_correction(state)
            given.on_world(world)

        with self._drain_on_sigterm():
            return self._loop.run(train, state, Hooks(given.before_sync, enter))

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
            self._say_pause(pause)
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
        """Tell the master that this worker's training is complete."""
        self.membership.say(pb.WorkerMessage(finished=pb.Finished(step=step, epochs=epochs, metrics=metrics)))

    def fail(self, message: str, traceback: str) -> None:
        """Tell the master that the user's code has raised."""
        failed = pb.Failed(cause=pb.Failed.USER, message=message, traceback=traceback)
        self.membership.say(pb.WorkerMessage(failed=failed))

    def on_close(self, close: Callable[[], Any]) -> None:
        self._closers.callback(close)

    def close(self) -> None:
        """Leave the job: the session and the store are closed. Further calls do nothing."""
        self._closers.close()

    # -- details --

    def _warn_of_double_correction(self, state: TorchState) -> None:
        if state.rate is None:
            return
        warning = state.rate.double_correction(state.progress.epoch, self.collective.pretend_size(self.size + 1))
        if warning:
            self.warn(warning)

    def _say_pause(self, pause: Pause) -> None:
        log.info(
            "pause of %.0f ms (%s): notice %.0f, drain %.0f, rendezvous %.0f, init %.0f, sync %.0f, first step %.0f",
            *(1e3 * pause.total, pause.kind, 1e3 * pause.notice, 1e3 * pause.drain, 1e3 * pause.rendezvous),
            *(1e3 * pause.init, 1e3 * pause.sync, 1e3 * pause.first_step),
        )
        message = pb.Pause(
            world_version=pause.world_version,
            kind=pause.kind,
            notice=pause.notice,
            drain=pause.drain,
            rendezvous=pause.rendezvous,
            init=pause.init,
            sync=pause.sync,
            first_step=pause.first_step,
            total=pause.total,
            steps_torn=pause.steps_torn,
        )
        self.membership.say(pb.WorkerMessage(pause=message))

    @contextlib.contextmanager
    def _drain_on_sigterm(self) -> Any:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, lambda *_: self.membership.drain("told to leave (SIGTERM)"))
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


def connect(policy: BatchPolicy, *, seed: int, environ: Mapping[str, str], link: Link | None = None) -> ElasticContext:
    """The context of this process: under the master that the environment names, or alone.

    ``link``: the open link to that master, if there is one already; the context closes it.

    Raises:
        UserError: the environment is unusable, or Horovod is missing.
    """
    environment = WorkerEnvironment.from_env(environ)
    if environment is None:
        return ElasticContext(Alone(), TorchCollective(None, None, reduce_on_gpu=False), policy, seed)
    prepare_horovod(environ)
    hvd = import_horovod()
    opened = link is not None
    link = link or Link(environment)
    collective = TorchCollective(hvd, link.endpoint, reduce_on_gpu=can_reduce_on_gpu(hvd, choose_device()))
    context = ElasticContext(link.session, collective, policy, seed)
    link.attach(collective.break_world)
    if not opened:
        link.open()
    context.on_close(link.close)
    context.record = link.open_record()
    if context.record is not None:
        context.on_close(context.record.close)
    return context
