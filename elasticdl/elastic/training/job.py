"""One process's part in a job: session, collective and batch policy, and the way through the worlds.

What differs between frameworks is added by the twins (`elasticdl.elastic.torch_kit.tensors`, `elasticdl.elastic.keras.loader`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import stat
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NoReturn, Protocol, Self, TypeVar

from elasticdl.common.credentials import SEVERAL, WorkerEnvironment
from elasticdl.common.errors import UserError
from elasticdl.common.reason import one_line
from elasticdl.elastic.collectives.horovod import prepare_horovod
from elasticdl.elastic.collectives.port import Collective, Inside
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.plan import WHOLE, BatchPolicy, Progress, StepPlan
from elasticdl.elastic.core.protocol import ALONE, Stopped, World, WorldBroken, WorldChanged
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.core.training_step import Position, Vote, WorkerState
from elasticdl.elastic.core.worker import WorkerCore
from elasticdl.elastic.link.session import MasterConnection, Session
from elasticdl.elastic.link.store import Endpoint
from elasticdl.elastic.training.kept_state import Carried, KeptState, SampleRecord
from elasticdl.job import messages as m
from elasticdl.job.journal import WorldMark
from elasticdl.job.spec import CHECK_OFF

# The way from world to world: one driver for all front ends.

log = logging.getLogger(__name__)


class Member(Protocol):
    """What a front end does on the way. Each may raise `WorldBroken`, and then the next world is tried."""

    def enter(self, world: World) -> None:
        """Connect to the other members."""

    def synchronize(self, world: World) -> bool:
        """Bring all members to rank 0's state. False: the script does so itself, in this world."""

    def leave(self) -> None:
        """Disconnect; nothing if that is done already."""

    def cast_end_vote(self) -> None:
        """Take part in a step with nothing to add: the training function has returned."""


class Worlds:
    """One worker's way through the worlds: does what the worker's core orders the training thread to do."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._core = session.core

    def tell(self, event: p.Event) -> None:
        """Something has happened to the training thread, which is the present one."""
        self._session.witness.thread = threading.get_ident()
        self._session.post(event)

    def begin(self) -> None:
        """Ask for the first world, or for that of another training."""
        self._core.position.leave()
        self.tell(p.Trigger.READY)

    def next(self, member: Member) -> World | None:
        """Be in the next world that is trained in. None: the training functions of all have returned.

        Raises:
            Stopped: this worker is to leave for good; the state is that of the last commit.
            JobFailedError: world after world broke without a step being made.
            UnreachableError: there has been no master for too long.
        """
        while True:
            match self._session.order():
                case p.Command.CONNECT:
                    if self._core.under_master and self._session.is_first_process:
                        print_mark(self._core.worker_id, self._core.world)
                    self.attempt(lambda: member.enter(self._core.world), p.Trigger.CONNECTED)
                case p.Command.SYNCHRONIZE:
                    if not self.attempt(lambda: member.synchronize(self._core.world), p.Trigger.SYNCED):
                        return self._core.world
                case p.Command.TRAIN:
                    return self._core.world
                case p.LeaveWorld(_, broken):
                    self._core.position.undo() if broken else self._core.position.leave()
                    member.leave()
                    self.tell(p.Trigger.CLOSED)
                case p.Command.CAST_END_VOTE:
                    self.attempt(member.cast_end_vote, p.Trigger.ALL_RETURNED)
                case p.Command.COMPLETE:
                    return None
                case p.LeaveJob(reason, checkpoint, drained):
                    raise Stopped(reason, checkpoint=checkpoint, drained=drained)
                case p.Fail(error, message):
                    raise error(message)

    def attempt(self, work: Callable[[], object], done: p.Trigger) -> bool:
        """Tell that it is done, or why this world is left. False: it is done, and there is nothing to tell."""
        try:
            if work() is False:
                return False
            self.tell(done)
        except WorldChanged as change:
            self.tell(p.WorldLeft(str(change)))  # which the core knows, unless a hook has raised it
        except WorldBroken as failure:
            log.info("%s", failure)  # a lost worker is no matter, and the master tells of it
            self.tell(p.CollectiveFailed(str(failure)))
        return True


def print_mark(worker_id: int, world: World) -> None:
    """Into this process's output, after all that it has printed before."""
    when = datetime.now().isoformat(" ", "milliseconds")
    line = WorldMark(when, worker_id, world.rank, world.version).to_line()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the script may have put anything there, or closed it
            stream.flush()
    out, err = _opened(1), _opened(2)
    # Where stderr leads to a file of its own. What goes through pipes comes to one log, which needs one mark.
    err_is_apart = err and stat.S_ISREG(err.st_mode) and not (out and os.path.samestat(out, err))
    for descriptor in (1, 2) if err_is_apart else (1,):
        with suppress(OSError):
            os.write(descriptor, line)


