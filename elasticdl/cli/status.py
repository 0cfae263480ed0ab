"""``elasticdl status``: one job, or all jobs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from elasticdl.cli.client import connect
from elasticdl.cli.jobs import Life, find_job, last_status, life_of
from elasticdl.cli.panel import render
from elasticdl.cli.parser import Parser
from elasticdl.cli.text import count_of, duration, is_over, members, metrics_text, progress_line, wanted_workers
from elasticdl.common.errors import UnreachableError
from elasticdl.common.jobdir import JobDir, list_jobs
from elasticdl.proto import elasticdl_pb2 as pb


def command(argv: Sequence[str]) -> int:
    parser = Parser("status", "Show one job, or all jobs.")
    parser.add_argument("job", nargs="?", help="name of the job; all jobs if not given")
    name = parser.parse(argv).job
    console = Console(highlight=False)
    if name is None:
        show_all(console)
    else:
        show_one(console, find_job(name))
    return 0


def current_status(job: JobDir) -> pb.JobStatus:
    """What is known about a job: from its master while it runs, else from its files.

    Raises:
        UnreachableError: its master runs but does not answer.
    """
    ended = last_status(job)
    if ended is not None:
        return ended
    life = life_of(job, time.time())
    address = job.read_master()
    if life is Life.RUNNING and address is not None:
        with connect(address) as client:
            return client.status()
    reason = "its master is gone without a word" if life is Life.LOST else "its master is starting"
    return pb.JobStatus(job_name=job.name, phase=life.value, reason=reason, time_left=-1)


def show_all(console: Console) -> None:
    jobs = list_jobs()
    if not jobs:
        console.print("there are no jobs")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("job", "phase", "workers", "step", "elapsed", "reason"):
        table.add_column(title, overflow="fold" if title == "reason" else "ellipsis", no_wrap=title == "job")
    for job in jobs:
        table.add_row(*(Text(cell) for cell in row(job)))
    console.print(table)


def row(job: JobDir) -> tuple[str, ...]:
    try:
        status = current_status(job)
    except UnreachableError as error:
        return job.name, "unreachable", "", "", "", str(error)
    workers = (
        f"{len(members(status))} of {wanted_workers(status)}" if status.max_workers and not is_over(status) else ""
    )
    return (
        job.name,
        status.phase,
        workers,
        count_of(status.step, status.total_steps),
        duration(status.elapsed),
        status.reason,
    )


def show_one(console: Console, job: JobDir) -> None:
    status = current_status(job)
    if console.is_terminal:
        console.print(render(status, age=0.0))
    else:
        print(f"job {status.job_name}: {status.phase}{f': {status.reason}' if status.reason else ''}")
        print(progress_line(status))
        for worker in status.workers:
            rank = f" rank {worker.rank}" if worker.rank >= 0 else ""
            print(f"worker {worker.worker_id}: {worker.state}{rank}{f': {worker.reason}' if worker.reason else ''}")
    if status.metrics:
        print(f"metrics: {metrics_text(status.metrics)}")
    print(f"files: {job.path}")
