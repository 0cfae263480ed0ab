"""Puts a master together around its core, and runs a job from its first event to its summary."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from google.protobuf import json_format
from pydantic import ValidationError

from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.job.event_catalogue import FORMAT
from elasticdl.job.folders import require_writable_folders
from elasticdl.job.jobdir import JobDir, write_aside
from elasticdl.job.journal import STEPS
from elasticdl.job.spec import JobSpec, WorkerRange
from elasticdl.master.core.job_core import Job
from elasticdl.master.shell.agents import Agents
from elasticdl.master.shell.convert import to_status
from elasticdl.master.shell.journal_file import Journal
from elasticdl.master.shell.live_facts import LiveFacts
from elasticdl.master.shell.loop import Loop, Mailbox, Ports
from elasticdl.master.shell.observer import Observer, Observers
from elasticdl.master.shell.saver import SnapshotStore, StateSaver
from elasticdl.master.shell.scaling_observer import ScalingObserver
from elasticdl.master.shell.servicer import Server, Servicer, SharedStatus
from elasticdl.master.shell.sessions import Sessions
from elasticdl.master.shell.step_log import StepLog
from elasticdl.master.shell.summary import achieved, write_summary
from elasticdl.master.shell.tensorboard import TensorBoard
from elasticdl.master.state import events as e
from elasticdl.master.state.instructions import EndJob, Phase
from elasticdl.master.state.learnt import Learnt
from elasticdl.master.state.snapshot import JobSnapshot, Snapshot
from elasticdl.master.state.training import Training
from elasticdl.master.state.values import Settings
from elasticdl.places.base import Launcher, Limits, Report
from elasticdl.proto import elasticdl_pb2 as pb

HEARTBEATS_PER_TIMEOUT = 5
SLOWEST_HEARTBEAT = 5.0
# For the store to take the first snapshot.
START_SECONDS = 120.0
EXIT_CODES = {Phase.SUCCEEDED: 0, Phase.FAILED: 1, Phase.STOPPED: 130}
EXIT_USER_ERROR = 2
_log = logging.getLogger(__name__)


class RelievedError(Exception):
    """Another master has the job, or will soon have it; the job goes on."""


@dataclass(frozen=True, slots=True)
class Platform:
    """What differs between a master on this machine and one on a cluster.

    ``lifespan`` is entered while the job runs and the master can be called; through what it is given it may post events.
    """

    server: Server  # its port is taken
    make_launcher: Callable[[Report, Limits], Launcher]
    store: SnapshotStore
    lifespan: Callable[[Callable[[e.Event], None]], AbstractAsyncContextManager[None]]
    # Observers of the place; what they are given makes the status, on the event loop only.
    make_observers: Callable[[Callable[[], pb.JobStatus], LiveFacts], Sequence[Observer]] = lambda status, facts: ()
    # Where workers are started by the agents of their places; the launcher has it, too.
    agents: Agents | None = None


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
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{job_dir.spec}: {where}: {first['msg']}") from None


def log_as(name: str, spec: JobSpec) -> None:
    logging.basicConfig(level=spec.log_level, format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s")


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


async def serve(spec: JobSpec, job_dir: JobDir, platform: Platform) -> EndJob:
    """Run the job to its end. If an earlier master has died, go on where it was. Only files of the job remain.

    Raises:
        UserError: what an earlier master has left can't be read, or a folder of the job can't be written.
        UnreachableError: the store does not answer, or does not take the first snapshot.
    """
    past = await platform.store.load()
    if past is None:  # a pod may see other folders than the machine on which the job was submitted
        require_writable_folders(spec)
    started, generation = (past.started, past.generation + 1) if past else (time.time(), 1)
    began = time.monotonic() - (time.time() - started)
    facts = LiveFacts()
    for journal_file in (job_dir.earlier, *([job_dir.journal] if past else [])):
        if journal_file.exists():  # in a thread, as reading a long one takes seconds
            await asyncio.to_thread(_read_journal, facts, journal_file)
    with facts.now() as (told, _):
        settings = Settings.from_spec(spec, told.next_worker)
    job = Job(settings, past.job if past else None)
    sessions = Sessions(past.taken if past else {})
    steps = StepLog(
        lambda event, fields: journal.append(event, fields),
        lambda event, fields: observers.recorded(event, fields),
        *(time.time, started, past.steps if past else None, job.training),
    )

    def wrap(state: JobSnapshot) -> Snapshot:
        """Together with what the shell knows at the same moment."""
        there = {worker.worker_id for worker in state.workers}
        taken = {worker_id: number for worker_id, number in sessions.taken.items() if worker_id in there}
        length = job_dir.journal.stat().st_size if job_dir.journal.exists() else 0
        return Snapshot(state, started, generation, taken, steps.unwritten, length)

    def status() -> pb.JobStatus:
        now = time.monotonic()
        return to_status(job_dir.name, job, now, now - began)

    if unwritten := steps.unwritten.joined:
        facts.recorded(STEPS, unwritten)
    saver = StateSaver(platform.store)
    await _save_generation(saver, lambda: wrap(job.snapshot()))
    mailbox = Mailbox()
    running = asyncio.get_running_loop()

    def post_from_thread(event: e.Event) -> None:
        running.call_soon_threadsafe(mailbox.post, event)

    def limits() -> WorkerRange:
        return job.limits

    scaling = ScalingObserver(spec, limits, past.job.learnt if past else Learnt(), post_from_thread, time.monotonic)
    # The log of steps is the last to hear, as it adds to what the others hear.
    observers = Observers([facts, *_tensorboard(spec), scaling, *platform.make_observers(status, facts), steps])
    journal, ended = Journal(job_dir.journal, observers.recorded, generation), asyncio.Event()
    launcher = platform.make_launcher(mailbox.post, limits)
    ports = Ports(launcher, sessions, journal, saver, observers, time.monotonic, wrap)
    heartbeat_interval = min(spec.heartbeat_timeout / HEARTBEATS_PER_TIMEOUT, SLOWEST_HEARTBEAT)

    def welcome() -> pb.Welcome:
        stands = ("epoch", "epoch_steps", "marks") if job.phase is Phase.RUNNING else ()
        return pb.Welcome(
            job_name=job_dir.name,
            heartbeat_interval=heartbeat_interval,
            generation=generation,
            learnt=job.learnt.to_json(),
            # Where the job begins anew, its data may be others.
            facts=sessions.facts if job.phase in (Phase.RUNNING, Phase.WAITING) and job.training.step else b"",
            **{name: getattr(job.training, name) for name in stands},
        )

    try:
        shown = SharedStatus(status, time.monotonic)
        refuses = spec.why_not_scaled_to
        servicer = Servicer(mailbox, sessions, status, shown, ended, journal, welcome, refuses, platform.agents)
        await platform.server.start(servicer)
        if past is None:
            about = {
                "job": job_dir.name,
                "workers": str(spec.num_workers),
                "specification": str(job_dir.spec),
                "format": FORMAT,
            }
            journal.append("job_started", about)
        async with platform.lifespan(mailbox.post):
            end = await Loop(job, ports, mailbox).run()
            # Told before places are closed: that takes as long as whoever provides them likes, and the master may be killed meanwhile.
            steps.flush()
            journal.append("job_finished", {"phase": str(end.phase), **achieved(end, job.training)})
            _write_summary(spec, end, job.training, facts, time.monotonic() - began)
            _write_status(job_dir.status, status())
            await launcher.close()
        return end
    finally:
        await launcher.detach()  # only a decided end takes the workers along
        observers.close()
        ended.set()
        journal.close()
        await platform.server.close()


async def serve_unless_relieved(
    spec: JobSpec, job_dir: JobDir, platform: Platform, relieved: asyncio.Future[str]
) -> EndJob:
    """As `serve`, of a master whose job may go on with another one.

    Args:
        relieved: Set, with the reason, when this master is to leave the job.

    Raises:
        RelievedError: it has left the job.
    """
    launchers: list[Launcher] = []

    def make_launcher(report: Report, limits: Limits) -> Launcher:
        launchers.append(platform.make_launcher(report, limits))
        return launchers[0]

    serving = asyncio.ensure_future(serve(spec, job_dir, replace(platform, make_launcher=make_launcher)))
    await asyncio.wait((serving, relieved), return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        return serving.result()
    for launcher in launchers:
        await launcher.detach()  # before the end of `serve` could end the workers
    serving.cancel()
    await asyncio.wait({serving})
    raise RelievedError(f"leaving the job to another master: {relieved.result()}")


async def _save_generation(saver: StateSaver, first: Callable[[], Snapshot]) -> None:
    """From now on no other master will have this one's number.

    Raises:
        UnreachableError: it can't be saved.
    """
    try:
        await asyncio.wait_for(saver.save(first), START_SECONDS)
    except TimeoutError:
        await saver.close()
        problem = saver.problem or "it takes long"
        raise UnreachableError(f"can't save the job's state within {START_SECONDS:g} s: {problem}") from None


def _tensorboard(spec: JobSpec) -> list[Observer]:
    if not spec.tensorboard_log_dir:
        return []
    return [TensorBoard(spec.tensorboard_log_dir)]


def _read_journal(facts: LiveFacts, journal: Path) -> None:
    with journal.open(errors="replace") as lines:
        facts.read(lines)


def _write_summary(spec: JobSpec, end: EndJob, training: Training, live: LiveFacts, wall_time: float) -> None:
    if spec.output:
        try:
            with live.now() as (facts, _):
                write_summary(spec.output, end, training, facts.result(), wall_time)
        except OSError as error:
            _log.error("can't write summary.json to %s: %s", spec.output, error)


def _write_status(path: Path, status: pb.JobStatus) -> None:
    try:
        write_aside(path, json_format.MessageToJson(status, preserving_proto_field_name=True))
    except OSError as error:
        _log.error("job %s, and that can't be written to %s: %s", status.phase, path, error.strerror)
