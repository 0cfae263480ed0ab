"""`python -m elasticdl.master.shell.local_master --job_dir DIR`: the master of one job on this machine.

It listens on loopback, callers show the token in the job's directory, and signals stop it.

Exit codes: 0 succeeded, 1 failed, 2 the user's mistake (one line on stderr, nothing was started), 130 stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from elasticdl.common.credentials import Token
from elasticdl.common.environment import LOOPBACK, WorkerEnvironment
from elasticdl.common.errors import UserError
from elasticdl.common.startup import HASH_SEED, python_path
from elasticdl.common.tether import die_with_parent
from elasticdl.job.jobdir import JobDir, MasterAddress, jobs_root
from elasticdl.job.spec import JobSpec, WorkerRange
from elasticdl.master.shell.access import TokenAccess
from elasticdl.master.shell.saver import NoStore
from elasticdl.master.shell.serve import (
    EXIT_CODES,
    EXIT_USER_ERROR,
    LauncherFactory,
    Master,
    handling,
    log_as,
    read_spec,
)
from elasticdl.master.shell.servicer import Server
from elasticdl.master.state import events as e
from elasticdl.master.state.instructions import EndJob, Phase
from elasticdl.places.base import Launcher, Limits, Place, Report
from elasticdl.places.launcher import PlaceLauncher
from elasticdl.places.local import TIMES, LocalStarter, WorkerCommand
from elasticdl.places.preload import how_to_start
from elasticdl.places.slots import Slots, find_gpus
from elasticdl.places.worker_process import Spawner

# Sent when the command that started the job is gone: not a signal that people send, so that the reason is told right.
PARENT_GONE = signal.SIGUSR1

_log = logging.getLogger(__name__)

# Gets ready to launch workers, which are told how to reach the master.
Prepare = Callable[[MasterAddress], LauncherFactory]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m elasticdl.master.shell.local_master", description=__doc__)
    parser.add_argument("--job_dir", required=True, type=Path, help="the job's directory, which holds job.json")
    parser.add_argument(
        "--die_with_parent", type=int, metavar="PID", help="stop the job when this process, the caller, ends"
    )
    parser.add_argument("--temporary", metavar="FOLDER", help="the job's TMPDIR, removed at the end")
    parser.add_argument("--held", action="store_true", help="get ready, and begin when a line comes on stdin")
    parser.add_argument(
        "--stdout_apart", action="store_true", help="what workers print on stdout has a file beside their logs"
    )
    args = parser.parse_args(argv)
    job_dir = JobDir(args.job_dir.absolute())
    try:
        if args.die_with_parent:
            # Until there is a job to stop. SystemExit, so that `finally` removes the folder.
            signal.signal(PARENT_GONE, lambda *_: sys.exit(EXIT_CODES[Phase.STOPPED]))
            die_with_parent(PARENT_GONE)
            if os.getppid() != args.die_with_parent:  # the parent ended before the kernel was asked to tell
                return EXIT_CODES[Phase.STOPPED]
        spec = read_spec(job_dir)
        log_as(job_dir.name, spec)
        prepare = partial(local_launcher, spec, job_dir, stdout_apart=args.stdout_apart)
        end = asyncio.run(serve_here(spec, job_dir, prepare, held=args.held))
    except UserError as error:
        print(f"elasticdl: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    finally:
        if args.temporary:  # the command that would remove it may be gone
            shutil.rmtree(args.temporary, ignore_errors=True)
    return EXIT_CODES[end.phase]


async def serve_here(spec: JobSpec, job_dir: JobDir, prepare: Prepare, *, held: bool = False) -> EndJob:
    """Run the job to its end on this machine. Only its files remain.

    ``held``: begin when a line comes on stdin.

    Raises:
        UserError: the port is taken, or stdin ended, before anything was started.
    """
    token = secrets.token_urlsafe()
    server = Server(LOOPBACK, TokenAccess(Token(token)))
    address = MasterAddress.of_this_process(f"{LOOPBACK}:{server.bind(spec.port)}", token)

    make_launcher = prepare(address)
    if held and not await asyncio.to_thread(sys.stdin.readline):
        raise UserError("the command that started the job is gone")
    master = Master(spec, job_dir, server, NoStore(), make_launcher, address=address)
    with stopped_by_signals(master.post):
        return await master.run()


def local_launcher(
    spec: JobSpec, job_dir: JobDir, master: MasterAddress, *, stdout_apart: bool = False
) -> LauncherFactory:
    """Workers are processes of this machine: the user's own command, or the worker of this package."""
    # Copied now: what the master imports later may set variables of its own. A crash of a worker leaves its stacks in the log.
    defaults = {"PYTHONFAULTHANDLER": "1", "PYTHONHASHSEED": HASH_SEED}
    inherited = {**defaults, **os.environ, "PYTHONUNBUFFERED": "1", **python_path(os.environ)}

    def environment(limits: WorkerRange, worker_id: int, place: Place) -> dict[str, str]:
        worker = WorkerEnvironment(master.address, master.credentials, worker_id, str(job_dir.spec))
        threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // limits.maximum))}
        return {**threads, **inherited, **place.environment, **worker.to_env()}

    spawner = Spawner.begin(*how_to_start(spec), environment(spec.num_workers, 0, Place("")), job_dir.master_log)

    def make(report: Report, limits: Limits) -> Launcher:
        slots = partial(Slots, spec.slots, find_gpus(os.environ), jobs_root().parent / "devices")

        def of_a_worker(worker_id: int, place: Place) -> dict[str, str]:
            return environment(limits(), worker_id, place)

        command = WorkerCommand(spawner, of_a_worker, job_dir.worker_log, job_dir.worker_out if stdout_apart else None)
        return PlaceLauncher(slots, partial(LocalStarter, command), report, seconds=TIMES)

    return make


def stopped_by_signals(post: Callable[[e.Event], None]) -> AbstractContextManager[None]:
    """The first SIGTERM or SIGINT, or the parent's death, stops the job with a checkpoint; a second signal stops it at once."""
    requests = itertools.count()

    def stop(name: str) -> None:
        first = next(requests) == 0
        post(e.StopRequested(f"the master got {name}", checkpoint=first, now=not first))

    def orphaned() -> None:  # the kernel sends it once for each thread of the parent, so it does not count as a request
        post(e.StopRequested("the command that started the job is gone", checkpoint=True, now=False))

    stops = {number: partial(stop, number.name) for number in (signal.SIGTERM, signal.SIGINT)}
    return handling({**stops, PARENT_GONE: orphaned})


if __name__ == "__main__":
    sys.exit(main())
