"""Which job is meant, and where. The cluster's side needs the package ``kubernetes``, which not everybody has."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import click

from elasticdl.cli.job_handle import JobHandle
from elasticdl.cli.local.local_jobs import LocalJob, find_job
from elasticdl.cli.parsing import Option
from elasticdl.common.errors import ElasticDLError, UserError

_MISSING = 'jobs on a cluster need the package {}: pip install "elasticdl[kubernetes]"'
Given = Mapping[str, Any]


def job_argument(text: str = "name of the job; may be left out if only one runs") -> click.Argument:
    return click.Argument(["job"], required=False, metavar="[JOB]", help=text)


def place_options() -> list[Option]:
    return [
        Option(["--namespace"], default="", help="namespace of a job on a Kubernetes cluster"),
        Option(["--kube_context"], default="", metavar="CONTEXT", help="context of the kubeconfig"),
    ]


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
        raise UserError(_MISSING.format(missing)) from None


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
    except UserError as error:
        elsewhere = _find_elsewhere(name, str(error)) if name else None
        if elsewhere is None:
            raise
        return elsewhere


def list_on_cluster(given: Given) -> Sequence[JobHandle]:
    """Raises as `find`."""
    jobs: Sequence[JobHandle] = cluster_module("cluster_job").list_jobs(given["namespace"], given["kube_context"])
    return jobs


def list_current() -> Sequence[JobHandle]:
    """The jobs of the kubeconfig's current context; none without the package, or without a kubeconfig.

    Raises:
        UserError: it can't be used.
        UnreachableError: the cluster does not answer.
    """
    return cluster_module("cluster_job").list_jobs("", "") if _is_configured() else []


def _find_elsewhere(name: str, not_here: str) -> JobHandle | None:
    try:
        return cluster_module("cluster_job").find_current(name) if _is_configured() else None
    except ElasticDLError as error:
        raise UserError(f"{not_here}; {error}") from None


def _is_configured() -> bool:
    """Whether there is a cluster to be asked, and the package to ask it."""
    try:
        return bool(cluster_module("cluster_job").is_configured())
    except UserError:
        return False
