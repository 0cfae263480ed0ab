"""The way to what needs the package ``kubernetes``, which not everybody has."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from elasticdl.cli.handle import JobHandle
from elasticdl.common.errors import UserError

if TYPE_CHECKING:
    from elasticdl.cli.submission import SubmissionOptions
    from elasticdl.common.spec import JobSpec

MISSING = 'jobs on a cluster need the package {name}: pip install "elasticdl[kubernetes]"'


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"elasticdl.cli.kubernetes.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("elasticdl"):
            raise
        raise UserError(MISSING.format(name=(error.name or "").partition(".")[0])) from None


def find_on_cluster(name: str | None, namespace: str, context: str) -> JobHandle:
    """
    Raises:
        UserError: there is no such job there, or no such place.
        UnreachableError: the cluster does not answer.
    """
    job: JobHandle = _module("job").find(name, namespace, context)
    return job


def find_if_configured(name: str) -> JobHandle | None:
    """The job of the kubeconfig's current context, if there is a kubeconfig and such a job.

    Raises:
        UnreachableError: the cluster does not answer.
    """
    try:
        module = _module("job")
    except UserError:
        return None
    job: JobHandle | None = module.find_if_configured(name)
    return job


def list_if_configured() -> Sequence[JobHandle]:
    """The jobs of the kubeconfig's current context, if there is a kubeconfig.

    Raises:
        UserError: it can't be used.
        UnreachableError: the cluster does not answer.
    """
    try:
        module = _module("job")
    except UserError:
        return []
    jobs: Sequence[JobHandle] = module.list_if_configured()
    return jobs


def list_on_cluster(namespace: str, context: str) -> Sequence[JobHandle]:
    jobs: Sequence[JobHandle] = _module("job").list_jobs(namespace, context)
    return jobs


def delete_on_cluster(name: str, namespace: str, context: str) -> str:
    """Returns what there is to be said about it."""
    said: str = _module("delete").delete(name, namespace, context)
    return said


def run_on_cluster(spec: JobSpec, options: SubmissionOptions) -> int:
    """Submit the job, and follow it unless it is to be left alone; returns the exit code."""
    code: int = _module("launch").run_job(spec, options)
    return code
