"""Which job is meant, and where; what is to be seen of jobs, also after their end (``status``, ``list``, ``events``, ``logs``), and what
changes one that is there (``scale``, ``stop``, ``delete``).

The cluster's side needs the package ``kubernetes``, which not everybody has.
"""

from __future__ import annotations

import builtins
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import click
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from elasticdl.cli import screens
from elasticdl.cli.folder_job import goes_on, handle_of
from elasticdl.cli.follow import follow as follow_to_end
from elasticdl.cli.job_handle import JobHandle, choose, statuses_of
from elasticdl.cli.parsing import Option, command
from elasticdl.cli.screens import render, tell
from elasticdl.common.errors import ElasticDLError, UserError, import_extra
from elasticdl.job.facts import Facts
from elasticdl.job.jobdir import list_jobs
from elasticdl.job.journal import STEPS, metrics_text, parse_entry
from elasticdl.job.spec import MOST_WORKERS, WorkerRange, Workers
from elasticdl.kube.kubeconfig import ClusterTarget, is_configured

# Seconds that a master closes its places, at the most, once its workers have had their grace, and those that it then kills as much again.
CLOSING_TIME = 90.0
FOLLOW = Option(["-f", "--follow"], is_flag=True, help="go on until the job has ended")
Given = Mapping[str, Any]  # values of options, with those of PLACE


def job_argument(text: str = "name of the job; may be left out if only one runs") -> click.Argument:
    return click.Argument(["job"], required=False, metavar="[JOB]", help=text, shell_complete=names_here)


def names_here(ctx: click.Context, param: click.Parameter, begun: str) -> builtins.list[str]:
    """For a shell that completes a name: jobs of this machine, as a cluster may take long to answer."""
    return [job.name for job in list_jobs() if job.name.startswith(begun)]


PLACE = (
    Option(["--namespace"], default="", help="namespace of a job on a Kubernetes cluster"),
    Option(["--kube_context"], default="", metavar="CONTEXT", help="context of the kubeconfig"),
)


def place_of(given: Given) -> ClusterTarget | None:
    """That is given on a cluster, if one is."""
    namespace, context = given["namespace"], given["kube_context"]
    return ClusterTarget(namespace, context) if namespace or context else None


def cluster_module(name: str) -> Any:
    """A module of `elasticdl.cli` for jobs on a cluster."""
    return import_extra(f"elasticdl.cli.{name}", "jobs on a cluster", "kubernetes")


def find(name: str | None, given: Given) -> JobHandle:
    """The job that is meant: of this machine, unless a place on a cluster is given or there is none of that name here.

    No cluster is asked where one is: it might be waited for.

    Raises:
        UserError: there is none, or which one is meant is not clear.
        UnreachableError: the cluster does not answer.
    """
    if place := place_of(given):
        job: JobHandle = cluster_module("namespace_job").find(name, place)
        return job
    try:
        return _find_here(name)
    except UserError as not_here:
        cluster = _current_cluster() if name else None
        if cluster is None:
            raise
        try:
            there: JobHandle = cluster.find(name, ClusterTarget())
        except ElasticDLError as error:
            raise UserError(f"on this machine {not_here}; {error}") from None
        return there


def _find_here(name: str | None) -> JobHandle:
    jobs = {job.name: job for job in list_jobs()}
    newest = f" (newest jobs: {', '.join([*jobs][:8])})" if jobs else " (there are none on this machine)"
    running = [] if name else [each for each, job in jobs.items() if goes_on(job)]  # a batch system is asked for each
    chosen = choose(name, jobs, running, hint=newest)
    return handle_of(jobs[chosen])


def all_jobs(given: Given, say: Callable[[str], object] = lambda text: tell(f"warning: {text}")) -> Sequence[JobHandle]:
    """What is on this machine is shown also when the cluster does not answer, which is said. Raises as `find` for a place that is given."""
    if place := place_of(given):
        jobs: Sequence[JobHandle] = cluster_module("namespace_job").list_jobs(place)
        return jobs
    here = [handle_of(job) for job in list_jobs()]
    try:
        cluster = _current_cluster()
        return [*here, *(cluster.list_jobs(ClusterTarget()) if cluster else ())]
    except ElasticDLError as error:
        say(f"the cluster's jobs are missing: {error}")
        return here


def _current_cluster() -> Any:
    """The module of a cluster's jobs, if there is a cluster to be asked, and the package to ask it."""
    if not is_configured(ClusterTarget()):
        return None
    try:
        return cluster_module("namespace_job")
    except UserError:
        return None


@command(
    job_argument("name of the job; all jobs if not given"),
    *PLACE,
    Option(["--json", "as_json"], is_flag=True, help="one JSON object; of all jobs one a line"),
    FOLLOW,
    help="Show one job, or all jobs.",
)
def status(job: str | None, follow: bool, as_json: bool, **given: Any) -> int:
    console = _Stdout(highlight=False)
    if follow and as_json:
        raise UserError("status has --json or --follow; `elasticdl events --json --follow` tells programs what happens")
    if follow:
        handle = find(job, given)
        return follow_to_end(handle, handle.spec())
    if as_json:
        for each in [find(job, given).status()] if job is not None else statuses_of(all_jobs(given)):
            print(screens.status_json(each))
    elif job is not None:
        show_one(console, find(job, given))
    else:
        show_all(console, all_jobs(given))
    return 0


