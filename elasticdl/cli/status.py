"""``elasticdl status``: one job, or all jobs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from elasticdl.cli.finding import add_job, find
from elasticdl.cli.handle import JobHandle
from elasticdl.cli.local_job import LocalJob
from elasticdl.cli.on_cluster import list_if_configured, list_on_cluster
from elasticdl.cli.panel import render
from elasticdl.cli.parser import Parser
from elasticdl.cli.text import count_of, duration, is_over, members, metrics_text, progress_line, wanted_workers
from elasticdl.common.errors import ElasticDLError
from elasticdl.common.jobdir import list_jobs


def command(argv: Sequence[str]) -> int:
    parser = Parser("status", "Show one job, or all jobs.")
    add_job(parser, "name of the job; all jobs if not given")
    given = parser.parse(argv)
    console = Console(highlight=False)
    if given.job is not None:
        show_one(console, find(given))
    elif given.namespace or given.kube_context:
        show_all(console, list_on_cluster(given.namespace, given.kube_context))
    else:
        show_all(console, [*(LocalJob(job) for job in list_jobs()), *_elsewhere()])
    return 0


def _elsewhere() -> Sequence[JobHandle]:
    """What is on this machine is shown also when the cluster does not answer."""
    try:
        return list_if_configured()
    except ElasticDLError as error:
        print(f"warning: the cluster's jobs are missing: {error}", file=sys.stderr, flush=True)
        return []


def show_all(console: Console, jobs: Sequence[JobHandle]) -> None:
    if not jobs:
        console.print("there are no jobs")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    elsewhere = any(job.namespace for job in jobs)
    for title in ("job", *(["namespace"] if elsewhere else []), "phase", "workers", "step", "elapsed", "reason"):
        table.add_column(title, overflow="fold" if title == "reason" else "ellipsis", no_wrap=title == "job")
    for job in jobs:
        table.add_row(*(Text(cell) for cell in (job.name, *([job.namespace] if elsewhere else []), *facts(job))))
    console.print(table)


def facts(job: JobHandle) -> tuple[str, ...]:
    try:
        status = job.status()
    except ElasticDLError as error:
        return "unreachable", "", "", "", str(error)
    workers = (
        f"{len(members(status))} of {wanted_workers(status)}" if status.max_workers and not is_over(status) else ""
    )
    return (
        status.phase,
        workers,
        count_of(status.step, status.total_steps),
        duration(status.elapsed),
        status.reason,
    )


def show_one(console: Console, job: JobHandle) -> None:
    status = job.status()
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
    print(job.whereabouts)
