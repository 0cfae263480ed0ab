"""What is to be done with a job on a cluster: the options of ``train`` and ``run`` that are not the job's own."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from elasticdl.cli.launch import run_job
from elasticdl.cli.on_cluster import run_on_cluster
from elasticdl.cli.parser import Parser
from elasticdl.common.errors import UserError
from elasticdl.common.spec import JobSpec


@dataclass(frozen=True, slots=True)
class SubmissionOptions:
    yaml: str = ""
    dry_run: bool = False
    detach: bool = False


def add_submission_options(parser: Parser) -> None:
    section = parser.add_argument_group("Submission to Kubernetes")
    section.add_argument(
        "--yaml",
        default="",
        metavar="FILE",
        help="write the job's objects to this file instead of submitting them; it holds the job's secret keys",
    )
    section.add_argument(
        "--dry_run",
        action="store_true",
        help="ask the cluster whether it would take the job, and print its objects; nothing is made",
    )
    section.add_argument("--detach", action="store_true", help="do not follow the job once it is submitted")


def read_submission_options(given: argparse.Namespace) -> SubmissionOptions:
    return SubmissionOptions(given.yaml, given.dry_run, given.detach)


def run_anywhere(spec: JobSpec, options: SubmissionOptions) -> int:
    """Run the job on this machine or, with an image, on a cluster; returns the exit code.

    Raises:
        UserError: something is wrong with the job; nothing was started.
        JobFailedError: the job failed.
    """
    if spec.image:
        return run_on_cluster(spec, options)
    for flag, used in (("--yaml", options.yaml), ("--dry_run", options.dry_run), ("--detach", options.detach)):
        if used:
            raise UserError(f"{flag} is for a job on a Kubernetes cluster: give --image as well, or leave it out")
    return run_job(spec)
