"""Which job is meant, and where. The cluster's side needs the package ``kubernetes``, which not everybody has."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from elasticdl.cli.job_handle import JobHandle
from elasticdl.cli.local.local_jobs import LocalJob, find_job
from elasticdl.cli.parsing import Option
from elasticdl.common.errors import ElasticDLError, UserError
from elasticdl.common.extras import how_to_install
from elasticdl.job.jobdir import list_jobs

Given = Mapping[str, Any]


def job_argument(text: str = "name of the job; may be left out if only one runs") -> click.Argument:
    return click.Argument(["job"], required=False, metavar="[JOB]", help=text)


PLACE = (
    Option(["--namespace"], default="", help="namespace of a job on a Kubernetes cluster"),
    Option(["--kube_context"], default="", metavar="CONTEXT", help="context of the kubeconfig"),
)


def cluster_module(name: str) -> Any:
    """A module of `elasticdl.cli.cluster`.

    Raises:
        UserError: the package ``kubernetes`` is missing, or one that it needs.
    """
    try:
        return importlib.import_module(f"elasticdl.cli.cluster.{name}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "elasticdl":
            raise
        raise UserError(f"jobs on a cluster need the package {missing}: {how_to_install('kubernetes')}") from None


def find(name: str | None, given: Given) -> JobHandle:
    """The job that is meant: of this machine unless a place on a cluster is given, or no job here has its name.

    Raises:
        UserError: there is none, or which one is meant is not clear.
        UnreachableError: the cluster does not answer.
    """
    if given["namespace"] or given["kube_context"]:
        job: JobHandle = cluster_module("cluster_job").find(name, given["namespace"], given["kube_context"])
        return job
    try:
        return LocalJob(find_job(name))
    except UserError as not_here:
        cluster = _current_cluster() if name else None
        try:
            elsewhere: JobHandle | None = cluster.find_current(name) if cluster else None
        except ElasticDLError as error:
            raise UserError(f"{not_here}; {error}") from None
        if elsewhere is None:
            raise
        return elsewhere


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def all_jobs(given: Given, warn: Callable[[str], None] = _warn) -> Sequence[JobHandle]:
    """What is on this machine is shown also when the cluster does not answer. Raises as `find` for a place that is given."""
    if given["namespace"] or given["kube_context"]:
        jobs: Sequence[JobHandle] = cluster_module("cluster_job").list_jobs(given["namespace"], given["kube_context"])
        return jobs
    here = [LocalJob(job) for job in list_jobs()]
    try:
        cluster = _current_cluster()
        return [*here, *(cluster.list_jobs("", "") if cluster else ())]
    except ElasticDLError as error:
        warn(f"the cluster's jobs are missing: {error}")
        return here


def _current_cluster() -> Any:
    """The module of a cluster's jobs, if there is a cluster to be asked, and the package to ask it."""
    if not cluster_module("configured").is_configured():
        return None
    try:
        return cluster_module("cluster_job")
    except UserError:
        return None