class _Stdout(Console):
    def on_broken_pipe(self) -> None:
        """Its reader is gone: rich would exit with 1 here, and `main` has a code for that."""
        raise  # rich calls this where it has caught the error


@command(*PLACE, help="Show all jobs, as `elasticdl status` does without a name.")
def list(**given: Any) -> int:
    show_all(_Stdout(highlight=False), all_jobs(given))
    return 0


def show_all(console: Console, jobs: Sequence[JobHandle]) -> None:
    if not jobs:
        console.print("there are no jobs")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    elsewhere = any(job.namespace for job in jobs)
    rows = [
        {"job": job.name, **({"namespace": job.namespace} if elsewhere else {}), **found}
        for job, found in zip(jobs, map(screens.facts, statuses_of(jobs)), strict=True)
    ]
    for title in rows[0]:
        table.add_column(title, overflow="fold" if title == "reason" else "ellipsis", no_wrap=title == "job")
    for row in rows:
        table.add_row(*map(Text, row.values()))
    console.print(table)


def show_one(console: Console, job: JobHandle) -> None:
    status = job.status()
    if console.is_terminal:
        console.print(render(status, age=0.0))
    else:
        once = screens.Once()
        print(f"job {status.job_name}: {status.phase}{f': {once(status.reason)}' if status.reason else ''}")
        print(screens.progress_line(status))
        for line in screens.finding_lines(status):
            print(line)
        for worker in status.workers:
            print(screens.worker_line(worker, once, status.phase))
    if status.metrics:
        print(f"metrics: {metrics_text(status.metrics)}")
    print(job.whereabouts)


@command(
    job_argument(),
    *PLACE,
    Option(["--json", "as_json"], is_flag=True, help="one JSON object a line"),
    FOLLOW,
    help="Show what happened in a job: workers, worlds, pauses, evaluations, checkpoints.",
)
def events(job: str | None, follow: bool, as_json: bool, **given: Any) -> int:
    handle = find(job, given)
    with closing(handle.journal(follow=follow)) as journal:
        once = screens.Once()
        for line in journal:
            entry = parse_entry(line)
            if entry and as_json:
                print(line, flush=follow)
            elif entry and entry["event"] != STEPS:  # one a second, which nobody wants to read
                print(screens.event_line(entry, once), flush=follow)
    return 0


@command(
    job_argument(),
    *PLACE,
    Option(["--worker"], type=click.INT, metavar="N", help="only this worker's, as it wrote it"),
    FOLLOW,
    help="Show the logs of a job's master and workers.",
)
def logs(job: str | None, worker: int | None, follow: bool, **given: Any) -> int:
    handle, none = find(job, given), True
    with closing(handle.logs(worker, follow=follow)) as lines:
        for line in lines:
            none = False
            print(line, flush=follow)
    if none:
        tell(f"job {handle.name} has no logs: {handle.over() or 'nothing was printed yet'}")
    return 0


@command(
    click.Argument(
        ["words"],
        nargs=-1,
        metavar="[JOB] N|MIN-MAX",
        shell_complete=names_here,
        help="name of the job, which may be left out if only one runs; workers to have from now on, as in 3 or 2-4",
    ),
    *PLACE,
    help="Change the number of workers of a running job.",
)
def scale(words: Sequence[str], **given: Any) -> int:
    if not words:
        raise click.UsageError("Missing argument 'N|MIN-MAX'.")
    if len(words) > 2:
        raise click.UsageError(f"Got unexpected extra argument ({words[2]}).")
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
    Option(["--now"], is_flag=True, help="end the workers at once, and keep nothing"),
    Option(["--no_checkpoint"], is_flag=True, help="finish the step, but keep nothing"),
    help="Stop a running job: it finishes its step, and what it has trained is kept: the same command goes on from there.",
)
def stop(job: str | None, now: bool, no_checkpoint: bool, **given: Any) -> int:
    handle = find(job, given)
    # Asked first: what can't be read must not be stopped halfway.
    patience = 2 * handle.spec().stop_grace + CLOSING_TIME
    if became := handle.stop_without_master(now=now):
        print(f"job {handle.name} {became}")
        return 0
    with handle.master() as master:
        master.stop("elasticdl stop", checkpoint=not (no_checkpoint or now), now=now)
    status = handle.wait_until_over(patience)
    if status is None:
        raise ElasticDLError(f"job {handle.name} is over, and has not said how it ended: {handle.over()}")
    with closing(handle.journal()) as journal:
        found = Facts().read(journal)
    kept = screens.kept_text(status, found, on_cluster=bool(handle.namespace)) if status.phase == "stopped" else ""
    print(f"job {handle.name} {status.phase} at step {status.step}{f', {kept}' if kept else ''}")
    return 0


@command(
    click.Argument(["job"], metavar="JOB", help="name of the job", shell_complete=names_here),
    *PLACE,
    help="Remove a job on a Kubernetes cluster: it ends at once, and nothing of it stays. Or one of this machine that is over.",
)
def delete(job: str, **given: Any) -> int:
    place = place_of(given)
    if here := [each for each in list_jobs() if each.name == job and not place]:
        if goes_on(here[0]):
            raise UserError(f"job {job} is not over: `elasticdl stop {job}` ends it")
        shutil.rmtree(here[0].path)
        print(f"job {job} deleted, with its folder {here[0].path}")
        return 0
    try:
        print(cluster_module("namespace_job").delete(job, place))
    except UserError as error:
        raise UserError(f"on this machine there is no job {job}; {error}" if not place else str(error)) from None
    return 0
