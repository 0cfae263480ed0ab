"""``elasticdl status``, ``events`` and ``logs``: what is to be seen of jobs, also after their end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from elasticdl.cli.commands.places import all_jobs, find, job_argument, place_options
from elasticdl.cli.job_handle import JobHandle
from elasticdl.cli.parsing import Command, Option
from elasticdl.cli.screens import render
from elasticdl.cli.wording import (
    count_of,
    duration,
    event_line,
    is_over,
    members,
    metrics_text,
    progress_line,
    wanted_workers,
)
from elasticdl.common.errors import ElasticDLError


def _status(job: str | None, **given: Any) -> int:
    console = Console(highlight=False)
    if job is not None:
        show_one(console, find(job, given))
    else:
        show_all(console, all_jobs(given))
    return 0


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
    workers = f"{len(members(status))} of {wanted_workers(status)}"
    shown = workers if status.max_workers and not is_over(status) else ""
    steps = count_of(status.step, status.total_steps)
    return status.phase, shown, steps, duration(status.elapsed), status.reason


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


def _events(job: str | None, follow: bool, as_json: bool, **given: Any) -> int:
    with closing(find(job, given).journal(follow=follow)) as journal:
        for line in journal:
            print(line if as_json else event_line(json.loads(line)), flush=follow)
    return 0


def _logs(job: str | None, worker: int | None, follow: bool, **given: Any) -> int:
    with closing(find(job, given).logs(worker, follow=follow)) as logs:
        for line in logs:
            print(line, flush=follow)
    return 0


def _follow() -> Option:
    return Option(["--follow"], is_flag=True, help="go on until the job has ended")


status = Command(
    "status",
    params=[job_argument("name of the job; all jobs if not given"), *place_options()],
    callback=_status,
    help="Show one job, or all jobs.",
)
events = Command(
    "events",
    params=[
        job_argument(),
        *place_options(),
        Option(["--json", "as_json"], is_flag=True, help="one JSON object a line"),
        _follow(),
    ],
    callback=_events,
    help="Show what happened in a job: workers, worlds, pauses, evaluations, checkpoints.",
)
logs = Command(
    "logs",
    params=[
        job_argument(),
        *place_options(),
        Option(["--worker"], type=click.INT, metavar="N", help="only this worker's, as it wrote it"),
        _follow(),
    ],
    callback=_logs,
    help="Show the logs of a job's master and workers.",
)
