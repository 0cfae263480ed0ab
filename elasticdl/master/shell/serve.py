"""Puts a master together around its core, and runs a job from its first event to its summary."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from elasticdl.common.credentials import LOOPBACK, Token, WorkerEnvironment
from elasticdl.common.errors import UnreachableError, UserError, first_finding
from elasticdl.common.front_ends import environment_of_workers
from elasticdl.job.jobdir import JobDir, MasterAddress, jobs_root, require_writable_folders
from elasticdl.job.journal import FORMAT, STEPS
from elasticdl.job.spec import TRAIN, JobSpec
from elasticdl.master.core import events as e
from elasticdl.master.core.events import EndJob
from elasticdl.master.core.job_core import Job
from elasticdl.master.core.values import Phase, Settings
from elasticdl.master.core.worker_record import Snapshot
from elasticdl.master.shell.agents import Agents
from elasticdl.master.shell.calls import Mailbox, Server, Servicer, Sessions, TokenAccess, to_status
from elasticdl.master.shell.journal_file import Journal, StepLog
from elasticdl.master.shell.loop import Loop, NoStore, SnapshotStore, StateSaver
from elasticdl.master.shell.observers import (
    LiveFacts,
    Observer,
    Observers,
    TensorBoard,
    remove_parts,
    write_summary,
)
from elasticdl.places.base import Launcher, Limits, Place, Report
from elasticdl.places.launcher import PlaceLauncher
from elasticdl.places.local import TIMES, LocalStarter, Slots, find_gpus
from elasticdl.places.preload import how_to_start
from elasticdl.places.worker_process import Spawner
from elasticdl.proto import elasticdl_pb2 as pb

HEARTBEATS_PER_TIMEOUT = 5
SLOWEST_HEARTBEAT = 5.0
# For the store to take the first snapshot.
START_SECONDS = 120.0
EXIT_CODES = {Phase.SUCCEEDED: 0, Phase.FAILED: 1, Phase.STOPPED: 130}
EXIT_USER_ERROR = 2
LOG_FORMAT = "%(asctime)s {job} %(levelname)s %(name)s: %(message)s"
LauncherFactory = Callable[[Report, Limits], Launcher]
_log = logging.getLogger(__name__)


class RelievedError(Exception):
    """Another master has the job, or will soon have it; the job goes on."""


def read_spec(job_dir: JobDir) -> JobSpec:
    """
    Raises:
        UserError: it is not there, or says what it must not.
    """
    try:
        return JobSpec.from_json(job_dir.spec.read_text())
    except OSError as error:
        raise UserError(f"can't read the job's specification {job_dir.spec}: {error.strerror}") from None
    except ValidationError as error:
        raise UserError(f"{job_dir.spec}: {first_finding(error)}") from None


def log_as(name: str, spec: JobSpec) -> None:
    logging.basicConfig(level=spec.log_level, format=LOG_FORMAT.format(job=name))


@contextmanager
def handling(signals: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """Meanwhile signals of this process are handled on its event loop."""
    loop = asyncio.get_running_loop()
    for number, handler in signals.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


@dataclass(eq=False)
class Master:
    """The master of one job: what earlier masters have left, the job's core, and what carries out its orders."""

    spec: JobSpec
    job_dir: JobDir  # where the files of the job are; only they remain
    server: Server  # its port is taken
    store: SnapshotStore
    make_launcher: LauncherFactory  # called once, when the master has the job
    agents: Agents | None = None  # the launcher's, if agents start the workers
    address: MasterAddress | None = None  # written into the job's folder while the master can be called

    def __post_init__(self) -> None:
        self._mailbox = Mailbox()
        self._ended = asyncio.Event()
        self.is_up = asyncio.Event()  # it can be called
        self._relieved: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._launcher: Launcher | None = None
        self.facts = LiveFacts()
        self._observers = Observers([self.facts])
        # Known once what an earlier master has left is loaded.
        self._job: Job
        self._sessions: Sessions
        self._journal: Journal
        self._steps: StepLog
        self._saver: StateSaver
        self._began: float  # of the job, by the monotonic clock
        self._started: float  # the same, in seconds since the epoch
        self._generation: int

    def observe(self, observer: Observer) -> None:
        """Tell it what happens to the job. To be called before `run`, which closes it."""
        self._observers.append(observer)

    def post(self, event: e.Event) -> None:
        """Tell the job. Before it has begun, this is the first that it hears. On the event loop only."""
        self._mailbox.post(event)

    def leave(self, reason: str) -> None:
        """Another master has the job, or will soon have it: `run` ends, and the workers go on."""
        if not self._relieved.done():
            self._relieved.set_result(reason)

    def status(self) -> pb.JobStatus:
        """On the event loop only, from when the job's state is loaded."""
        now = time.monotonic()
        return to_status(self.job_dir.name, self._job, now, now - self._began)

    async def run(self) -> EndJob:
        """Run the job to its end. If an earlier master has died, go on where it was.

        Raises:
            UserError: what an earlier master has left can't be read, or a folder of the job can't be written.
            UnreachableError: the store does not answer, or does not take the first snapshot.
            RelievedError: it was told to leave.
        """
        serving = asyncio.create_task(self._serve())
        try:
            await asyncio.wait((serving, self._relieved), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                return serving.result()
            if self._launcher:
                await self._launcher.close(keep=True)  # before the end of `_serve` could end the workers
        finally:
            serving.cancel()
            await asyncio.wait({serving})
        raise RelievedError(f"leaving the job to another master: {self._relieved.result()}")

    async def _serve(self) -> EndJob:
        past = await self.store.load()
        if past is None:  # a pod may see other folders than the machine on which the job was submitted
            require_writable_folders(self.spec)
        job_dir = self.job_dir
        for journal in (job_dir.earlier, *([job_dir.journal] if past else [])):
            if journal.exists():  # in a thread, as reading a long one takes seconds
                await asyncio.to_thread(_read_journal, self.facts, journal)
        self._take_up(past)
        try:
            await self._save_generation()
            self._launcher = self.make_launcher(self.post, lambda: self._job.limits)
            return await self._train(self._launcher, new=past is None)
        finally:
            if self._launcher:
                await self._launcher.close(keep=True)  # only a decided end takes the workers along
            self._observers.close()
            self._ended.set()
            self._journal.close()
            await self.server.close()
            # Without the status, the address of a dead master tells that the job is over.
            if self.address and job_dir.status.exists():
                job_dir.master.unlink(missing_ok=True)

    def _take_up(self, past: Snapshot | None) -> None:
        """Go on with the job where it was, or begin it."""
        spec, job_dir = self.spec, self.job_dir
        self._started, self._generation = (past.started, past.generation + 1) if past else (time.time(), 1)
        self._began = time.monotonic() - (time.time() - self._started)
        self._job = Job(Settings.from_spec(spec, self.facts.next_worker), past.job if past else None)
        self._sessions = Sessions(past.taken if past else {})
        self._saver = StateSaver(self.store, partial(self.leave, "it has taken over"))
        if spec.tensorboard_log_dir:
            self.observe(TensorBoard(spec.tensorboard_log_dir))
        self._journal = Journal(job_dir.journal, self._observers.recorded, self._generation)
        past_steps = past.steps if past else None
        told_steps = (time.time, self._started, past_steps, self._job.training)
        self._steps = StepLog(self._journal.append, self._observers.recorded, *told_steps)
        self.observe(self._steps)  # the last to hear, as it adds to what the others hear
        if unwritten := self._steps.unwritten.joined:
            self.facts.recorded(STEPS, unwritten)

    async def _save_generation(self) -> None:
        """From now on no other master will have this one's number.

        Raises:
            UnreachableError: it can't be saved.
        """
        try:
            async with asyncio.timeout(START_SECONDS):  # wait_for of Python 3.11 may lose a cancellation
                await self._saver.save(self._snapshot)
        except TimeoutError:
            await self._saver.close()
            problem = self._saver.problem or "it takes long"
            raise UnreachableError(f"can't save the job's state within {START_SECONDS:g} s: {problem}") from None

    async def _train(self, launcher: Launcher, *, new: bool) -> EndJob:
        """From the first call that is taken to the end of the job."""
        job, journal, sessions, job_dir = self._job, self._journal, self._sessions, self.job_dir
        told = (self.status, self._ended, journal, self._welcome, self.spec.why_not_scaled_to, self.agents)
        await self.server.start(Servicer(self._mailbox, sessions, *told))
        if new:
            about = {"workers": str(self.spec.num_workers), "specification": str(job_dir.spec), "format": FORMAT}
            journal.append("job_started", {"job": job_dir.name, **about})
        if self.address:
            self.address.write(job_dir.master)
        self.is_up.set()
        tools = (launcher, sessions, journal, self._saver, self._observers, time.monotonic, self._snapshot)
        end = await Loop(job, self._mailbox, *tools).run()
        # Told before places are closed: that takes as long as whoever provides them likes, and the master may be killed meanwhile.
        self._steps.flush()
        journal.append("job_finished", {"phase": str(end.phase), "reason": end.reason, **job.training.achieved()})
        if self.spec.task != TRAIN:
            remove_parts(self.spec.parts, is_done=end.phase == Phase.SUCCEEDED)
        elif self.spec.output:
            write_summary(self.spec.output, self.facts.conclude(), time.monotonic() - self._began)
        self._write_status()
        await launcher.close()
        return end

    def _snapshot(self) -> Snapshot:
        """The job's state, with what the shell knows at the same moment."""
        state = self._job.snapshot()
        there = {worker.worker_id for worker in state.workers}
        taken = {worker_id: number for worker_id, number in self._sessions.taken.items() if worker_id in there}
        length = self.job_dir.journal.stat().st_size if self.job_dir.journal.exists() else 0
        return Snapshot(state, self._started, self._generation, taken, self._steps.unwritten, length)

    def _welcome(self) -> pb.Welcome:
        job, training = self._job, self._job.training
        stands = ("epoch", "epoch_steps") if job.phase is Phase.RUNNING else ()
        return pb.Welcome(
            job_name=self.job_dir.name,
            heartbeat_interval=min(self.spec.heartbeat_timeout / HEARTBEATS_PER_TIMEOUT, SLOWEST_HEARTBEAT),
            generation=self._generation,
            # Where the job begins anew, its data may be others.
            facts=self._sessions.facts if job.phase in (Phase.RUNNING, Phase.WAITING) and training.step else b"",
            **{name: getattr(training, name) for name in stands},
        )

    def _write_status(self) -> None:
        status, path = self.status(), self.job_dir.status
        try:
            self.job_dir.write_status(status)
        except OSError as error:
            _log.error("job %s, and that can't be written to %s: %s", status.phase, path, error.strerror)


def _read_journal(facts: LiveFacts, journal: Path) -> None:
    with journal.open(errors="replace") as lines:
        facts.read(lines)


# The master of a job on this machine: a part of the command that starts the job.
#
# It listens on loopback, and callers show the token in the job's directory.


def local_master(spec: JobSpec, job_dir: JobDir, make_launcher: Callable[[MasterAddress], LauncherFactory]) -> Master:
    """The master, whose port is taken. ``make_launcher``: is told where workers reach it.

    Raises:
        UserError: the port is not to be had.
    """
    token = secrets.token_urlsafe()
    server = Server(LOOPBACK, TokenAccess(Token(token)))
    address = MasterAddress.of_this_process(f"{LOOPBACK}:{server.bind(spec.port)}", token)
    return Master(spec, job_dir, server, NoStore(), make_launcher(address), address=address)


class LocalWorkers:
    """Workers are processes of this machine: the user's own command, or the worker of this package. What they are forked from begins to
    import at once.

    ``stdout_apart``: what they print on stdout has a file beside their logs.
    """

    def __init__(self, spec: JobSpec, job_dir: JobDir, master: MasterAddress, *, stdout_apart: bool = False) -> None:
        self._spec = spec
        self._job_dir = job_dir
        self._master = master
        self._stdout_apart = stdout_apart
        # Copied now: what is imported later may set variables of its own.
        self._inherited = environment_of_workers({**_terminal_size(), **os.environ})
        environment = self._environment(lambda: spec.num_workers, 0, Place(""))
        self._spawner = Spawner(*how_to_start(spec), environment, job_dir.master_log)

    def launcher(self, report: Report, limits: Limits) -> Launcher:
        devices = jobs_root().parent / "devices"
        each = self._spec.processes_per_worker
        slots = partial(Slots, self._spec.slots, find_gpus(os.environ), devices, gpus_per_slot=each)
        log = self._job_dir.worker_log
        out = self._job_dir.worker_out if self._stdout_apart else log
        environment = partial(self._environment, limits)
        starter = partial(LocalStarter, self._spawner, environment, log, out)
        return PlaceLauncher(slots, starter, report, seconds=TIMES)

    async def close(self) -> None:
        """Also of a job that has not begun."""
        await self._spawner.close()

    def _environment(self, limits: Limits, worker_id: int, place: Place) -> dict[str, str]:
        master = self._master
        worker = WorkerEnvironment(master.address, master.credentials, worker_id, str(self._job_dir.spec))
        processes = limits().maximum * self._spec.processes_per_worker
        threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // processes))}
        return {**threads, **self._inherited, **place.environment, **worker.to_env()}


def _terminal_size() -> dict[str, str]:
    """For programs that fit what they print to the terminal, which workers do not have; tqdm has a variable of its own."""
    columns, lines = os.get_terminal_size(2) if os.isatty(2) else (0, 0)
    return {"COLUMNS": str(columns), "LINES": str(lines), "TQDM_NCOLS": str(columns - 1)} if columns else {}


class _LogFile(logging.FileHandler):
    """``tell``: is told once if it can't be written, or its folder is removed, which stops nothing."""

    def __init__(self, file: Path, tell: Callable[[str], object]) -> None:
        super().__init__(file)
        self._tell = tell
        self._failed = False

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        folder = os.path.dirname(self.baseFilename)
        if not self._failed and not os.path.exists(folder):
            self._failed = True
            self._tell(f"{folder} was removed: the workers that train go on, and no other can be started")

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failed:
            self._failed = True
            self._tell(
                f"{self.baseFilename} can't be written: {error.strerror}; the job goes on, and its logs and its journal lack "
                "what comes meanwhile"
            )

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written before can't be now
            super().close()


@contextlib.contextmanager
def logging_to(file: Path, spec: JobSpec, tell: Callable[[str], object]) -> Iterator[None]:
    """What the master has to say goes there meanwhile; the terminal is for the job."""
    root, handler = logging.getLogger(), _LogFile(file, tell)
    handler.setFormatter(logging.Formatter(LOG_FORMAT.format(job=spec.job_name)))
    before = root.level
    root.addHandler(handler)
    root.setLevel(spec.log_level)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.setLevel(before)
        root.removeHandler(handler)
        handler.close()
