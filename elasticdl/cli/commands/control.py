"""``elasticdl scale``, ``stop`` and ``delete``: what changes a job that is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from pydantic import TypeAdapter, ValidationError

from elasticdl.cli.commands.places import PLACE, cluster_module, find, job_argument
from elasticdl.cli.parsing import Option, command
from elasticdl.common.errors import UserError
from elasticdl.common.spec import MOST_WORKERS, WorkerRange, Workers

CLOSING_TIME = 10.0  # seconds beyond the workers' grace


@command(
    click.Argument(
        ["words"],
        nargs=-1,
        metavar="[JOB] N|MIN-MAX",
        help="name of the job, which may be left out if only one runs; workers to have from now on, as in 3 or 2-4",
    ),
    *PLACE,
    help="Change the number of workers of a running job.",
)
def scale(words: Sequence[str], **given: Any) -> int:
    if not words:
        raise UserError("the following arguments are required: N|MIN-MAX; see `elasticdl scale --help`")
    if len(words) > 2:
        raise UserError(f"{words[2]!r} is one argument too many; see `elasticdl scale --help`")
    workers = parse_workers(words[-1])
    with find(words[0] if len(words) == 2 else None, given).master() as master:
        print(master.scale(workers))
    return 0


def parse_workers(text: str) -> WorkerRange:
    try:
        workers: WorkerRange = TypeAdapter(Workers).validate_python(text)
    except ValidationError:
        raise UserError(
            f"{text!r} is not a number of workers: write N or MIN-MAX, as in 3 or 2-4, from 1 to {MOST_WORKERS}"
        ) from None
    return workers


@command(
    job_argument(),
    *PLACE,
    Option(["--now"], is_flag=True, help="end the workers at once, without a checkpoint"),
    Option(["--no_checkpoint"], is_flag=True, help="finish the step, but write no checkpoint"),
    help="Stop a running job: it finishes its step and writes a checkpoint if it has a folder for it.",
)
def stop(job: str | None, now: bool, no_checkpoint: bool, **given: Any) -> int:
    handle = find(job, given)
    with handle.master() as master:
        master.stop("elasticdl stop", checkpoint=not (no_checkpoint or now), now=now)
    status = handle.wait_until_over(handle.spec().stop_grace + CLOSING_TIME)
    print(f"job {handle.name} {status.phase} at step {status.step}" if status else f"job {handle.name} is gone")
    return 0


@command(
    click.Argument(["job"], metavar="JOB", help="name of the job"),
    *PLACE,
    help="Remove a job on a Kubernetes cluster: it ends at once, and nothing of it stays.",
)
def delete(job: str, **given: Any) -> int:
    print(cluster_module("cluster_job").delete(job, given["namespace"], given["kube_context"]))
    return 0
