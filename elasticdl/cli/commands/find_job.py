"""Which job is meant, and where. The cluster's side needs the package ``kubernetes``, which not everybody has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from elasticdl.cli.folder_job import goes_on, handle_of
from elasticdl.cli.job_handle import JobHandle, choose
from elasticdl.cli.parsing import Option
from elasticdl.cli.screens import tell
from elasticdl.common.errors import ElasticDLError, UserError, import_extra
from elasticdl.job.jobdir import list_jobs
from elasticdl.kube.kubeconfig import ClusterTarget, is_configured

Given = Mapping[str, Any]  # values of options, with those of PLACE


def job_argument(text: str = "name of the job; may be left out if only one runs") -> click.Argument:
    return click.Argument(["job"], required=False, metavar="[JOB]", help=text, shell_complete=names_here)


def names_here(ctx: click.Context, param: click.Parameter, begun: str) -> list[str]:
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
        try:
            elsewhere = _find_on_cluster(name)
        except ElasticDLError as error:
            raise UserError(f"on this machine {not_here}; {error}") from None
        if elsewhere is None:
            raise
        return elsewhere


def _find_here(name: str | None) -> JobHandle:
    jobs = {job.name: job for job in list_jobs()}
    newest = f" (newest jobs: {', '.join(list(jobs)[:8])})" if jobs else " (there are none on this machine)"
    running = [] if name else [each for each, job in jobs.items() if goes_on(job)]  # a batch system is asked for each
    chosen = choose(name, jobs, running, hint=newest)
    return handle_of(jobs[chosen])


def _find_on_cluster(name: str | None) -> JobHandle | None:
    """Of the kubeconfig's current context, if there is one."""
    cluster = _current_cluster() if name else None
    found: JobHandle | None = cluster.find_current(name) if cluster else None
    return found


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
