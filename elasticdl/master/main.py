"""`python -m elasticdl.master.main --job_dir DIR`: the master of one local job, from its specification to its end.

Exit codes: 0 succeeded, 1 failed, 2 the user's mistake (one line on stderr, nothing was started), 130 stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from google.protobuf import json_format
from pydantic import ValidationError

from elasticdl.common.credentials import Token
from elasticdl.common.environment import WorkerEnvironment
from elasticdl.common.errors import UserError
from elasticdl.common.jobdir import JobDir, MasterAddress, jobs_root, write_aside
from elasticdl.common.spec import JobSpec
from elasticdl.common.startup import python_path
from elasticdl.master import events as e
from elasticdl.master.access import TokenAccess
from elasticdl.master.convert import to_status
from elasticdl.master.instructions import EndJob, Phase
from elasticdl.master.job import Job
from elasticdl.master.journal import Journal
from elasticdl.master.launchers.base import Launcher, Report
from elasticdl.master.launchers.devices import Slot, Slots, find_gpus
from elasticdl.master.launchers.local import LocalLauncher, WorkerCommand
from elasticdl.master.loop import Loop, Mailbox, Ports
from elasticdl.master.servicer import Server, Servicer, StatusFeed
from elasticdl.master.sessions import KeyValueRelay, Sessions
from elasticdl.master.settings import Settings
from elasticdl.master.status import Training
from elasticdl.master.summary import write_summary
from elasticdl.master.tether import die_with_parent
from elasticdl.proto import elasticdl_pb2 as pb

HOST = "127.0.0.1"
HEARTBEATS_PER_TIMEOUT = 5
SLOWEST_HEARTBEAT = 5.0
EXIT_CODES = {Phase.SUCCEEDED: 0, Phase.FAILED: 1, Phase.STOPPED: 130}
EXIT_USER_ERROR = 2
_log = logging.getLogger(__name__)

# Makes the launcher of a job, from what a worker must know to reach the master.
LauncherFactory = Callable[[MasterAddress, Report], Launcher]


class Board(Protocol):
    """What takes scalars."""

    def observe(self, event: e.Event) -> None: ...

    def world_formed(self, size: int) -> None: ...

    def close(self) -> None: ...


class _NoBoard:
    """For a job without TensorBoard."""

    def observe(self, event: e.Event) -> None: ...

    def world_formed(self, size: int) -> None: ...

    def close(self) -> None: ...


# Not a signal that people send, so that the reason is told right.
PARENT_GONE = signal.SIGUSR1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m elasticdl.master.main", description=__doc__)
    parser.add_argument("--job_dir", required=True, type=Path, help="the job's directory, which holds job.json")
    parser.add_argument(
        "--die_with_parent", type=int, metavar="PID", help="stop the job when this process, the caller, ends"
    )
    args = parser.parse_args(argv)
    if args.die_with_parent:
        die_with_parent(PARENT_GONE)
        if os.getppid() != args.die_with_parent:  # it ended before it was heard of
            return EXIT_CODES[Phase.STOPPED]
    job_dir = JobDir(args.job_dir.absolute())
    try:
        spec = _read_spec(job_dir)
        logging.basicConfig(
            level=spec.log_level, format=f"%(asctime)s {job_dir.name} %(levelname)s %(name)s: %(message)s"
        )
        end = asyncio.run(serve(spec, job_dir, local_launcher(spec, job_dir)))
    except UserError as error:
        print(f"elasticdl: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return EXIT_CODES[end.phase]


async def serve(spec: JobSpec, job_dir: JobDir, make_launcher: LauncherFactory) -> EndJob:
    """Run the job to its end: nothing of it remains but its files.

    Raises:
        UserError: the port is taken, before anything was started.
    """
    token = secrets.token_urlsafe()
    server = Server(HOST, TokenAccess(Token(token)))
    address = MasterAddress(f"{HOST}:{server.bind(spec.port)}", token, os.getpid())
    mailbox, sessions = Mailbox(), Sessions()
    relay = KeyValueRelay(sessions)
    job, training = Job(Settings.from_spec(spec)), Training(started=time.monotonic())

    def status() -> pb.JobStatus:
        return to_status(job_dir.name, job.view(), training, time.monotonic())

    journal, feed, board = Journal(job_dir.journal), StatusFeed(status), _tensorboard(spec)
    launcher = make_launcher(address, mailbox.post)
    ports = Ports(launcher, sessions, relay, journal, board.world_formed)
    loop = Loop(job, ports, training, board.observe, time.monotonic)
    welcome = pb.Welcome(job_name=job_dir.name, heartbeat_interval=_heartbeat_interval(spec))
    try:
        await server.start(Servicer(mailbox.post, sessions, relay, feed, journal, welcome))
        async with _stopped_by_signals(mailbox):
            journal.append(
                "job_started",
                {"job": job_dir.name, "workers": str(spec.num_workers), "specification": str(job_dir.spec)},
            )
            job_dir.write_master(address)
            end = await loop.run(mailbox)
            await launcher.close()
        board.close()
        _write_books(spec, job_dir, journal, end, training)
        write_aside(job_dir.status, json_format.MessageToJson(status(), preserving_proto_field_name=True))
        return end
    finally:
        await launcher.close()
        feed.end()
        journal.close()
        await server.close()
        job_dir.master.unlink(missing_ok=True)


def local_launcher(spec: JobSpec, job_dir: JobDir) -> LauncherFactory:
    """Workers are processes of this machine: the user's own command, or the worker of this package."""
    cores = len(os.sched_getaffinity(0))
    threads = str(max(1, cores // spec.num_workers.maximum))

    def make(master: MasterAddress, report: Report) -> Launcher:
        def environment(worker_id: int, slot: Slot) -> dict[str, str]:
            worker = WorkerEnvironment(master.address, master.credentials, worker_id, str(job_dir.spec))
            inherited = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONUNBUFFERED": "1"}
            startup = python_path(os.environ) if spec.command else {}
            return {**inherited, **slot.environment, **worker.to_env(), **startup}

        argv = spec.command or (sys.executable, "-m", "elasticdl.worker.main")
        slots = Slots(spec.slots, find_gpus(os.environ), jobs_root().parent / "devices")
        return LocalLauncher(WorkerCommand(argv, environment, job_dir.worker_log), slots, report)

    return make


@asynccontextmanager
async def _stopped_by_signals(mailbox: Mailbox) -> AsyncIterator[None]:
    """The first SIGTERM or SIGINT stops the job with a checkpoint, the second at once; the parent's death the former."""
    loop = asyncio.get_running_loop()
    signals, seen = (signal.SIGTERM, signal.SIGINT), 0

    def stop(name: str) -> None:
        nonlocal seen
        seen += 1
        mailbox.post(e.StopRequested(f"the master got {name}", checkpoint=seen == 1, now=seen > 1))

    def orphaned() -> None:  # the kernel says it once for each thread of the parent, so it is no second request
        mailbox.post(e.StopRequested("the command that started the job is gone", checkpoint=True, now=False))

    for number in signals:
        loop.add_signal_handler(number, stop, number.name)
    loop.add_signal_handler(PARENT_GONE, orphaned)
    try:
        yield
    finally:
        for number in (*signals, PARENT_GONE):
            loop.remove_signal_handler(number)


def _read_spec(job_dir: JobDir) -> JobSpec:
    try:
        return JobSpec.from_json(job_dir.spec.read_text())
    except OSError as error:
        raise UserError(f"can't read the job's specification {job_dir.spec}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{job_dir.spec}: {where}: {first['msg']}") from None


def _tensorboard(spec: JobSpec) -> Board:
    if not spec.tensorboard_log_dir:
        return _NoBoard()
    from elasticdl.master.metrics import TensorBoard  # takes seconds to import

    return TensorBoard(spec.tensorboard_log_dir)


def _write_books(spec: JobSpec, job_dir: JobDir, journal: Journal, end: EndJob, training: Training) -> None:
    fields = {
        "phase": str(end.phase),
        "reason": end.reason,
        "steps": training.step,
        "epochs": training.epochs_done,
        "samples": training.samples,
        "metrics": training.metrics,
    }
    journal.append("job_finished", fields)
    if not spec.output:
        return
    try:
        write_summary(spec.output, end, training, job_dir.journal, time.monotonic())
    except OSError as error:
        _log.error("can't write summary.json to %s: %s", spec.output, error)


def _heartbeat_interval(spec: JobSpec) -> float:
    return min(spec.heartbeat_timeout / HEARTBEATS_PER_TIMEOUT, SLOWEST_HEARTBEAT)


if __name__ == "__main__":
    sys.exit(main())
