"""The master of a job on this machine: a part of the command that starts the job.

It listens on loopback, and callers show the token in the job's directory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from elasticdl.common.credentials import Token
from elasticdl.common.environment import LOOPBACK, WorkerEnvironment
from elasticdl.common.startup import HASH_SEED, python_path
from elasticdl.job.jobdir import JobDir, MasterAddress, jobs_root
from elasticdl.job.spec import JobSpec, WorkerRange
from elasticdl.master.shell.access import TokenAccess
from elasticdl.master.shell.saver import NoStore
from elasticdl.master.shell.serve import LOG_FORMAT, LauncherFactory, Master
from elasticdl.master.shell.servicer import Server
from elasticdl.places.base import Launcher, Limits, Place, Report
from elasticdl.places.launcher import PlaceLauncher
from elasticdl.places.local import TIMES, LocalStarter, WorkerCommand
from elasticdl.places.preload import how_to_start
from elasticdl.places.slots import Slots, find_gpus
from elasticdl.places.worker_process import Spawner


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
        # Copied now: what is imported later may set variables of its own. A crash of a worker leaves its stacks in the log.
        defaults = {"PYTHONFAULTHANDLER": "1", "PYTHONHASHSEED": HASH_SEED, **_terminal_size()}
        self._inherited = {**defaults, **os.environ, "PYTHONUNBUFFERED": "1", **python_path(os.environ)}
        environment = self._environment(spec.num_workers, 0, Place(""))
        self._spawner = Spawner.begin(*how_to_start(spec), environment, job_dir.master_log)

    def launcher(self, report: Report, limits: Limits) -> Launcher:
        slots = partial(Slots, self._spec.slots, find_gpus(os.environ), jobs_root().parent / "devices")
        out = self._job_dir.worker_out if self._stdout_apart else None
        command = WorkerCommand(
            self._spawner,
            lambda worker_id, place: self._environment(limits(), worker_id, place),
            self._job_dir.worker_log,
            out,
        )
        return PlaceLauncher(slots, partial(LocalStarter, command), report, seconds=TIMES)

    async def close(self) -> None:
        """Also of a job that has not begun."""
        await self._spawner.close()

    def _environment(self, limits: WorkerRange, worker_id: int, place: Place) -> dict[str, str]:
        master = self._master
        worker = WorkerEnvironment(master.address, master.credentials, worker_id, str(self._job_dir.spec))
        threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // limits.maximum))}
        return {**threads, **self._inherited, **place.environment, **worker.to_env()}


def _terminal_size() -> dict[str, str]:
    """For programs that fit what they print to the terminal, which workers do not have; tqdm has a variable of its own."""
    columns, lines = os.get_terminal_size(2) if os.isatty(2) else (0, 0)
    return {"COLUMNS": str(columns), "LINES": str(lines), "TQDM_NCOLS": str(columns - 1)} if columns else {}


@contextlib.contextmanager
def logging_to(file: Path, spec: JobSpec) -> Iterator[None]:
    """What the master has to say goes there meanwhile; the terminal is for the job."""
    root, handler = logging.getLogger(), logging.FileHandler(file)
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
