"""One process's part in a job: session, collective and batch policy, and the way through the worlds.

What differs between frameworks is added by the twins (`elasticdl.elastic.torch_kit.torch_job`, `elasticdl.elastic.keras.keras_job`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from elasticdl.common.credentials import WorkerEnvironment
from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.port import Collective
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.interruptions import Stopped, WorldBroken, WorldChanged
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.step_times import Activity
from elasticdl.elastic.core.worker import WorkerCore
from elasticdl.elastic.core.world import ALONE, World
from elasticdl.elastic.link.connection import MasterConnection, prepare_horovod
from elasticdl.elastic.link.session import Session
from elasticdl.elastic.link.store import Endpoint
from elasticdl.elastic.training.carried import Carried
from elasticdl.elastic.training.kept_state import KeptState
from elasticdl.elastic.training.left_behind import leave_behind, take_over
from elasticdl.elastic.training.sigterm import Sigterm
from elasticdl.elastic.training.steps import Steps
from elasticdl.elastic.training.worker_files import Handover, SampleRecord
from elasticdl.job import messages as m
from elasticdl.job.spec import CHECK_OFF

log = logging.getLogger(__name__)

# Of the time in which a worker that was told to leave must have left. The rest is for writing the state, if that can be left.
LINGER_SHARE, LONGEST_LINGER_SHARE = 0.5, 0.9

Result = TypeVar("Result")


class Hooks:
    """Called in each world, once its collective has been started."""

    def before_sync(self, world: World) -> None:
        """Rank 0 may still change its state, which the others are about to receive (a checkpoint)."""

    def on_world(self, world: World) -> None:
        """All members stand at the same state."""


class JobContext(Steps):
    """What a training script holds of its job, whatever the framework. Make it with `connect`, and `close` it."""

    divides_batches: ClassVar[bool] = False  # scripts that ask for batch sizes do so to divide batches themselves

    def __init__(self, session: Session, collective: Collective, policy: BatchPolicy, seed: int) -> None:
        super().__init__(session)
        self.collective = collective
        self.policy = policy
        self.seed = seed
        self.check_state = CHECK_OFF
        self.least_workers = self.most_workers = 1  # with which the job goes on, and was asked for
        self.handover: Handover | None = None  # None: pods share no folder, checkpoints replace it, or nobody comes
        self.kept: KeptState | None = None  # None: checkpoints replace it, or nobody comes
        self._closers = contextlib.ExitStack()
        self.sigterm = Sigterm(session)

    @classmethod
    def connect(
        cls, policy: BatchPolicy, *, seed: int, environ: Mapping[str, str], link: MasterConnection | None = None
    ) -> Self:
        """The context of this process: under the master that the environment names, or alone.

        ``link``: the open link to that master, if there is one already; the context closes it.

        Raises:
            UserError: the environment is unusable, or Horovod is missing.
        """
        environment = WorkerEnvironment.from_env(environ)
        if environment is None:
            return cls(Session(WorkerCore(under_master=False)), cls._open_collective(None, "auto"), policy, seed)
        prepare_horovod(environ)
        opened = link is not None
        link = link or MasterConnection(environment)
        try:
            collective = cls._open_collective(link.endpoint, link.spec.collective)
        except UserError as error:  # no other worker would do better
            if not opened:
                link.open()
                link.session.say(m.failed(str(error), "", users=True))
                link.close()
            raise
        context = cls(link.session, collective, policy, seed)
        link.session.serve(collective)
        if not opened:
            link.open()
        context._closers.callback(collective.close)
        context._closers.callback(link.close)
        context.check_state, workers = link.spec.check_state, link.spec.num_workers
        context.least_workers, context.most_workers = workers.minimum, workers.maximum
        folder = Path(environment.job_spec).parent
        context.handover = None if link.spec.image else Handover(folder)
        context.kept = KeptState.of(link.spec, folder)
        share = LINGER_SHARE if context.kept.place else LONGEST_LINGER_SHARE
        link.session.core.linger_seconds = share * link.spec.stop_grace
        if record := link.spec.sample_record:
            context.record = SampleRecord(Path(record), environment.worker_id)
            context._closers.callback(context.record.close)
        return context

    @classmethod
    @abstractmethod
    def _open_collective(cls, endpoint: Endpoint | None, engine: str) -> Collective:
        """Without an endpoint when this process runs alone. ``engine``: as ``--collective``."""

    # -- facts --

    @property
    def world(self) -> World:
        return self.collective.world

    @property
    def under_master(self) -> bool:
        """Whether there may be other workers."""
        return self._core.under_master

    @property
    def has_world(self) -> bool:
        """Whether the number of workers is known by now."""
        return not self.under_master or self.world.version > ALONE.version

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def known_rank(self) -> int:
        """The rank, as a script may act by it: true on one worker. Before the first world that is the job's very first worker, and
        never one that comes later."""
        if self.has_world:
            return self.rank
        return int(self._core.worker_id != 0 or self.comes_later)

    @property
    def comes_later(self) -> bool:
        """The job had trained already when this worker came."""
        return self.session.jobs_place() > (0, 0)

    @property
    def size(self) -> int:
        return self.world.size

    def forbid_steps(self, why: str) -> None:
        """A step of an optimizer raises a UserError from here on."""

    def allow_steps(self) -> None:
        """The script's loop trains with those of the other workers."""

    # -- from world to world --

    def run(self, train: Callable[[], Result], state: Carried, hooks: Hooks | None = None) -> Result:
        """Call ``train`` in each world, after the hooks, until it returns on all members.

        A SIGTERM means: finish the step, leave. A second failure while the first is being mended is the same once more.

        Raises:
            Stopped: this worker is to leave for good; the state is that of the last commit.
            JobFailedError: world after world broke without a step being made.
            UnreachableError: there has been no master for too long.
        """
        hooks, result = hooks or Hooks(), list[Result]()

        def run_function(world: World) -> None:
            hooks.on_world(world)
            result[:] = [train()]

        with self.sigterm.listening(), self._handing_over(state):
            try:
                self._ask_for_world(state)
                while (world := self._next_world(state, hooks)) is not None:
                    self.worlds.attempt(functools.partial(run_function, world), p.Trigger.RETURNED)
            finally:
                self.collective.stop()
        return result[0]

    def join(self, state: Carried) -> None:
        """For a script whose control flow does not notice changes of the world: be in one, at rank 0's state.

        Raises:
            Stopped, JobFailedError, UnreachableError: as `run`, here and below.
        """
        if self.under_master:
            self.sigterm.listen()
        with self._handing_over(state):
            self._ask_for_world(state)
            self._next_world(state)

    def change_world(self, state: Carried, why: WorldChanged | WorldBroken) -> None:
        """Leave the present world, and be in the next when this returns."""
        if isinstance(why, WorldBroken):
            log.info("%s", why)
            self.worlds.tell(p.CollectiveFailed(str(why)))
        with self._handing_over(state):
            self._next_world(state)

    def end(self, state: Carried) -> None:
        """The script is done; return when all members' are: who is lost till then has somebody to do its part."""
        with self._handing_over(state):
            self.worlds.tell(p.Trigger.RETURNED)
            while self._next_world(state) is not None:
                self.worlds.tell(p.Trigger.RETURNED)
        self.collective.stop()

    # -- what the master is told --

    def warn(self, message: str) -> None:
        """Into the job's journal, which everybody is shown; of a script that runs alone, into its log."""
        log.log(logging.INFO if self.under_master else logging.WARNING, "%s", message)
        self.session.notify("warning", message=message)

    def tell_work(self, event: str, **fields: Any) -> None:
        """That a script has just evaluated, or written a checkpoint: so that this does not count as training."""
        self._worked_at = time.monotonic()
        self.session.notify(event, **fields)

    def tell_steps_over(self, step: int) -> None:
        """There will be no further step; this may come long after the last one."""
        self.session.notify("steps_over", step=step, seconds=time.monotonic() - self._worked_at)

    def finish(self, *, step: int, epochs: int, metrics: Mapping[str, float]) -> None:
        """Tell the master that training is complete, on all members of this worker's world."""
        if self.rank == 0:
            for left in (self.handover, self.kept):
                if left is not None:
                    left.remove()
        if self.rank != 0:  # whose reports of the last steps are perhaps still on their way
            epochs = 0
        self.session.say(m.Finished(step, epochs, metrics, together=True))

    def fail(self, message: str, traceback: str, *, users: bool = True) -> None:
        """Tell the master that this worker can't go on. ``users``: the user's code has raised."""
        self.session.say(m.failed(message, traceback, users=users))

    def close(self) -> None:
        """Leave the job: the session and the store are closed. Further calls do nothing."""
        self._closers.close()

    # -- details --

    def _ask_for_world(self, state: Carried) -> None:
        state.bind_state()
        if not self.has_world:
            state.require_jobs_facts()
        self.worlds.begin()

    def _next_world(self, state: Carried, hooks: Hooks | None = None) -> World | None:
        world = self.worlds.next(_Trainee(self, state, hooks or Hooks()))
        if world is not None:
            place = (world.version, world.rank, world.size, state.progress.step, world.reason)
            log.info("world %d: rank %d of %d, step %d (%s)", *place)
        return world

    @contextlib.contextmanager
    def _handing_over(self, state: Carried) -> Iterator[None]:
        try:
            yield
        except Stopped as stopped:
            leave_behind(self, state, stopped)
            raise


@dataclass(frozen=True, slots=True)
class _Trainee:
    """What a job and its training state do on the way from world to world (`elasticdl.elastic.training.worlds.Member`)."""

    job: JobContext
    state: Carried
    hooks: Hooks

    def enter(self, world: World) -> None:
        job = self.job
        job.collective.require_one_engine(job.session.store, world)
        job.collective.start(world)
        if world.is_first and world.rank == 0:
            job.session.notify("collective", engine=job.collective.engine)

    def synchronize(self, world: World) -> bool:
        self.hooks.before_sync(world)
        if world.is_first and world.rank == 0:
            take_over(self.job, self.state)
        self.state.sync(world)
        self.job.session.core.synced(self.state.progress)
        return True

    def leave(self) -> None:
        self.job.collective.stop()

    def cast_end_vote(self) -> None:
        self.job.advance(Activity.END)
        self.job.all_ended(self.state.cast_end_vote())


ContextT = TypeVar("ContextT", bound=JobContext)