def _opened(descriptor: int) -> os.stat_result | None:
    try:
        return os.fstat(descriptor)
    except OSError:
        return None


# SIGTERM takes a worker out of its job between two steps. A handler of the script's own is called, too.


class Sigterm:
    """Of one process. What is not its main thread can set no handler, and does without."""

    def __init__(self, session: Session) -> None:
        self.came = False
        self._session = session
        self._is_inside = False  # the script's handler, which may call what stood before it
        self._pid = os.getpid()
        self._scripts: Callable[[int, FrameType | None], object] | None = None  # that stood where ours stands

    def listen(self) -> None:
        """From now on; to be called again where a script may have set its own handler since."""
        if threading.current_thread() is not threading.main_thread():
            return
        present = signal.getsignal(signal.SIGTERM)
        if present != self._handle:
            self._scripts = present if callable(present) else None
            signal.signal(signal.SIGTERM, self._handle)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within, and then no longer."""
        in_main = threading.current_thread() is threading.main_thread()
        before = in_main and signal.getsignal(signal.SIGTERM)
        self.listen()
        try:
            yield
        finally:
            if in_main:
                signal.signal(signal.SIGTERM, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a fork of the script's, which multiprocessing ends so
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self._is_inside:
            return
        self.came = True
        self._session.post(p.Terminated("told to leave (SIGTERM)"))
        if self._scripts is None:
            return
        self._is_inside = True
        try:
            self._scripts(number, frame)
        except SystemExit:  # in the middle of a step, which the others would have to make again
            log.info("the script's handler of SIGTERM ends the process: it ends after this step")
        finally:
            self._is_inside = False


# Of the time in which a worker that was told to leave must have left. The rest is for writing the state, if that can be left.
LINGER_SHARE, LONGEST_LINGER_SHARE = 0.5, 0.9

Result = TypeVar("Result")


class Hooks:
    """Called in each world, once its collective has been started."""

    def before_sync(self, world: World) -> None:
        """Rank 0 may still change its state, which the others are about to receive (a checkpoint)."""

    def on_world(self, world: World) -> None:
        """All members stand at the same state."""


class JobContext(ABC):
    """What a training script holds of its job, whatever the framework. Make it with `connect`, and `close` it.

    Only the training thread calls what is told in each step, but for `advance` with ``ALIVE``.
    """

    takes_processes: ClassVar[bool] = False  # several of one worker
    divides_batches: ClassVar[bool] = False  # scripts that ask for batch sizes do so to divide batches themselves

    def __init__(self, session: Session, collective: Collective, policy: BatchPolicy, seed: int) -> None:
        self.session = session
        self.worlds = Worlds(session)
        self.record: SampleRecord | None = None
        self.failure: Exception | None = None  # for which no further step can be made
        self._core = session.core
        self._worked_at = time.monotonic()  # when the last step, evaluation or checkpoint was over
        self.collective = collective
        self.policy = policy
        self.seed = seed
        self.check_state = CHECK_OFF
        self.least_workers = self.most_workers = 1  # with which the job goes on, and was asked for
        self.spread = WHOLE  # of this worker's processes, once the model is known
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
            if environment.processes is not None and not cls.takes_processes:
                raise UserError(SEVERAL)
            collective = cls._open_collective(link.endpoint, link.spec.collective)
        except UserError as error:  # no other worker would do better
            if not opened:
                link.open()
                link.session.say(m.failed(str(error), "", users=True))
                link.close()
            raise
        context = cls(link.session, collective, policy, seed)
        link.session.break_collective = collective.break_world
        link.session.witness.operations = collective.last_operations
        if not opened:
            link.open()
        context._closers.callback(collective.close)
        context._closers.callback(link.close)
        context.check_state, workers = link.spec.check_state, link.spec.num_workers
        context.least_workers, context.most_workers = workers.minimum, workers.maximum
        folder = Path(environment.job_spec).parent
        context.kept = KeptState.of(link.spec, folder, context.inside)
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
    def worker_id(self) -> int:
        return self._core.worker_id

    @property
    def inside(self) -> Inside:
        """The processes of this worker."""
        return self.collective.inside

    @property
    def is_alone(self) -> bool:
        """No other process takes part in this world."""
        return self.world.size == 1 and self.inside.size == 1

    @property
    def is_told_to_leave(self) -> bool:
        """This worker is to leave for good. All of its processes ask alike."""
        return self.inside.any(self._core.stopping is not None)

    @property
    def world_is_broken(self) -> bool:
        """The present world is known to be broken. All processes of this worker ask alike."""
        return self.inside.any(self._core.broken)

    @property
    def leaving(self) -> bool:
        """This worker's vote: whether the present world is to be left after this step."""
        return self._core.leaving

    @property
    def progress(self) -> Progress:
        """Where training stands."""
        return self._core.position.progress

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

    def forbid_steps(self, why: str) -> None:  # noqa: B027  a framework may have no such hook
        """A step of an optimizer raises a UserError from here on."""

    def allow_steps(self) -> None:  # noqa: B027  as above
        """The script's loop trains with those of the other workers."""

    # -- a step: plain fields of the worker's core, without a lock and without an event --

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
        self._core.begin(plan, settings_changed)

    def voted(self, vote: Vote, remedy: str = "", device_seconds: float = 0.0) -> None:
        """The gradients of all members have arrived, and with them their votes.

        ``remedy``: what a script should do that has made its step on too few samples. ``device_seconds``: from the
        batch's begin to the end of this worker's passes, by the device's own clock; 0 where host and device go together.

        Raises:
            UserError: the script does what can't be made right.
        """
        if not self._core.voted(vote, time.monotonic(), device_seconds=device_seconds):
            self._disagree(remedy)

    def all_ended(self, vote: Vote) -> None:
        """All members have voted on a step to which this one, at least, has nothing to add.

        Raises:
            UserError: others make that step.
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

    def end(self, state: Carried, on_world: Callable[[], None]) -> None:
        """The script is done; return when all members' are: who is lost till then has somebody to do its part. ``on_world``: in each further world."""
        with self._handing_over(state):
            self.worlds.tell(p.Trigger.RETURNED)
            while self._next_world(state) is not None:
                on_world()
                self.worlds.tell(p.Trigger.RETURNED)
        self.collective.stop()

    # -- what a worker that leaves for good leaves behind, and one that begins takes over --

    def is_to_keep(self, stopped: Stopped) -> bool:
        """Whether it is this worker that keeps the last state: rank 0, as all others may leave with it, and who is perhaps the only one
        to hold it, as its world broke, or all others have left before it. All of its processes ask alike: each keeps a part."""
        is_last = self.rank == 0 or self._core.left_broken or self._core.may_be_last
        return self.inside.any((stopped.drained or stopped.checkpoint) and is_last)

    def _keep(self, state: Carried) -> None:
        if self.kept is None or state.step == 0:
            return
        if state.cannot_be_kept:
            self.warn(f"nothing is kept of step {state.step}: {state.cannot_be_kept}")
            return
        began = time.monotonic()
        try:
            path = self.kept.write(state)
        except Exception as error:  # noqa: BLE001  a full disk is a RuntimeError of torch's; a value may not be picklable
            cause = str(error) if isinstance(error, UserError) else one_line(error.__context__ or error)
            why = f"{cause}; --checkpoint_dir names another place"
            self.session.notify("checkpoint_failed", step=state.step, reason=why)
            return
        seconds = time.monotonic() - began
        self.session.notify("checkpoint", step=state.step, path=path, seconds=seconds, held=seconds)

    def take_over(self, state: Carried) -> None:
        """Rank 0 of a world whose members hold no state: go on from what another has left.

        Raises:
            UserError: what was kept can't be gone on from.
        """
        path = self.kept.read(state, self.warn) if self.kept is not None else ""
        if path:
            at = state.progress
            self.session.notify("resumed", step=at.step, epoch=at.epoch, samples=at.samples, path=path)

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
        if self.rank == 0 and self.kept is not None:
            self.kept.remove()
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
            if state.has_state and self.is_to_keep(stopped):
                self._keep(state)
            raise

    def _require_world(self) -> None:
        if self._core.state is WorkerState.LEAVING:
            raise WorldChanged(self._core.left_because)

    def _disagree(self, remedy: str = "") -> NoReturn:
        self.failure = UserError(self._core.position.disagreement(self._core.world.size, remedy))
        raise self.failure


@dataclass(frozen=True, slots=True)
class _Trainee:
    """What a job and its training state do on the way from world to world (`Member`)."""

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
            self.job.take_over(self.state)
        self.state.sync(world)
        self.job.session.core.synced(self.state.progress)
        return True

    def leave(self) -> None:
        self.job.collective.stop()

    def cast_end_vote(self) -> None:
        self.job.advance(Activity.END)
        self.job.all_ended(self.state.cast_end_vote())


ContextT = TypeVar("ContextT", bound=JobContext)
