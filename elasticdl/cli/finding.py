"""Which job is meant, and where: what the commands for jobs have in common."""

from __future__ import annotations

import argparse

from elasticdl.cli.handle import JobHandle
from elasticdl.cli.jobs import find_job
from elasticdl.cli.local_job import LocalJob
from elasticdl.cli.on_cluster import find_if_configured, find_on_cluster
from elasticdl.cli.parser import Parser
from elasticdl.common.errors import ElasticDLError, UserError

JOB_HELP = "name of the job; may be left out if only one runs"


def add_job(parser: Parser, text: str = JOB_HELP) -> None:
    """Add the job, and where it is if not on this machine."""
    parser.add_argument("job", nargs="?", help=text)
    add_place(parser)


def add_place(parser: Parser) -> None:
    parser.add_argument("--namespace", default="", help="namespace of a job on a Kubernetes cluster")
    parser.add_argument("--kube_context", default="", metavar="CONTEXT", help="context of the kubeconfig")


def find(given: argparse.Namespace) -> JobHandle:
    """The job that is meant: of this machine unless a place on a cluster is given, or no job here has its name.

    Raises:
        UserError: there is none, or which one is meant is not clear.
    """
    if given.namespace or given.kube_context:
        return find_on_cluster(given.job, given.namespace, given.kube_context)
    try:
        return LocalJob(find_job(given.job))
    except UserError as error:
        job = _find_elsewhere(given.job, str(error)) if given.job else None
        if job is None:
            raise
        return job


def _find_elsewhere(name: str, not_here: str) -> JobHandle | None:
    try:
        return find_if_configured(name)
    except ElasticDLError as error:
        raise UserError(f"{not_here}; {error}") from None
